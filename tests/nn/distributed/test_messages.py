"""What processes say to each other, what each of them holds, what they refuse, and how
they fail together.
"""

import importlib
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Shard,
    _dispatch,
    _redistribute,
    distribute_tensor,
)
from torch.utils._python_dispatch import TorchDispatchMode

import sparsefn as sf
from sparsefn._engine.processes.shards import extent_of, local_tensor, sharded_like
from sparsefn._engine.selection.dispatch import Entry, winners
from sparsefn.testing.harness import equal
from tests.nn.distributed.harness import Cases, on_ranks
from tests.nn.distributed.sharded import SHAPES, Layout, full, layouts, mesh, values

KEY = sf.random.key(3)
SWAP: dict[str, Any] = {"drop_fraction": 0.3, "when": sf.always(), "key": KEY}

ALGORITHMS: dict[str, Callable[[], sf.Algorithm]] = {
    "set": lambda: sf.set(0.5, **SWAP),
    "rigl": lambda: sf.rigl(0.5, **SWAP),
    "rigl erk": lambda: sf.rigl(0.5, distribution=sf.budgets.erk(), **SWAP),
    "gmp": lambda: sf.gmp(0.5),
    "gmp global": lambda: sf.gmp(0.5, distribution=sf.budgets.global_()),
    "snfs": lambda: sf.snfs(0.5, **SWAP),
    "adam rigl": lambda: sf.with_optimizer(
        sf.rigl(0.5, **SWAP), sf.optimizers.adam(1e-2)
    ),
    "block": lambda: sf.one_shot(
        0.5, pattern=sf.patterns.block((4, 4)), when=sf.always()
    ),
}


# ---- sizes ---------------------------------------------------------------------------


class Sizes(TorchDispatchMode):
    """The entries of the largest tensor that is made in this process; of a DTensor its
    part here counts.
    """

    largest, by = 0, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in optree.tree_leaves(out):
            part = getattr(x, "_local_tensor", x)
            # DTensors work out shapes on tensors without values, and messages are
            # bytes.
            if (
                isinstance(part, torch.Tensor)
                and not part.is_meta
                and part.dtype != torch.uint8
            ):
                self.largest, self.by = max(
                    (self.largest, self.by), (part.numel(), f"{func} of {part.device}")
                )
        return out


@contextmanager
def no_more_than(entries: int) -> Iterator[None]:
    """Raise if a tensor of more entries is made."""
    # Not by tracemalloc: it crashes a process in which gloo's threads take the GIL.
    with Sizes() as sizes:
        yield
    assert sizes.largest <= entries, (
        f"a tensor of {sizes.largest} entries is made by {sizes.by}, of {entries} "
        "allowed"
    )


def check_draws(lay: Layout, shape: tuple[int, ...]) -> None:
    """A shard's draws are those of the whole there, and nothing larger than a shard is
    made.
    """
    leaf = lay({"w": torch.zeros(shape)})["w"]
    assert isinstance(leaf, DTensor)
    local = leaf.to_local().numel()
    draws = {
        sf.random.uniform_like: sf.random.uniform,
        sf.random.normal_like: sf.random.normal,
    }
    for draw, whole in draws.items():
        for dtype in (torch.float32, torch.bfloat16):
            with no_more_than(max(local, 2)):  # a key has two numbers
                drawn = draw(KEY, leaf, dtype)
            assert drawn.placements == leaf.placements
            assert equal(full(drawn), whole(KEY, shape, dtype))


def check_sizes(make: Callable[[], sf.Algorithm], lay: Layout) -> None:
    """No tensor of a run is as large as a leaf: none is larger than all shards of this
    process.
    """
    shapes = {"a.weight": (300, 400), "b.weight": (40, 100)}
    params, grads = lay(values(shapes)), lay(values(shapes, seed=1))
    algorithm = make()
    here = 62_000
    with no_more_than(here):
        state = algorithm.update(algorithm.init(params), grads, 0)
    assert sf.masks.n_kept(state.masks)


# ---- messages ------------------------------------------------------------------------

