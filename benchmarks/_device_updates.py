"""Whole updates on an accelerator: eager, as CUDA graphs, attached to a module, and
beside other optimizers.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from _device import Bench
from _loops import attached_step
from _models import normal_tree, resnet50_shapes
from torch import Tensor, nn

import sparsefn as sf
from sparsefn.core.state import Trigger

NEVER = 10**6  # steps until masks change


def leaves_of(b: Bench, seed: int = 0) -> dict[str, Tensor]:
    """The weights of a ResNet-50 on the device."""
    return {
        path: w.to(b.device)
        for path, w in normal_tree(resnet50_shapes(32 if b.smoke else 1), seed).items()
    }


def algorithms() -> dict[str, tuple[sf.Algorithm, int]]:
    """Algorithms, and a step at which masks change or do not."""
    rigl = sf.rigl(0.9, init="magnitude")
    sgd = sf.with_optimizer(rigl, sf.optimizers.sgd(1e-3))
    adam = sf.with_optimizer(rigl, sf.optimizers.adam(1e-3))
    return {
        "rigl, change": (rigl, 0),
        "set, change": (sf.set(0.9), 0),
        "gmp, change": (sf.gmp(0.9, steps=1000), 0),
        "rigl + sgd, quiet": (sgd, 1),
        "rigl + sgd, change": (sgd, 0),
        "rigl + adam, quiet": (adam, 1),
        "rigl + adam, change": (adam, 0),
    }


def updates(b: Bench) -> None:
    """Whole updates of 54 leaves, eager and replayed."""
    b.begin("whole updates of 54 leaves")
    leaves, grads, others = (leaves_of(b, seed) for seed in (0, 1, 2))
    start = [x.clone() for x in grads.values()]
    for name, (algorithm, step) in algorithms().items():
        state = algorithm.init(leaves)

        def update(a: Any = algorithm, s: Any = state, i: int = step) -> sf.State:
            return a.update(s, grads, i)

        for way in b.ways():
            b.time(name, way, update)
            if b.device.type == "cuda":
                torch._foreach_copy_(list(grads.values()), start)
                b.attempt(
                    f"{name}, graph",
                    way,
                    "ms",
                    lambda run=update: replayed(
                        b, run, list(grads.values()), list(others.values())
                    ),
                )
        b.tidy()


def replayed(
    b: Bench,
    call: Callable[[], Any],
    fixed: Sequence[Tensor],
    others: Sequence[Tensor],
) -> float:
    """The time of a replay, whose results on other inputs must be those of the eager
    call.
    """
    call()
    b.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    for x, other in zip(fixed, others, strict=True):
        x.copy_(other)
    graph.replay()
    pairs = zip(optree.tree_leaves(made), optree.tree_leaves(call()), strict=True)
    if not all(torch.equal(x, y) for x, y in pairs):
        b.wrong += 1
        raise AssertionError("a replay differs from the eager call")
    return b.milliseconds(graph.replay)


def optimizers(b: Bench) -> None:
    """Steps of other optimizers on the same leaves, and of ours attached to them."""
    b.begin("steps of a module with 54 leaves")
    params = [nn.Parameter(w) for w in leaves_of(b).values()]
    grads = list(leaves_of(b, 1).values())
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    kinds = {"foreach": {"foreach": True}}
    if b.device.type == "cuda":
        kinds["fused"] = {"fused": True}
    for kind, options in kinds.items():
        adam = torch.optim.Adam(params, 1e-3, **options)
        b.time("adam, dense", f"torch.optim, {kind}", adam.step)
    b.time("adam, dense", "TorchOpt", torchopt_step(b))
    for name, when in {"quiet": sf.every(NEVER), "change": sf.always()}.items():
        for kind, options in kinds.items():
            for way in b.ways():
                b.attempt(
                    f"rigl attached to torch.optim's adam, {kind}, {name}",
                    way,
                    "ms",
                    lambda w=when, o=options: b.milliseconds(attached_rigl(b, w, o)),
                )
        b.tidy()


def torchopt_step(b: Bench) -> Callable[[], Any]:
    """A step of TorchOpt's Adam; where it is not installed, an error that says so."""
    if importlib.util.find_spec("torchopt") is None:

        def missing() -> None:
            raise ModuleNotFoundError("TorchOpt is not installed")

        return missing
    import torchopt

    weights, grads = leaves_of(b), leaves_of(b, 1)
    optimizer = torchopt.adam(1e-3)
    memory = optimizer.init(weights)

    def step() -> Any:
        moves, new = optimizer.update(grads, memory, params=weights, inplace=False)
        return torchopt.apply_updates(weights, moves, inplace=False), new

    return step


def attached_rigl(
    b: Bench, when: Trigger, options: dict[str, bool]
) -> Callable[[], None]:
    """A step of torch's Adam on a module with RigL attached, gradients given."""
    sparsity = 0.5 if b.smoke else 0.9  # of the smallest leaves something is left
    rigl = sf.rigl(sparsity, steps=10 * NEVER, when=when, init="magnitude")
    grads = list(leaves_of(b, 1).values())
    return attached_step(rigl, leaves_of(b), grads, **options)
