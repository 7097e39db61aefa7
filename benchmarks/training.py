"""What masks add to a step: of the optimizer, and of training, and to a compiled one.

    python benchmarks/training.py
    python benchmarks/training.py --quick

Weights after a step of training are held against those of `torch.nn.utils.prune`, masks
of compiled steps against the eager ones. The quick run compiles nothing.
"""

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import optree
import torch
import torchopt
from _models import Transformer, convnet, normal_tree, resnet50_shapes
from _timing import Case, Row, compare, options_of, row, show, write
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

import sparsefn as sf
from sparsefn.core.state import Trigger

SPARSITY, RATE = 0.9, 1e-3
COMPILED = (784, 300, 100, 10)  # widths of the MLP whose steps are compiled
# ends the names of steps that do not ask whether global variables are the same
FEWER = ", fewer guards"
LOOP = 100  # compiled steps that are timed together
# This library's and torch's of the same name.
OPTIMIZERS: dict[
    str,
    tuple[sf.optimizers.Optimizer, Callable[[Iterable[Tensor]], torch.optim.Optimizer]],
] = {
    "SGD": (sf.optimizers.sgd(RATE), partial(torch.optim.SGD, lr=RATE)),
    "AdamW": (sf.optimizers.adamw(RATE), partial(torch.optim.AdamW, lr=RATE)),
}
Leaves = dict[str, Tensor]


def optimizer_cases(shapes: Sequence[tuple[int, ...]]) -> list[Case]:
    """Adam on these weights: TorchOpt's bare, inside a fixed mask, inside RigL between
    two changes, and ours.

    Torch takes longer for the root of a zero than for others, and so TorchOpt's Adam
    for masked gradients.
    """
    weights, grads, adam = (
        normal_tree(shapes, 0),
        normal_tree(shapes, 1),
        torchopt.adam(RATE),
    )

    def bare(optimizer: Any, weights: Leaves, grads: Leaves) -> Callable[[], Any]:
        memory = optimizer.init(weights)

        def step() -> Any:
            updates, new = optimizer.update(
                grads, memory, params=weights, inplace=False
            )
            return torchopt.apply_updates(weights, updates, inplace=False), new

        return step

    def inside(algorithm: sf.Algorithm, optimizer: Any) -> Callable[[], Any]:
        whole = sf.with_optimizer(algorithm, optimizer)
        state = whole.init(weights)
        return lambda: whole.update(state, grads, 1)

    static = sf.static(SPARSITY, init="magnitude")
    resting = sf.rigl(SPARSITY, when=sf.every(100), init="magnitude")
    masks = static.init(weights).masks
    masked = [sf.apply_masks(tree, masks) for tree in (weights, grads)]
    return [
        Case("TorchOpt's adam, dense", bare(adam, weights, grads)),
        Case("TorchOpt's adam, on masked weights and gradients", bare(adam, *masked)),
        Case(
            "with_optimizer(static, TorchOpt's adam)",
            inside(static, torchopt.adam(RATE)),
        ),
        Case(
            "with_optimizer(rigl at rest, the same)",
            inside(resting, torchopt.adam(RATE)),
        ),
        Case("sparsefn's adam, dense", bare(sf.optimizers.adam(RATE), weights, grads)),
        Case(
            "with_optimizer(rigl at rest, sparsefn's adam)",
            inside(resting, sf.optimizers.adam(RATE)),
        ),
    ]