MANY = 50  # leaves at most
SENDS = [
    *(
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
    ),
    *(
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "reduce_scatter",
        "reduce_scatter_tensor",
    ),
]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How many collectives run, and the bytes that this process gets; a gather of a
    leaf is an error.

    `whole`, which is for counts, redistributes a DTensor of one number a leaf.
    """
    seen = {"collectives": 0, "bytes": 0}

    def wrapped(send: Callable[..., Any], name: str) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            seen["collectives"] += 1
            seen["bytes"] += args[0].numel() * args[0].element_size()
            return send(*args, **options)

        return count

    def small(move: Callable[..., Any]) -> Callable[..., Any]:
        def count(local: torch.Tensor, *args: Any, **options: Any) -> Any:
            assert local.numel() <= MANY, (
                "a leaf is gathered or redistributed in an update"
            )
            seen["collectives"] += 1
            seen["bytes"] += local.numel() * local.element_size()
            return move(local, *args, **options)

        return count

    names = [name for name in SENDS if hasattr(dist, name)]
    patches = [
        mock.patch.object(dist, name, wrapped(getattr(dist, name), name))
        for name in names
    ]
    for module in (_redistribute, _dispatch):
        move = module.redistribute_local_tensor
        patches.append(
            mock.patch.object(module, "redistribute_local_tensor", small(move))
        )
    for patch in patches:
        patch.start()
    try:
        yield seen
    finally:
        for patch in patches:
            patch.stop()


def messages(
    make: Callable[[], sf.Algorithm], lay: Layout, leaves: int
) -> dict[str, int]:
    shapes = {f"{i}.weight": (24, 20) for i in range(leaves)}
    params, grads = lay(values(shapes)), lay(values(shapes, seed=1))
    algorithm = make()
    state = algorithm.init(params)
    with counted() as seen:
        algorithm.update(state, grads, 0)
    return seen


def check_messages(make: Callable[[], sf.Algorithm], lay: Layout) -> None:
    """Ten times as many leaves take as many collectives."""
    few, many = (messages(make, lay, leaves) for leaves in (5, MANY))
    assert few["collectives"] == many["collectives"] < 40, (few, many)


def check_share(make: Callable[[], sf.Algorithm], lay: Layout, most: float) -> None:
    """Of leaves with many weights only a small part is sent."""
    shapes = {"a.weight": (700, 800), "b.weight": (800, 700)}
    params, grads = lay(values(shapes)), lay(values(shapes, seed=1))
    algorithm = make()
    state = algorithm.init(params)
    with counted() as seen:
        algorithm.update(state, grads, 0)
    share = seen["bytes"] / sum(4 * x.numel() for x in params.values())
    assert 0 < share < most, f"{share:.4f} of the bytes of the weights are sent"


def check_gathers() -> None:
    """What leaves share out their regrowth by takes one exchange, and no DTensor is
    made whole for it.
    """
    lay, whole, seen = layouts(2)["S0"], DTensor.full_tensor, []

    def counting(x: DTensor) -> torch.Tensor:
        seen.append(x)
        return whole(x)

    params, grads = lay(values(SHAPES)), lay(values(SHAPES, seed=1))
    for make, times in (
        (lambda: sf.snfs(0.5, **SWAP), 0),
        (lambda: sf.set(0.5, redistribute=sf.redistribute.survivors, **SWAP), 1),
        (lambda: sf.set(0.5, redistribute=sf.redistribute.lost, **SWAP), 1),
    ):
        algorithm = make()
        state = algorithm.init(params)
        seen.clear()
        with mock.patch.object(DTensor, "full_tensor", counting):
            algorithm.update(state, grads, 0)
        assert len(seen) == times, (repr(algorithm), len(seen))


def check_simulation() -> None:
    """The benchmark's simulated processes take what real ones do."""
    folder = Path(__file__).parents[3] / "benchmarks"
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        simulated = importlib.import_module("sharded")
    for kind in ("normal", "ties"):
        weights = values({"w": (300, 200)}, kind)["w"]
        x, k = (
            layouts(2)["S0"]({"w": weights})["w"],
            round(simulated.KEPT * weights.numel()),
        )
        with counted() as seen:
            (mask,) = winners(
                [
                    Entry(
                        local_tensor(x).reshape(1, -1),
                        absolute=True,
                        extent=extent_of(x),
                    )
                ],
                [k],
            )
        net = simulated.net_of(weights.reshape(-1).numpy(), 1, joint=True)
        # which compares its mask with the one of one process
        found = simulated.measured(kind, net, 2, joint=True)
        assert torch.equal(
            full(sharded_like(mask.reshape(local_tensor(x).shape), x)),
            sf.masks.topk_mask(weights.abs(), k),
        )
        assert (found.collectives, found.kib) == (
            seen["collectives"],
            seen["bytes"] / 1024,
        )


# ---- refusals ------------------------------------------------------------------------


def refused(x: torch.Tensor, text: str) -> None:
    for make in (lambda: sf.gmp(0.5), lambda: sf.set(0.5, key=KEY)):
        with pytest.raises((TypeError, ValueError), match=text):
            make().init({"layer": {"w": x}})


def check_refusals() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    own = torch.ones(3, 4)
    refused(
        DTensor.from_local(own, mesh(2), [Partial()]),
        r"shards or replicas, got .*Partial.*",
    )
    strided = DTensor.from_local(
        own, mesh(2), [_StridedShard(0, split_factor=2)], run_check=False
    )
    refused(
        strided, "strided shards only together with the shards that they are strided by"
    )
    uneven = torch.ones(2 + dist.get_rank(), 4)
    torn = DTensor.from_local(
        uneven, mesh(2), [Shard(0)], run_check=False, shape=(5, 4), stride=(4, 1)
    )
    refused(torn, "cut as torch.chunk cuts")


