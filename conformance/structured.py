"""The second table: models made smaller by this library and by Torch-Pruning, as in
benchmarks/shrinking.py.
"""

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_pruning as tp
import transformers
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from shrinking import MODELS, smaller, weights_of

from sparsefn.shrinking.trace import traced

Row = tuple[str, str, str]  # runs, equal, removed
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


class Language(nn.Module):
    """A language model of transformers that returns a tensor."""

    def __init__(self, kind: str, config: str, **sizes: Any) -> None:
        super().__init__()
        self.model = getattr(transformers, kind)(
            getattr(transformers, config)(vocab_size=99, **sizes)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)[0]
        return out


LANGUAGE: dict[str, Callable[[], nn.Module]] = {
    "BERT, small": lambda: Language("BertModel", "BertConfig", **SIZES),
    "GPT-2, small": lambda: Language(
        "GPT2LMHeadModel", "GPT2Config", n_embd=64, n_head=4, n_layer=2, use_cache=False
    ),
    "LLaMA, small": lambda: Language(
        "LlamaForCausalLM", "LlamaConfig", use_cache=False, **SIZES
    ),
}


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding."""
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def ours(model: nn.Module, x: Tensor) -> Row:
    """Groups, the weaker half of their units, and the program without them."""
    params = {path: p.detach() for path, p in model.named_parameters()}
    groups, gone, small = smaller(traced(model, x), params)
    masked = {path: params[path] * mask for path, mask in groups.masks(gone).items()}
    same = close(small(x), torch.func.functional_call(model, masked, (x,)))
    return (
        "yes",
        "yes" if same else "no",
        f"{1 - weights_of(small) / weights_of(model):.3f}",
    )


def mask(module: Any, kind: str, gone: list[int]) -> None:
    """Zeros where a dependency of theirs removes channels; inputs of grouped layers are
    masked where they come from.
    """
    weight, bias = module.weight, getattr(module, "bias", None)
    if kind == "prune_in_channels" and isinstance(module, nn.Linear | nn.Conv2d):
        if getattr(module, "groups", 1) == 1:
            weight.data[:, gone] = 0
        return
    for x in (weight, bias) if bias is not None else (weight,):
        (x.data.T if isinstance(module, nn.Embedding) else x.data)[gone] = 0


def theirs(model: nn.Module, x: Tensor) -> Row:
    """Their pruner; what it names in each step is masked in a copy."""
    own, masked = copy.deepcopy(model), copy.deepcopy(model)
    names = {part: name for name, part in own.named_modules()}
    heads = [
        part
        for part in own.modules()
        if isinstance(part, nn.Linear) and part.out_features in (99, 1000)
    ]
    compared = True
    pruner = tp.pruner.BasePruner(
        own,
        x,
        tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=heads,
    )
    for group in pruner.step(interactive=True):
        for dependency, gone in group:
            name = names.get(dependency.target.module)
            if name is not None and hasattr(dependency.target.module, "weight"):
                try:
                    mask(
                        masked.get_submodule(name),
                        dependency.handler.__name__,
                        [int(i) for i in gone],
                    )
                except IndexError:  # of this file: a layer that it cannot mask
                    compared = False
        group.prune()
    removed = f"{1 - weights_of(own) / weights_of(model):.3f}"
    try:
        out = own(x)
    except Exception as error:  # of a peer, in any way
        return f"no: {type(error).__name__}", "n/a", removed
    if not compared:
        return "yes", "not run", removed
    return "yes", "yes" if close(out, masked(x)) else "no", removed


def attempt(
    side: Callable[[nn.Module, Tensor], Row], model: nn.Module, x: Tensor
) -> Row:
    """A row, or the error of what makes the model smaller."""
    try:
        return side(model, x)
    except Exception as error:  # of either side
        return f"no: {type(error).__name__}", "n/a", "n/a"


def main() -> None:
    """Print one line of JSON, the last."""
    warnings.simplefilter("ignore")
    rows = []
    for name, make in (MODELS | LANGUAGE).items():
        torch.manual_seed(0)
        model = make().eval()
        size = 98 if name.startswith("DINO") else 96
        x = (
            torch.arange(32).reshape(2, 16)
            if name in LANGUAGE
            else torch.randn(1, 3, size, size)
        )
        rows.append([name, *attempt(ours, model, x), *attempt(theirs, model, x)])
        print(rows[-1], flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
