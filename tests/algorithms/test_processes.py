"""Inits and updates on shards: errors of one process, on all of them within moments,
and leaves that differ.
"""

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import sparsefn as sf
from sparsefn._engine.processes import agreements
from tests.nn.distributed.harness import Cases, on_ranks
from tests.nn.distributed.sharded import full, laid, mesh, values
from tests.nn.distributed.test_messages import counted

SHAPES = {"a.weight": (9, 6), "b.weight": (8, 4), "c.bias": (5,)}
SOON = 5.0  # seconds; a collective may take 60
SWAP = {"drop_fraction": 0.3, "key": sf.random.key(3)}


def rigl(when: sf.triggers.Every) -> sf.Algorithm:
    return sf.rigl(0.5, when=when, **SWAP)


ALGORITHMS: dict[str, Callable[..., sf.Algorithm]] = {
    "rigl": rigl,
    "optimizer": lambda when: sf.with_optimizer(rigl(when), sf.optimizers.adam(1e-2)),
    "finite": lambda when: sf.with_optimizer(
        rigl(when), sf.optimizers.sgd(1e-2), skip_nonfinite=True
    ),
    "partition": lambda when: sf.with_optimizer(
        sf.partition([("a.*", sf.static(0.5)), ("*", rigl(when))]),
        sf.optimizers.sgd(0.1, momentum=0.9),
    ),
    "chain": lambda when: sf.chain(sf.static(0.3), rigl(when)),
    "sequence": lambda when: sf.sequence(sf.gmp(0.3, when=when), rigl(when)),
    "phases": lambda when: sf.phases([(0, sf.dense()), (2, rigl(when))]),
    "rewinding": lambda when: sf.rewinding(
        sf.iterative(0.3, when=when), to=sf.never(), when=when
    ),
    "latents": lambda when: sf.with_optimizer(
        sf.reparametrised(sf.reparam.power(2.0), rigl(when)), sf.optimizers.adam(1e-2)
    ),
    "supermask": lambda when: sf.with_optimizer(
        sf.supermask(0.5, when=when), sf.optimizers.adam(1e-2)
    ),
    "donated": lambda when: sf.donated(
        sf.with_optimizer(rigl(when), sf.optimizers.adam(1e-2))
    ),
    "terms": lambda when: sf.with_optimizer(
        sf.with_terms(rigl(when), sf.terms.l2(0.1)), sf.optimizers.adam(1e-2)
    ),
}


# ---- faults: of the gradients and the step of one process ----------------------------


def torn(x: DTensor) -> DTensor:
    """A DTensor whose part on this process has a row too many."""
    local = x.to_local()
    longer = local.new_zeros(len(local) + 1, *local.shape[1:])
    return DTensor.from_local(
        longer,
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )


FAULTS: dict[str, tuple[Callable[[dict, int], tuple], type[Exception], str]] = {
    "leaf": (
        lambda g, step: ({p: x for p, x in g.items() if p != "b.weight"}, step),
        ValueError,
        "expected grads with the structure of params, but there is no leaf at "
        "'b.weight'",
    ),
    "another leaf": (
        lambda g, step: (g | {"d": g["c.bias"]}, step),
        ValueError,
        "unknown leaf at 'd'",
    ),
    "none": (
        lambda g, step: (g | {"b.weight": None}, step),
        ValueError,
        "for every param, got None at 'b.weight'",
    ),
    "dtype": (
        lambda g, step: (g | {"a.weight": g["a.weight"].double()}, step),
        TypeError,
        "expected grads of dtype torch.float32 at 'a.weight', got torch.float64",
    ),
    "shape": (
        lambda g, step: (g | {"c.bias": g["a.weight"]}, step),
        ValueError,
        "of shape (5,) at 'c.bias', got",
    ),
    "plain": (
        lambda g, step: (g | {"c.bias": torch.ones(5)}, step),
        ValueError,
        "expected grads to be laid out as [Shard(dim=0)]",
    ),
    "number": (
        lambda g, step: (g | {"c.bias": 3}, step),
        TypeError,
        "to be tensors, got int at 'c.bias'",
    ),
    "size": (
        lambda g, step: (g | {"a.weight": torn(g["a.weight"])}, step),
        ValueError,
        "grads: expected a DTensor cut as torch.chunk cuts, on rank ",
    ),
    "step": (lambda g, step: (g, -1), ValueError, "expected step >= 0, got -1"),
    "kind of step": (lambda g, step: (g, "2"), TypeError, "expected step to be"),
}


def raises(rank: int, kind: type[Exception], text: str) -> object:
    """What the rank at fault raises, and what the others do, who say which rank it
    was.
    """
    if dist.get_rank() == rank:
        return pytest.raises(kind, match=re.escape(text))
    return pytest.raises(
        RuntimeError,
        match=f"another process failed: rank {rank}, "
        f"{kind.__name__}.*{re.escape(text)}",
    )