def training_cases(
    model: nn.Module, x: Tensor, y: Tensor, optimized_by: str = "SGD"
) -> list[Case]:
    """A step: dense, with a fixed mask, functional and attached, and with the hooks of
    torch.nn.utils.prune.
    """
    ours, theirs = OPTIMIZERS[optimized_by]
    params = sf.modules.params_of(model)

    def loss(params: Leaves) -> Tensor:
        return functional.cross_entropy(
            torch.func.functional_call(model, params, (x,)), y
        )

    differentiate = sf.modules.value_and_grad(loss)

    def dense(gradient: Callable[[Leaves], Leaves]) -> Callable[[], Leaves]:
        def step() -> Leaves:
            grads = gradient(params)
            return {path: p - RATE * grads[path] for path, p in params.items()}

        return step

    # The hook of a layer runs when the layer is called: nn.MultiheadAttention reads
    # out_proj's weight without.
    def where(path: str, leaf: Tensor) -> bool:
        return sf.default_where(path, leaf) and "out_proj" not in path

    static = sf.static(SPARSITY, where=where, init="magnitude")
    algorithm = sf.with_optimizer(static, ours)
    start = algorithm.init(params)

    def masked(state: sf.State) -> sf.State:
        return algorithm.update(state, differentiate(sf.effective(state))[1], 0)

    def carrying(
        algorithm: sf.Algorithm, weights: Callable[[sf.State], Leaves] = sf.effective
    ) -> Callable[[], None]:
        # The state of the last call is this one's: what a loop holds.
        states = [algorithm.init(params)]

        def step() -> None:
            states[0] = algorithm.update(
                states[0], differentiate(weights(states[0]))[1], 0
            )

        return step

    hooked = copy.deepcopy(model)
    for path, mask in start.masks.items():
        if mask.ndim:
            owner, _, name = path.rpartition(".")
            prune.custom_from_mask(hooked.get_submodule(owner), name, mask)

    def stepping(
        module: nn.Module, algorithm: sf.Algorithm | None = None
    ) -> Callable[[], None]:
        optimizer = theirs(module.parameters())
        sparse, steps = (
            None if algorithm is None else sf.attach(algorithm, module, optimizer),
            itertools.count(1),
        )

        def step() -> None:
            optimizer.zero_grad()
            functional.cross_entropy(module(x), y).backward()
            if sparse is not None:
                sparse.before_step()
            optimizer.step()
            if sparse is not None:
                sparse.after_step(next(steps))

        return step

    by_hooks = stepping(hooked)
    by_hooks()
    named = dict(hooked.named_parameters())
    for path, weight in sf.effective(masked(start)).items():
        mask = start.masks[path]
        other = (
            named[f"{path}_orig"].detach() * mask if mask.ndim else named[path].detach()
        )
        torch.testing.assert_close(
            weight, other, msg=lambda text, at=path: f"weights at {at}: {text}"
        )
    resting = sf.rigl(SPARSITY, where=where, when=sf.never(), steps=1)
    by_hand = [
        Case("dense, functional", dense(lambda params: differentiate(params)[1])),
        Case("dense, torch.func.grad", dense(torch.func.grad(loss))),
    ]
    return [
        *(by_hand if optimized_by == "SGD" else []),
        Case("sparsefn.static, with_optimizer", carrying(algorithm)),
        Case("the same, donated", carrying(sf.donated(algorithm))),
        Case(
            "the same, at state.params",
            carrying(sf.donated(algorithm), lambda state: state.params),
        ),
        Case("torch.nn.utils.prune, torch.optim", by_hooks),
        Case(
            "sparsefn.attach(static), torch.optim",
            stepping(copy.deepcopy(model), static),
        ),
        Case(
            "sparsefn.attach(rigl at rest), torch.optim",
            stepping(copy.deepcopy(model), resting),
        ),
        Case("dense, torch.optim", stepping(copy.deepcopy(model))),
    ]


