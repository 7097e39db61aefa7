"""The whole story of a smaller model: a LLaMA is trained on Python's own sources, made
smaller in four ways at equal FLOPs, recovered, written to files, and measured in three
runtimes.

    python examples/story.py
    python examples/story.py --quick
    python examples/story.py --steps 300 --recover 60

Each stage leaves its files in `out/story`. A run that was killed goes on where it was:
a stage whose files are there, made with the same options, is not run again. The page
is `out/story.md`, and its figure `out/story.png`. Needs the extras `llm` and `recipes`.
"""

import argparse
import contextlib
import io
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import transformers
from _options import at_least, make_folder
from _progress import progress
from _story_model import Plan, Text, bits, by_counts, llama, logits_of, read, train
from _story_model import windows_of, write
from _story_report import draw, page, table
from torch import Tensor, nn

import sparsefn as sf

FULL = Plan(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=1024,
    window=128,
    batch=8,
    steps=600,
    recover=60,
    windows=64,
    repeats=30,
    modules=1000,
    characters=10_000_000,
)
QUICK = FULL._replace(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    window=32,
    steps=12,
    recover=4,
    windows=8,
    repeats=3,
    modules=6,
    characters=4096,
)
RATE, RECOVERY_RATE = 3e-3, 1e-3  # peak learning rates
WAYS = ("width", "depth", "width + depth", "2:4")

Found = dict[str, Any]


# ---- stages --------------------------------------------------------------------------


def stage(file: Path, about: Found, make: Callable[[], Found]) -> Found:
    """What a stage left in a file, or else what it makes and leaves there now."""
    if file.exists():
        # written by this script: it holds modules
        found = torch.load(file, weights_only=False)
        if found["about"] == about:
            print(f"{file.stem}: is there")
            return found
    begin = time.process_time()
    made = {"about": about, **make(), "seconds": time.process_time() - begin}
    write(file, made)
    print(f"{file.stem}: {made['seconds']:.0f} s of one core", flush=True)
    return made


def slug(way: str) -> str:
    """The name of a way in the names of files."""
    return way.replace(" + ", "_").replace(":", "_")


def example(plan: Plan) -> dict[str, Any]:
    """What one call gets: one window. A cache among the outputs cannot be traced."""
    ids = torch.arange(plan.window)[None] % plan.vocab_size
    return {"input_ids": ids, "use_cache": False}


def matrices(model: nn.Module) -> list[str]:
    """The weights of the linear layers inside the blocks, by name."""
    named = model.named_parameters()
    return [path for path, p in named if ".layers." in path and p.ndim == 2]


# ---- smaller models ------------------------------------------------------------------


def unit_values(
    model: nn.Module, pattern: sf.patterns.Pattern, ids: Tensor, chunk: int
) -> dict[str, Tensor]:
    """What the units of each set are worth: the sum of |weight * gradient| over their
    weights.
    """
    params = sf.modules.params_of(model)
    grads = {path: torch.zeros_like(p) for path, p in params.items()}

    for part in ids.split(chunk):

        def loss(params: Any, part: Tensor = part) -> Tensor:
            return sf.modules.call(
                model, params, input_ids=part, labels=part, use_cache=False
            ).loss

        _, found = sf.modules.value_and_grad(loss)(params)
        grads = {path: grads[path] + found[path] for path in grads}
    score = sf.scores.by_unit(sf.scores.saliency, pattern, lambda x: x.sum(-1))
    dense = sf.one_shot(0.0, pattern=pattern).init(params)
    return score(dense, grads, 0)


def without_units(model: nn.Module, way: str, ids: Tensor, plan: Plan) -> Found:
    """A model with as many FLOPs as half of its layers leave: narrower, shallower, or
    both.
    """
    x = example(plan)
    groups = None
    if way != "depth":
        groups = sf.shrinking.groups(model, x)
    layers = sf.shrinking.layers(model, x, by="module", widths=groups)
    limit = layers.cost(range(len(layers) // 2), "flops")
    params = sf.modules.params_of(model)

    if way == "width":
        units = groups
        # a config has one inner width and one number of heads for all layers, and
        # LlamaConfig wants heads that divide the hidden size
        alike = {"*.mlp.*": 8, "*.self_attn.*": 2}
        budget = sf.budgets.in_multiples(
            sf.budgets.within(limit, groups, "flops"), alike, equal_across=list(alike)
        )
    else:
        units = layers
        budget = sf.budgets.within(limit, layers, "flops")

    pattern = units.pattern()
    values = unit_values(model, pattern, ids, plan.batch)
    if way != "width":
        # of a layer we can afford to try what the model does without it
        def loss(params: Any) -> Tensor:
            with torch.no_grad():
                return sf.modules.call(
                    model, params, input_ids=ids, labels=ids, use_cache=False
                ).loss

        # the set of layers is the last one of the pattern
        values[list(values)[-1]] = sf.shrinking.loss_without(layers, params, loss)
    score = sf.scores.of_units(values, pattern)
    prune = sf.one_shot(1.0, score, pattern=pattern, distribution=budget, where="*")
    state = prune.update(prune.init(params), params, 0)
    made = sf.shrinking.smaller(model, state, x, groups=units)
    return {"model": made.module, "masks": None, "flops": budget.cost}


def two_of_four(model: nn.Module, ids: Tensor, plan: Plan) -> Found:
    """2 of each 4 weights of every matrix in the blocks stay, by SparseGPT."""
    where = matrices(model)
    blocks = [f"model.layers.{i}.*" for i in range(plan.num_hidden_layers)]
    state = sf.calibration.in_order(
        model,
        None,
        blocks,
        lambda stats: sf.methods.sparsegpt(
            None, stats, pattern=sf.patterns.nm(2, 4), where=where
        ),
        {"input_ids": ids},
        chunk_size=plan.batch,
    )
    masks = {path: state.masks[path] for path in where}
    # matrices count as half: what else is multiplied, such as scores of attention, whole
    dense = sf.shrinking.weights(model, example(plan)).priced("flops", None, False, None)
    whole = dense.cost(list(dense.sizes.values()))
    halves = sum(mask.numel() for mask in masks.values()) * plan.window
    return {"model": sf.modules.bake(model, state), "masks": masks, "flops": whole - halves}


def recovered(dense: nn.Module, found: Found, text: Text, plan: Plan, bar: Any) -> Found:
    """The smaller model after it learned from the answers of the dense one."""
    model, teacher, student = found["model"], logits_of(dense), logits_of(found["model"])

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            answers = teacher(ids)
        return sf.recovery.kl(student(ids), answers)

    for p in model.parameters():
        p.requires_grad_(True)
    train(
        model,
        loss,
        text,
        plan,
        plan.recover,
        RECOVERY_RATE,
        bar,
        masks=found["masks"],
    )
    for path, mask in (found["masks"] or {}).items():
        assert not model.get_parameter(path)[~mask].any()
    return {"model": model}