def soon(start: float) -> None:
    assert time.monotonic() - start < SOON


def fails(name: str, fault: str, size: int) -> None:
    spoil, kind, text = FAULTS[fault]
    params, grads = (
        laid(values(SHAPES, seed=seed), mesh(size), [Shard(0)]) for seed in (0, 1)
    )
    algorithm = ALGORITHMS[name](sf.every(2))
    state = algorithm.init(params)
    given = spoil(grads, 2) if dist.get_rank() == size - 1 else (grads, 2)
    start = time.monotonic()
    with raises(size - 1, kind, text):
        algorithm.update(state, *given)
    soon(start)


def goes_on(name: str, size: int) -> None:
    """After errors the same states make the step of one process."""
    run = []
    for lay in (lambda tree: tree, lambda tree: laid(tree, mesh(size), [Shard(0)])):
        algorithm = ALGORITHMS[name](sf.every(2))
        state = algorithm.init(lay(values(SHAPES)))
        run.append(algorithm.update(state, lay(values(SHAPES, seed=1)), 2))
    assert sf.checkpoint.tree_equal(run[0], full(run[1]))


def keeps_quiet(name: str, fault: str, size: int) -> None:
    """At a step that changes no mask nothing is sent: one process raises, and the
    others make their step.
    """
    spoil, kind, text = FAULTS[fault]
    params, grads = (
        laid(values(SHAPES, seed=seed), mesh(size), [Shard(0)]) for seed in (0, 1)
    )
    algorithm = ALGORITHMS[name](sf.every(4))
    state = algorithm.init(params)
    dist.barrier()
    with counted() as seen, mock.patch.object(agreements, "WAIT", 0.2):
        if dist.get_rank():
            algorithm.update(state, grads, 3)
        else:
            with pytest.raises(kind, match=re.escape(text)):
                algorithm.update(state, *spoil(grads, 3))
    assert not seen["collectives"], seen


def steps(size: int) -> Cases:
    for name in ALGORITHMS:
        for fault in (
            FAULTS
            if name in ("rigl", "optimizer")
            else ("leaf",)
            if name == "finite"
            else ("leaf", "step")
        ):
            yield f"{fault} of {name}", partial(fails, name, fault, size)
        yield f"{name} after errors", partial(goes_on, name, size)
    for name in ("rigl", "optimizer", "partition"):
        for fault in ("leaf", "dtype", "size", "step"):
            yield (
                f"{fault} of {name} at a quiet step",
                partial(keeps_quiet, name, fault, size),
            )


# ---- what processes do not see alike -------------------------------------------------


def put(tree: dict, path: str, spoil: Callable[[DTensor], DTensor]) -> dict:
    return tree | {path: spoil(tree[path])}


def copied(x: DTensor) -> DTensor:
    whole = torch.zeros(x.shape, dtype=x.dtype)
    return DTensor.from_local(whole, x.device_mesh, [Replicate()], run_check=False)


def over_two(x: DTensor) -> DTensor:
    """The same part, on a mesh of two dimensions that has the same processes."""
    wide = DeviceMesh(
        "cpu", x.device_mesh.mesh[None], mesh_dim_names=("outer", "inner")
    )
    kwargs = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    return DTensor.from_local(
        x.to_local(), wide, [Replicate(), *x.placements], **kwargs
    )


SAME = "expected the same "
UNLIKE: dict[str, tuple[Callable[[sf.State, dict, int], tuple], str]] = {
    "step": (
        lambda s, g, step: (s, g, step + 2),
        SAME + "step on every rank, but rank 0 has 2, and rank {last} has 4",
    ),
    "placements of grads": (
        lambda s, g, step: (s, put(g, "b.weight", copied), step),
        SAME
        + "call on every rank, but rank 0 has to change masks, and rank {last} has "
        "to redistribute grads: "
        "'b.weight' is laid out as [Replicate()]",
    ),
    "kind of mask": (
        lambda s, g, step: (
            s._replace(masks=put(s.masks, "b.weight", lambda x: x.float())),
            g,
            step,
        ),
        SAME
        + "masks on every rank, but not at 'b.weight': rank 0 has a tensor of shape "
        "(8, 4) and torch.bool, ",
    ),
    "placements of masks": (
        lambda s, g, step: (
            s._replace(masks=put(s.masks, "b.weight", copied)),
            g,
            step,
        ),
        "not at 'b.weight': rank 0 has a tensor of shape (8, 4) and torch.bool, laid "
        "out as [Shard(dim=0)]",
    ),
    "mesh": (
        lambda s, g, step: (
            s._replace(masks=put(s.masks, "b.weight", over_two)),
            g,
            step,
        ),
        "and rank {last} has a tensor of shape (8, 4) and torch.bool, laid out as "
        "[Replicate(), Shard(dim=0)] over",
    ),
    "leaf": (
        lambda s, g, step: (
            s._replace(masks={p: m for p, m in s.masks.items() if p != "c.bias"}),
            g,
            step,
        ),
        "not at 'c.bias': rank 0 has a tensor of shape () and torch.bool, plain "
        "there, and rank {last} has no leaf",
    ),
}