def check_partial_grads() -> None:
    """Gradients as torch.func gives them, with placements of their own, are laid out as
    the params.
    """
    params = layouts(2)["S0"](values(SHAPES))
    grads = {
        path: DTensor.from_local(torch.ones(p.shape), mesh(2), [Partial()])
        for path, p in params.items()
    }
    algorithm = sf.rigl(0.5, **SWAP)
    state = algorithm.update(algorithm.init(params), grads, 0)
    alone = sf.rigl(0.5, **SWAP)
    want = alone.update(
        alone.init(values(SHAPES)),
        {path: torch.full(p.shape, 2.0) for path, p in params.items()},
        0,
    )
    assert sf.checkpoint.tree_equal(full(state), want)


def check_vmap() -> None:
    params = layouts(2)["S0"](values(SHAPES))
    stack = {path: torch.stack([x, x]) for path, x in params.items()}
    with pytest.raises((TypeError, ValueError, RuntimeError), match="(?i)vmap"):
        torch.vmap(lambda p: sf.gmp(0.5).init(p).masks)(stack)


def check_packed() -> None:
    state = sf.gmp(0.5).init(layouts(2)["S0"](values(SHAPES)))
    with pytest.raises((TypeError, ValueError), match="sf.distributed.save"):
        sf.checkpoint.state_dict(state, pack=True)


# ---- errors --------------------------------------------------------------------------


def fails(make: Callable[..., sf.Algorithm], lay: Layout, where: str) -> None:
    """An error on rank 1 alone is raised on both, soon, and the ranks can go on."""

    def score(state: Any, grads: Any, step: Any) -> Any:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("of rank 1")
        return optree.tree_map(torch.abs, state.params)

    params, grads = lay(values(SHAPES)), lay(values(SHAPES, seed=1))
    algorithm = make(score)
    start = time.monotonic()
    with pytest.raises(
        ZeroDivisionError if dist.get_rank() else RuntimeError
    ) as caught:
        algorithm.update(algorithm.init(params), grads, 0)
    assert (
        str(caught.value) == "of rank 1"
        if dist.get_rank()
        else "another process failed" in str(caught.value)
    )
    assert time.monotonic() - start < 20
    sane = sf.rigl(0.5, **SWAP)
    state = sane.update(sane.init(params), grads, 0)
    alone = sane.update(sane.init(values(SHAPES)), values(SHAPES, seed=1), 0)
    assert sf.checkpoint.tree_equal(full(state), alone)


FAILING: dict[str, Callable[[Any], sf.Algorithm]] = {
    "one_shot": lambda score: sf.one_shot(0.5, score),
    "gmp global": lambda score: sf.gmp(
        0.5, score=score, distribution=sf.budgets.global_()
    ),
    "ste": lambda score: sf.ste(0.5, score=score),
    "drop_grow": lambda score: sf.drop_grow(
        0.5, drop=sf.scores.magnitude, grow=score, **SWAP
    ),
    "chain": lambda score: sf.chain(sf.gmp(0.3), sf.one_shot(0.5, score)),
    "adam iterative": lambda score: sf.with_optimizer(
        sf.iterative(0.2, score=score), sf.optimizers.adam(1e-2)
    ),
}


# ---- the cases -----------------------------------------------------------------------


def cases() -> Cases:
    places = layouts(2)
    for layout, lay in places.items():
        for shape in ((300, 200), (37, 24), (1, 9), (6, 5, 3, 3)):
            yield f"draws of {shape} on {layout}", partial(check_draws, lay, shape)
    for name, make in ALGORITHMS.items():
        for layout in ("S0", "S1"):
            yield (
                f"sizes of {name} on {layout}",
                partial(check_sizes, make, places[layout]),
            )
            yield (
                f"messages of {name} on {layout}",
                partial(check_messages, make, places[layout]),
            )
            most = 0.02 if name == "gmp global" else 0.25
            yield (
                f"share of {name} on {layout}",
                partial(check_share, make, places[layout], most),
            )
    yield "gathers", check_gathers
    yield "simulated processes", check_simulation
    yield "refused tensors", check_refusals
    yield "partial gradients", check_partial_grads
    yield "vmap", check_vmap
    yield "packed masks", check_packed
    for name, failing in FAILING.items():
        yield f"an error in {name}", partial(fails, failing, places["S0"], name)


def test_messages_on_two_ranks() -> None:
    on_ranks(2, cases)


def alone() -> Cases:
    """On one rank, as tracemalloc crashes a process in which gloo's threads take the
    GIL.
    """

    def peak(params: Any) -> float:
        algorithm = sf.static(0.5, init="bernoulli", key=KEY)
        algorithm.init(params)  # imports what it needs
        tracemalloc.start()
        try:
            algorithm.init(params)
            return tracemalloc.get_traced_memory()[1] / (1 << 20)
        finally:
            tracemalloc.stop()

    def draws() -> None:
        params = {"w": torch.zeros(1 << 10, 1 << 10)}
        plain = peak(params)
        for dim in (0, 1):
            part = peak({"w": distribute_tensor(params["w"], mesh(1), [Shard(dim)])})
            assert part < 1.1 * plain, (part, plain)

    yield "draws that keep by chance", draws


def test_draws_of_a_shard_take_the_memory_of_a_leaf() -> None:
    on_ranks(1, alone)
