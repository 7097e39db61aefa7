"""What it costs to prune a language model block by block: LLaMAs of 4, 16 and 64 small
blocks.

    python benchmarks/depth.py
    python benchmarks/depth.py --quick

The base is one forward pass of the model over the calibration data and the solver
alone, which gets the statistics of each block. Where llm-compressor is installed (it
needs another torch than sparsefn's `dev` extra), its `oneshot` prunes the model of 16
blocks beside ours. Before anything is timed, the state is held against that of a run of
the whole model for each block, and llm-compressor's share of zeros against ours.
"""

import argparse
import atexit
import importlib.util
import os
import shutil
import tempfile
from functools import partial
from typing import Any

import torch
import transformers
from _loops import METHODS
from _timing import Case, Row, compare, options_of, write
from torch import Tensor, nn

import sparsefn as sf

CHUNK = 32  # windows at a time


def llama(blocks: int, width: int) -> nn.Module:
    """A LLaMA with random weights."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": blocks,
    }
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, use_cache=False)
    )
    return model.eval().requires_grad_(False)


def globs(blocks: int) -> list[str]:
    """The blocks of a LLaMA."""
    return [f"model.layers.{i}.*" for i in range(blocks)]


def whole(model: nn.Module, blocks: int, method: str, words: Tensor) -> sf.State:
    """The state by a run of the whole model for each block."""
    prune, of = METHODS[method]
    state = sf.dense().init(sf.modules.params_of(model))
    for glob in globs(blocks):
        stats: Any = {}
        for some in words.split(CHUNK):
            new = sf.calibration.inputs(model, state, some, paths=glob, of=of)
            stats = (
                {p: {k: x + new[p][k] for k, x in s.items()} for p, s in stats.items()}
                if stats
                else new
            )
        start = prune(stats).init({path: sf.effective(state)[path] for path in stats})
        done = prune(stats).update(
            start, {path: torch.zeros_like(x) for path, x in start.params.items()}, 0
        )
        state = state._replace(
            params=state.params | done.params, masks=state.masks | done.masks
        )
    return state


def in_order(model: nn.Module, blocks: int, method: str, words: Tensor) -> sf.State:
    """The same, linear in the number of blocks."""
    prune, of = METHODS[method]
    return sf.calibration.in_order(
        model, None, globs(blocks), prune, {"input_ids": words}, of=of, chunk_size=CHUNK
    )


def pruned(
    sizes: tuple[int, int, int, int], method: str, options: argparse.Namespace
) -> list[Case]:
    """Pruning all blocks, over a forward pass and the solver."""
    blocks, width, windows, length = sizes
    model, words = llama(blocks, width), torch.randint(256, (windows, length))
    prune, of = METHODS[method]
    if blocks <= 16:
        state, plain = (
            in_order(model, blocks, method, words),
            whole(model, blocks, method, words),
        )
        if not sf.checkpoint.tree_equal(state, plain):
            raise AssertionError("the states differ")
    every = sf.calibration.inputs(model, None, words, paths=globs(blocks), of=of)
    by_block = [
        {p: s for p, s in every.items() if p.startswith(glob[:-1])}
        for glob in globs(blocks)
    ]
    weights = sf.modules.params_of(model)

    def alone() -> None:
        for some in words.split(CHUNK):
            model(some)
        for stats in by_block:
            algorithm = prune(stats)
            start = algorithm.init({path: weights[path] for path in stats})
            algorithm.update(
                start,
                {path: torch.zeros_like(x) for path, x in start.params.items()},
                0,
            )

    return [
        Case("one forward pass and the solver alone", alone),
        Case(
            "sparsefn.posttraining.calibration.in_order",
            partial(in_order, model, blocks, method, words),
        ),
    ]


def beside(
    sizes: tuple[int, int, int, int], method: str, options: argparse.Namespace
) -> list[Case]:
    """Pruning all blocks, beside llm-compressor's `oneshot`; none where it is
    missing.
    """
    if importlib.util.find_spec("llmcompressor") is None:
        print(
            "\nllm-compressor is left out: it needs another torch; install it and "
            "sparsefn apart"
        )
        return []
    os.environ["LLM_COMPRESSOR_LOG_LEVEL"] = "ERROR"
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    blocks, width, windows, length = sizes
    model, words = llama(blocks, width), torch.randint(256, (windows, length))
    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(256)}, unk_token="0"))
    processor = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="0"
    )
    data = Dataset.from_dict(
        {"input_ids": words.tolist(), "attention_mask": torch.ones_like(words).tolist()}
    )
    kind = {"Wanda": WandaPruningModifier, "SparseGPT": SparseGPTModifier}[method]

    folder = tempfile.mkdtemp()  # it reads the config again
    atexit.register(shutil.rmtree, folder)
    model.save_pretrained(folder)

    def fresh() -> nn.Module:
        own: nn.Module = transformers.LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
        return own.eval()

    def theirs(own: nn.Module) -> nn.Module:
        recipe = kind(
            sparsity=0.5, mask_structure="0:0", targets=[r"re:.*layers\.\d+\..*proj$"]
        )
        limits = {
            "num_calibration_samples": windows,
            "max_seq_length": length,
            "batch_size": CHUNK,
        }
        oneshot(
            model=own,
            dataset=data,
            recipe=recipe,
            pipeline="sequential",
            processor=processor,
            **limits,
        )
        return own

    ours, other = in_order(model, blocks, method, words), theirs(fresh())
    masks = {path: mask for path, mask in ours.masks.items() if mask.ndim}
    zeros = [float((other.get_parameter(path) == 0).float().mean()) for path in masks]
    if len(masks) != 7 * blocks or any(abs(share - 0.5) > 0.01 for share in zeros):
        raise AssertionError(
            f"llm-compressor prunes {min(zeros)} to {max(zeros)} of each weight"
        )
    same = [
        float((other.get_parameter(path) != 0).eq(mask).float().mean())
        for path, mask in masks.items()
    ]
    print(
        f"\nmasks of llm-compressor agree with ours in {min(same):.2%} or more of the "
        "entries of each weight"
    )
    return [
        Case("llm-compressor's oneshot", theirs, fresh),
        Case(
            "sparsefn.posttraining.calibration.in_order",
            partial(in_order, model, blocks, method, words),
        ),
    ]


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    width, windows, length = (
        (16, 4, 8)
        if options.smoke
        else (128, 64, 32)
        if options.quick
        else (256, 128, 32)
    )
    tables = {}
    for method in METHODS:
        for blocks in (4, 16) if options.smoke or options.quick else (4, 16, 64):
            sizes, data = (
                (blocks, width, windows, length),
                f"width {width}, {windows * length} tokens",
            )
            title = f"{method}, {blocks} blocks, {data}"
            # A round of the deepest takes half a minute.
            few = argparse.Namespace(
                **{
                    **vars(options),
                    "rounds": min(options.rounds, 2 if blocks > 16 else 3),
                }
            )
            tables[title] = compare(
                title, pruned(sizes, method, few), few, blocks * 10 * width**2
            )
            if blocks == 16 and (cases := beside(sizes, method, few)):
                title = f"{method}, {blocks} blocks, beside llm-compressor, {data}"
                tables[title] = compare(title, cases, few)
    return tables


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("depth", main(chosen), chosen)