def unlike(name: str, what: str, size: int) -> None:
    """At a change of masks every process says what differs, and where."""
    spoil, text = UNLIKE[what]
    params, grads = (
        laid(values(SHAPES, seed=seed), mesh(size), [Shard(0)]) for seed in (0, 1)
    )
    algorithm = ALGORITHMS[name](sf.every(2))
    state = algorithm.init(params)
    last = size - 1
    given = spoil(state, grads, 2) if dist.get_rank() == last else (state, grads, 2)
    start = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(text.replace("{last}", str(last)))):
        algorithm.update(*given)
    soon(start)


CALLS: dict[str, Callable[[dict, dict], object]] = {
    "init": lambda params, masks: rigl(sf.every(2)).init(params),
    "n_kept": lambda params, masks: sf.masks.n_kept(masks),
    "summary": lambda params, masks: sf.report.summary(sf.State(params, masks)),
    "all_finite": lambda params, masks: sf.tree.all_finite(params),
    "topk_masks": lambda params, masks: sf.masks.topk_masks(params, 10),
    "topk_mask": lambda params, masks: sf.masks.topk_mask(params["a.weight"], 10),
    "topk_mask of blocks": lambda params, masks: sf.masks.topk_mask(
        params["a.weight"], 2, pattern=sf.patterns.block((3, 2))
    ),
}


def of_another_size(name: str, size: int) -> None:
    """A part of another size on one process: all raise, with the rank, the path and the
    sizes.
    """
    params = laid(values(SHAPES), mesh(size), [Shard(0)])
    masks = {path: x > 0 for path, x in params.items()}
    at = size - 1
    if dist.get_rank() == at:
        params, masks = put(params, "a.weight", torn), put(masks, "a.weight", torn)
    rows = 5 if size == 2 else 3
    sizes = (
        f"on rank {at} a part of shape ({9 - rows * at}, 6), got a part of shape "
        f"({10 - rows * at}, 6) of one of"
    )
    start = time.monotonic()
    with raises(at, ValueError, sizes) as caught:
        CALLS[name](params, masks)
    assert " at 'a.weight'" in str(caught.value) or (
        name.startswith("topk_mask") and " at '0'" in str(caught.value)
    )
    soon(start)


def seen(size: int) -> Cases:
    for name in ("rigl", "optimizer", "chain"):
        for what in UNLIKE if name == "rigl" else ("step", "placements of grads"):
            yield f"another {what} in {name}", partial(unlike, name, what, size)
    for name in CALLS:
        yield f"a part of another size in {name}", partial(of_another_size, name, size)
    yield "rigl after all that", partial(goes_on, "rigl", size)


# ---- faults of init ------------------------------------------------------------------


def begins(name: str, spoil: Callable[[dict], dict], text: str, size: int) -> None:
    params = laid(values(SHAPES), mesh(size), [Shard(0)])
    algorithm = ALGORITHMS[name](sf.every(2))
    start = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(text)):
        algorithm.init(spoil(params) if dist.get_rank() == size - 1 else params)
    soon(start)


def fails_in_init(name: str, size: int) -> None:
    """An error of a user's function, on one process."""

    def where(path: str, leaf: torch.Tensor) -> bool:
        if dist.get_rank() == 0:
            raise ZeroDivisionError("in where")
        return True

    make = {
        "rigl": lambda: sf.rigl(0.5, where=where, **SWAP),
        "supermask": lambda: sf.supermask(0.5, where=where),
        "latents": lambda: sf.reparametrised(
            sf.reparam.power(2.0), sf.set(0.5, **SWAP), where=where
        ),
        "partition": lambda: sf.partition([(where, sf.set(0.5, **SWAP))]),
        "optimizer": lambda: sf.with_optimizer(
            sf.gmp(0.5, where=where), sf.optimizers.adam(1e-2)
        ),
    }[name]
    params = laid(values(SHAPES), mesh(size), [Shard(0)])
    start = time.monotonic()
    with raises(0, ZeroDivisionError, "in where"):
        make().init(params)
    soon(start)


