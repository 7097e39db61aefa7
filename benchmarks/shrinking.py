"""What a smaller model costs beside Torch-Pruning: ten models at half of their units,
and a LLaMA 7B without memory.

    python benchmarks/shrinking.py
    python benchmarks/shrinking.py --quick

Both sides find what belongs together, score it by magnitude, and make the model
smaller; of ours `torch.export` is timed apart. Before anything is timed, the outputs of
the smaller program are held against those of the masked model. Torch-Pruning changes a
model in place, so that each call takes a copy, which is not timed; where its model does
not run afterwards, the table says so.
"""

import argparse
import copy
import functools
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from _peers import torch_pruning
from _timing import Case, Row, call, compare, memory_of, options_of, show, write
from torch import Tensor, fx, nn

from sparsefn.shrinking.analysis import analyse
from sparsefn.shrinking.groups import Groups, groups_in
from sparsefn.shrinking.rebuild import program
from sparsefn.shrinking.trace import traced

OURS, PEER, EXPORT = "sparsefn, traced before", "Torch-Pruning", "torch.export alone"


class Dense(nn.Module):
    """Normalises and convolves all that came before, twice, and puts the result beside
    it.
    """

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        norms = [nn.BatchNorm2d(channels), nn.BatchNorm2d(4 * growth)]
        convs = [
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        ]
        self.layers = nn.Sequential(
            *(
                x
                for norm, conv in zip(norms, convs, strict=True)
                for x in (norm, nn.ReLU(), conv)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


def densenet(blocks: tuple[int, ...], growth: int = 32) -> nn.Module:
    """DenseNet-121 has the blocks (6, 12, 24, 16)."""
    channels = 2 * growth
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 7, 2, 3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    ]
    for i, count in enumerate(blocks):
        if i:
            channels //= 2
            layers += [
                nn.BatchNorm2d(2 * channels),
                nn.ReLU(),
                nn.Conv2d(2 * channels, channels, 1),
                nn.AvgPool2d(2),
            ]
        else:
            layers.append(nn.MaxPool2d(3, 2, 1))
        layers += [Dense(channels + k * growth, growth) for k in range(count)]
        channels += count * growth
    layers += [
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(channels, 1000))


class Logits(nn.Module):
    """A model of transformers that returns a tensor."""

    def __init__(self, name: str, **sizes: Any) -> None:
        super().__init__()
        config = getattr(transformers, f"{name}Config")(num_labels=1000, **sizes)
        self.model = getattr(transformers, f"{name}ForImageClassification")(config)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x).logits
        return out


REGNET = {
    "layer_type": "y",
    "embedding_size": 32,
    "hidden_sizes": [48, 104, 208, 440],
    "depths": [1, 3, 6, 6],
}
SMALL = {"hidden_size": 384, "num_attention_heads": 6}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "MobileNet V2": lambda: Logits("MobileNetV2"),
    "RegNet Y 400MF": lambda: Logits("RegNet", groups_width=8, **REGNET),
    "ViT S/16": lambda: Logits("ViT", image_size=96, intermediate_size=1536, **SMALL),
    "ResNet-50": lambda: Logits("ResNet"),
    "DenseNet-121": lambda: densenet((6, 12, 24, 16)),
    "MobileNet V1": lambda: Logits("MobileNetV1"),
    "EfficientNet B0": lambda: Logits(
        "EfficientNet",
        image_size=96,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
    ),
    "ConvNeXt T": lambda: Logits("ConvNext"),
    "DINOv2 B/14": lambda: Logits("Dinov2", image_size=98),
    "SegFormer B0": lambda: Logits("Segformer"),
}


class Sized(NamedTuple):
    """A row of times, with the share of the weights that is left."""

    name: str
    seconds: float
    ratio: float
    low: float
    high: float
    rounds: tuple[float, ...]
    weights: float | None