def changing_cases(shapes: Sequence[tuple[int, ...]]) -> list[Case]:
    """Updates that change masks, with AdamW: pure, and over a copy of the state."""
    weights, grads = normal_tree(shapes, 0), normal_tree(shapes, 1)
    cases = []
    for name, algorithm in {
        "rigl": sf.rigl(SPARSITY, when=sf.always()),
        "set": sf.set(SPARSITY, when=sf.always()),
        "gmp": sf.gmp(sf.schedules.polynomial(0.0, SPARSITY, begin=0, end=2)),
        "gmp, global_": sf.gmp(
            sf.schedules.polynomial(0.0, SPARSITY, begin=0, end=2),
            distribution=sf.budgets.global_(),
        ),
    }.items():
        pure = sf.with_optimizer(algorithm, OPTIMIZERS["AdamW"][0])
        start = partial(
            optree.tree_map, torch.clone, pure.update(pure.init(weights), grads, 0)
        )
        for words, whole in (("", pure), (", donated", sf.donated(pure))):
            cases.append(
                Case(
                    name + words,
                    lambda state, whole=whole: whole.update(state, grads, 1),
                    start,
                )
            )
    return cases


# A step from a state to the next one, and the first state.
Steps = dict[str, tuple[Callable[[Any], Any], Any]]


def steps_to_compile(widths: Sequence[int], when: Trigger) -> Steps:
    """Adam alone on the weights of an MLP, and with RigL that changes masks at a
    trigger: all guards, and fewer.
    """
    shapes = [
        shape
        for inside, outside in itertools.pairwise(widths)
        for shape in ((outside, inside), (outside,))
    ]
    weights, grads, adam = (
        normal_tree(shapes, 0),
        normal_tree(shapes, 1),
        sf.optimizers.adam(RATE),
    )

    def alone(held: tuple[Leaves, Any]) -> tuple[Leaves, Any]:
        updates, memory = adam.update(grads, held[1], params=held[0], inplace=False)
        return {
            path: weight + updates[path] for path, weight in held[0].items()
        }, memory

    def inside(
        algorithm: sf.Algorithm,
    ) -> tuple[Callable[[sf.State], sf.State], sf.State]:
        step = torch.tensor(1)

        def run(state: sf.State) -> sf.State:
            return algorithm.update(state, grads, step)

        # graphs of one code are tried one after another
        run.__code__ = run.__code__.replace()
        return run, algorithm.init(weights)

    plain = sf.with_optimizer(sf.rigl(SPARSITY, when=when, init="magnitude"), adam)
    return {
        "Adam alone": (alone, (weights, adam.init(weights))),
        "with_optimizer(rigl)": inside(plain),
        f"with_optimizer(rigl){FEWER}": inside(plain),
    }