def inits(size: int) -> Cases:
    last = size - 1
    spoils = {
        "leaf": (
            lambda p: {path: x for path, x in p.items() if path != "b.weight"},
            "expected the same params on every rank, but not at 'b.weight': rank 0 "
            "has a tensor of shape (8, 4) and torch.float32, laid out as "
            f"[Shard(dim=0)] over {mesh(size)} there, and rank {last} has no leaf "
            "there",
        ),
        "another leaf": (
            lambda p: p | {"d": p["c.bias"]},
            f"at 'd': rank 0 has no leaf there, and rank {last} has a",
        ),
        "dtype": (
            lambda p: p | {"c.bias": p["c.bias"].double()},
            f"and rank {last} has a tensor of shape (5,) and",
        ),
        "number": (lambda p: p | {"c.bias": 3}, f"and rank {last} has a int there"),
    }
    for name in (
        "rigl",
        "optimizer",
        "partition",
        "chain",
        "sequence",
        "phases",
        "latents",
        "supermask",
    ):
        for what, (spoil, text) in spoils.items():
            if what == "leaf" or name == "rigl":
                yield (
                    f"{what} in init of {name}",
                    partial(begins, name, spoil, text, size),
                )
    for name in ("rigl", "supermask", "latents", "partition", "optimizer"):
        yield f"an error in init of {name}", partial(fails_in_init, name, size)


# ---- other errors of one process -----------------------------------------------------


def an_optimizer_fails() -> None:
    """Before the masks change: the others, who wait there, are told."""

    armed: list[bool] = []  # init tries an optimizer

    class Fails:
        def init(self, params: object) -> tuple:
            return ()

        def update(
            self, grads: dict, state: tuple, *, params: dict, inplace: bool
        ) -> tuple:
            if dist.get_rank() == 1 and armed:
                raise ZeroDivisionError("in the optimizer")
            return {path: -0.1 * g for path, g in grads.items()}, state

    params = laid(values(SHAPES), mesh(2), [Shard(0)])
    algorithm = sf.with_optimizer(rigl(sf.always()), Fails())
    state = algorithm.init(params)
    armed.append(True)
    start = time.monotonic()
    with raises(1, ZeroDivisionError, "in the optimizer"):
        algorithm.update(state, params, 0)
    soon(start)


def gradients_move_first() -> None:
    """Where gradients are sums yet to be added, that is agreed on, too."""
    params = laid(values(SHAPES), mesh(2), [Shard(0)])
    grads = {
        path: DTensor.from_local(torch.ones(p.shape), mesh(2), [Partial()])
        for path, p in params.items()
    }
    algorithm = rigl(sf.every(4))
    state = algorithm.init(params)
    given = (
        grads
        if dist.get_rank()
        else {path: g for path, g in grads.items() if path != "b.weight"}
    )
    with raises(0, ValueError, "no leaf at 'b.weight'"):
        algorithm.update(state, given, 1)
    copies = {
        path: x.redistribute(mesh(2), [Replicate()]) for path, x in params.items()
    }
    assert sf.checkpoint.tree_equal(
        full(algorithm.update(state, copies, 4)),
        full(algorithm.update(state, params, 4)),
    )


def others() -> Cases:
    yield "an optimizer fails", an_optimizer_fails
    yield "gradients move first", gradients_move_first


def on_two() -> Iterator[tuple[str, Callable[[], object]]]:
    yield from steps(2)
    yield from inits(2)
    yield from seen(2)
    yield from others()


def hybrid() -> Iterator[tuple[str, Callable[[], object]]]:
    """On a mesh of two dimensions a process waits for those of its row and of its
    column.
    """

    def fails(at: int, fault: str, placements: list) -> None:
        spoil, kind, text = FAULTS[fault]
        params, grads = (
            laid(values(SHAPES, seed=seed), mesh(2, 2), placements) for seed in (0, 1)
        )
        algorithm = ALGORITHMS["optimizer"](sf.every(2))
        state = algorithm.init(params)
        start = time.monotonic()
        with raises(at, kind, text):
            algorithm.update(
                state, *(spoil(grads, 2) if dist.get_rank() == at else (grads, 2))
            )
        soon(start)

    def score(at: int) -> None:
        def failing(state: sf.State, grads: dict, step: int) -> dict:
            if dist.get_rank() == at:
                raise ZeroDivisionError("in a score")
            return state.params

        params = laid(values(SHAPES), mesh(2, 2), [Replicate(), Shard(0)])
        start = time.monotonic()
        algorithm = sf.one_shot(0.5, failing)
        with raises(at, ZeroDivisionError, "in a score"):
            algorithm.update(algorithm.init(params), params, 0)
        soon(start)

    for at in (0, 3):
        for fault in ("leaf", "step"):
            yield (
                f"{fault} on {at}, HSDP",
                partial(fails, at, fault, [Replicate(), Shard(0)]),
            )
            yield (
                f"{fault} on {at}, two shards",
                partial(fails, at, fault, [Shard(0), Shard(1)]),
            )
        yield f"a score on {at}", partial(score, at)


def test_two_processes() -> None:
    on_ranks(2, on_two)


def test_four_processes() -> None:
    on_ranks(4, hybrid)