def weakest(groups: Groups, params: dict[str, Tensor]) -> dict[int, list[int]]:
    """The half of the units of each group whose weights have the smaller sum of
    squares.
    """
    gone, chosen = {}, [(i, group) for i, group in enumerate(groups) if group.preferred]
    members = [
        member
        for _, group in chosen
        for member in group.members
        if member.leaf in params
    ]
    rows: dict[tuple[str, int], Tensor] = {}
    for leaf, x in params.items():
        squares = x.square()
        for dim in {member.dim for member in members if member.leaf == leaf}:
            # faster than all at once
            before = squares.sum(list(range(dim))) if dim else squares
            rows[leaf, dim] = before.reshape(x.shape[dim], -1).sum(1)
    for i, group in chosen:
        scores = torch.zeros(group.size)
        for leaf, dim, units in group.members:
            if leaf in params:
                here = units >= 0
                scores.index_add_(
                    0,
                    torch.from_numpy(units[here]),
                    rows[leaf, dim][torch.from_numpy(here)],
                )
        gone[i] = scores.argsort()[: group.size // 2].tolist()
    return gone


def smaller(
    graph: fx.GraphModule, params: dict[str, Tensor]
) -> tuple[Groups, dict[int, list[int]], nn.Module]:
    """The groups of a traced model, which of their units go, and the program without
    them.
    """
    groups = groups_in(analyse(graph, counted=True, equal_parts=False), {})
    gone = weakest(groups, params)
    return groups, gone, program(groups.cut(gone))


def peer_case(tp: Any, model: nn.Module, x: Tensor) -> Case:
    """Torch-Pruning's steps on a copy."""

    def run(own: nn.Module) -> nn.Module:
        heads = [
            part
            for part in own.modules()
            if isinstance(part, nn.Linear) and part.out_features == 1000
        ]
        magnitude = tp.importance.MagnitudeImportance(p=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it leaves parameters alone
            tp.pruner.BasePruner(
                own, x, magnitude, pruning_ratio=0.5, ignored_layers=heads
            ).step()
        return own

    return Case(PEER, run, lambda: copy.deepcopy(model))


def weights_of(model: nn.Module) -> int:
    """How many parameters a model has."""
    return sum(p.numel() for p in model.parameters())


def compared(name: str, tp: Any, options: argparse.Namespace) -> list[Sized]:
    """The table of one model."""
    torch.manual_seed(0)
    # Torch-Pruning follows gradients
    model, x = (MODELS[name]().eval(), torch.randn(1, 3, 96, 96))
    x = torch.randn(1, 3, 98, 98) if name.startswith("DINO") else x
    graph, params = (
        traced(model, x),
        {path: p.detach() for path, p in model.named_parameters()},
    )
    groups, gone, small = smaller(graph, params)
    masked = {path: params[path] * mask for path, mask in groups.masks(gone).items()}
    wanted = torch.func.functional_call(model, masked, (x,)).detach()
    torch.testing.assert_close(
        small(x).detach(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())
    )
    cases, left = (
        [
            Case(OURS, lambda: smaller(graph, params)),
            Case(EXPORT, lambda: traced(model, x)),
        ],
        {OURS: weights_of(small)},
    )
    if tp is not None:
        cases.append(peer_case(tp, model, x))
        try:
            other = call(cases[-1])
            left[PEER] = weights_of(other)
            other(x)
        except Exception as error:  # of a peer, in any way
            print(
                f"\n{name}: after Torch-Pruning the model fails, "
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
            )
            cases = cases if PEER in left else cases[:2]
    few = argparse.Namespace(**{**vars(options), "rounds": min(options.rounds, 3)})
    rows = compare(f"{name}, {weights_of(model) / 1e6:.1f} million weights", cases, few)
    shares = {key: count / weights_of(model) for key, count in left.items()}
    print(
        ", ".join(
            f"{key}: {share:.3f} of the weights are left"
            for key, share in shares.items()
        )
    )
    return [Sized(*row[:6], shares.get(row.name)) for row in rows]


def language_model(options: argparse.Namespace) -> list[Row]:
    """A LLaMA of 7 billion weights on the meta device, traced and analysed, with the
    memory that this takes.
    """
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 99,
    }
    config = transformers.LlamaConfig(
        use_cache=False, **(sizes if options.smoke else {})
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
        tokens = torch.zeros(1, 16, dtype=torch.long)
    moments: list[float] = []

    def run() -> Groups:
        moments[:] = [time.perf_counter()]
        graph = traced(model, tokens)
        moments.append(time.perf_counter())
        made = groups_in(analyse(graph), {})
        moments.append(time.perf_counter())
        return made

    memory = memory_of(Case("", run))
    if memory is None:
        run()
    export, ours = (b - a for a, b in itertools.pairwise(moments))
    times = {"traced and analysed": export + ours, "analysis": ours, EXPORT: export}
    rows = [
        Row(key, taken, *[taken / (export + ours)] * 3, (taken,))
        for key, taken in times.items()
    ]
    return [
        rows[0]._replace(peak_mib=memory[0], extra=0.0) if memory else rows[0],
        *rows[1:],
    ]


def main(options: argparse.Namespace) -> dict[str, list[Any]]:
    """Every table."""
    tp, done = torch_pruning(), {}
    names = list(MODELS)[: 1 if options.smoke else 3 if options.quick else None]
    if options.smoke:
        MODELS[names[0]] = functools.partial(densenet, (1, 1), 4)
    for name in names:
        done[name] = compared(name, tp, options)
    layers = 1 if options.smoke else 32
    title = f"LLaMA 7B on meta, {layers} layer{'s' * (layers > 1)}"
    done[title] = language_model(options)
    show(title, done[title])
    return done


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("shrinking", main(chosen), chosen)