def compiled_step(
    name: str, step: Callable[[Any], Any], backend: str
) -> Callable[[Any], Any]:
    """The step, compiled whole."""
    fewer = (
        {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
        if name.endswith(FEWER)
        else None
    )
    return torch.compile(step, fullgraph=True, backend=backend, options=fewer)  # type: ignore[arg-type]


def compiled_cases(steps: Steps, backend: str) -> list[Case]:
    """Compiled steps in loops, each on the state that the last one left."""

    def carrying(step: Callable[[Any], Any], first: Any) -> Callable[[], None]:
        held = [first]

        def run() -> None:
            for _ in range(LOOP):
                held[0] = step(held[0])

        return run

    cases = []
    for name, (step, first) in steps.items():
        compiled = compiled_step(name, step, backend)
        if isinstance(first, sf.State):
            ours, eager = compiled(first), step(first)
            torch.testing.assert_close(ours.params, eager.params)
            if not all(
                torch.equal(mask, eager.masks[path])
                for path, mask in ours.masks.items()
            ):
                raise AssertionError(f"{name}: masks")
        cases.append(Case(f"{name}, compiled", carrying(compiled, first)))
    return cases


def compile_times(title: str, steps: Steps, backend: str, rounds: int) -> list[Row]:
    """Seconds from a step as written to its first result, in turn, with nothing kept
    from one time to the next.
    """
    from torch._inductor.utils import fresh_cache

    # the first time, the compiler itself is imported
    torch.compile(torch.neg, backend=backend)(torch.ones(2))
    taken: list[list[float]] = []
    for i in range(rounds):
        seconds = dict.fromkeys(steps, 0.0)
        for name in steps if i % 2 == 0 else reversed(steps):
            torch.compiler.reset()
            with fresh_cache():
                start = time.perf_counter()
                compiled_step(name, steps[name][0], backend)(steps[name][1])
                seconds[name] = time.perf_counter() - start
        taken.append(list(seconds.values()))
    rows = [
        row(name, [one[i] for one in taken], [one[0] for one in taken])
        for i, name in enumerate(steps)
    ]
    show(f"{title} ({len(taken)} rounds)", rows)
    return rows


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    divide = 16 if options.smoke else 4 if options.quick else 1
    shapes, what = (
        resnet50_shapes(divide),
        "ResNet-50's 54 weights" + (f", channels / {divide}" if divide > 1 else ""),
    )
    torch.manual_seed(0)
    width, layers, shape = (
        (8, 1, (2, 4))
        if options.smoke
        else (128, 2, (8, 32))
        if options.quick
        else (256, 4, (8, 32))
    )
    encoder, tokens = Transformer(width, layers), torch.randint(0, 128, shape)
    batch, channels, side = (
        (2, 4, 8) if options.smoke else (8, 16, 32) if options.quick else (16, 64, 32)
    )
    network, images, labels = (
        convnet(channels),
        torch.randn(batch, 3, side, side),
        torch.randint(0, 10, (batch,)),
    )
    features = 64 if options.smoke else 1024 if options.quick else 2048
    mlp = nn.Sequential(
        nn.Linear(features, features),
        nn.ReLU(),
        nn.Linear(features, features),
        nn.ReLU(),
    )
    mlp.append(nn.Linear(features, 10))
    rows, classes = torch.randn(128, features), torch.randint(0, 10, (128,))
    small = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10))
    few, their = torch.randn(64, 64), torch.randint(0, 10, (64,))
    size = "" if channels == 64 else f", {channels} channels first"
    steps = {
        f"training step of an MLP {features}-{features}-{features}-10, {name}": name
        for name in OPTIMIZERS
    }
    # tables that measure memory, too
    weights = dict.fromkeys(steps, sum(p.numel() for p in mlp.parameters()))
    changing = (
        f"update of the weights of an MLP {features}-{features}-{features}-10 that "
        "changes masks, AdamW"
    )
    weights[changing] = sum(p.numel() for p in mlp.parameters())
    # The inputs of a table are dropped before the next: the states of ResNet-50 are
    # large.
    tables: dict[str, Callable[[], list[Case]]] = {
        f"step of Adam on {what}": lambda: optimizer_cases(shapes),
        f"training step of a Transformer {layers} x {width}": lambda: training_cases(
            encoder, tokens, tokens.roll(1, 1).flatten()
        ),
        f"training step of a ResNet-18 for 32 x 32{size}": lambda: training_cases(
            network, images, labels
        ),
        **{
            title: partial(training_cases, mlp, rows, classes, name)
            for title, name in steps.items()
        },
        "training step of an MLP 64-300-10, AdamW": partial(
            training_cases, small, few, their, "AdamW"
        ),
        changing: lambda: changing_cases([tuple(p.shape) for p in mlp.parameters()]),
    }
    done = {
        title: compare(title, make(), options, weights.get(title, 0))
        for title, make in tables.items()
    }
    if options.smoke or not options.quick:
        backend, mlp_of = (
            "eager" if options.smoke else "inductor",
            "-".join(map(str, COMPILED)),
        )
        for what, when in (
            ("that changes no mask", sf.never()),
            ("in a graph that may change masks", sf.every(100)),
        ):
            step, compiling = (
                f"step of Adam {what}, on an MLP {mlp_of}",
                steps_to_compile(COMPILED, when),
            )
            title = f"compiling a {step}"
            done[title] = compile_times(
                title, compiling, backend, 1 if options.smoke else 3
            )
            title = f"{LOOP} times a compiled {step}"
            done[title] = compare(title, compiled_cases(compiling, backend), options)
    return done


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("training", main(chosen), chosen)
