"""The machine runs, and finds bugs that lie between operations, which the laws do not
find.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor
from torch.distributed.tensor import DTensor

import sparsefn as sf
from property_tests.effort import tries
from property_tests.state_machine import (
    CHOSEN,
    Machine,
    Update,
    compiled,
    eager,
    made,
    one_process,
)
from sparsefn.core.tree import Tree, leaves_of
from sparsefn.testing import Row
from sparsefn.testing.harness import leaves
from sparsefn.testing.laws import COMPILE

Make = Callable[[Any, Tensor, Tree], sf.Algorithm]


def run(machine: type[Machine], examples: int, steps: int = 20) -> None:
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        phases=[Phase.generate],
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with one_process():
        run_state_machine_as_test(machine, settings=options)


def test_any_order_has_the_bits_of_eager_updates() -> None:
    run(Machine, 2 * tries())


@pytest.mark.deep
def test_so_has_compiled_code() -> None:
    run(
        type(
            "Compiling",
            (Machine,),
            {"names": ("rigl", "sgd ste"), "ways": (compiled, eager)},
        ),
        4,
        10,
    )


# ---- bugs ----------------------------------------------------------------------------


def same(make: Make) -> Make:
    return make


class Bug(NamedTuple):
    """Planted in the algorithms of a row, by `make`, and in functions of the library:
    `library(real) -> new`.
    """

    row: str
    make: Callable[[Make], Make] = same
    library: Mapping[Any, Callable[[Any], Any]] = MappingProxyType({})
    ways: tuple[Update, ...] = Machine.ways

    @contextmanager
    def planted(self) -> Iterator[Row]:
        """The row with the bug; laws and machine alike then meet it in the library,
        too.
        """
        row = CHOSEN[self.row]
        with pytest.MonkeyPatch.context() as patch:
            for real, change in self.library.items():
                new = change(real)
                for module in list(sys.modules.values()):
                    for name in [
                        name
                        for name, value in getattr(module, "__dict__", {}).items()
                        if value is real
                    ]:
                        patch.setattr(module, name, new)
            yield row._replace(make=self.make(row.make))


def updating(
    change: Callable[[sf.Algorithm, sf.State, Tree, Any], sf.State],
) -> Callable[[Make], Make]:
    """Algorithms whose update is `change(algorithm, state, grads, step)`, but for
    compiled and batched code.
    """

    def planted(make: Make) -> Make:
        def broken(sparsity: Any, key: Tensor, params: Tree) -> sf.Algorithm:
            algorithm = make(sparsity, key, params)

            def update(state: sf.State, grads: Tree, step: Any) -> sf.State:
                if (
                    torch.compiler.is_compiling()
                    or torch._C._functorch.is_batchedtensor(leaves_of(grads)[0])
                ):
                    return algorithm.update(state, grads, step)
                return change(algorithm, state, grads, step)

            return algorithm._replace(update=update, within=None)

        return broken

    return planted


def first_counts(real: Any) -> Any:
    """All members of a stack get the counts of the first: those of one `vmap` have the
    same.
    """

    def member(state: Tree, i: int) -> Tree:
        is_count = lambda x: x.ndim == 0 and x.dtype == torch.int64  # noqa: E731
        return optree.tree_map(
            lambda x, first: first if is_count(x) else x, real(state, i), real(state, 0)
        )

    return member


LOADED: list[Tensor] = []


def marked(real: Any) -> Any:
    """A load after which the next step does something else."""

    def load(template: Tree, *args: Any, **options: Any) -> Tree:
        state = real(template, *args, **options)
        LOADED[:] = [state.key]
        return state

    return load


def keeping_gradients(
    algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any
) -> sf.State:
    """The first step after a load keeps the memory of the gradients, which a loop
    writes to again.
    """
    new = algorithm.update(state, grads, step)
    if not any(state.key is key for key in LOADED):
        return new

    def kept(g: Tensor, memory: Tensor) -> Tensor:
        return g.copy_(memory) if g.dtype == memory.dtype else memory

    return new._replace(
        scores=new.scores | {"grow": optree.tree_map(kept, grads, new.scores["grow"])}
    )


def sharing(real: Any) -> Any:
    """What is loaded is what was saved and no copy, and a donated step writes to it."""

    def load(template: Tree, saved: Any, **options: Any) -> Tree:
        real(template, saved, **options)
        return optree.tree_unflatten(
            optree.tree_structure(template), [saved[path] for path in leaves(template)]
        )

    return load


MADE: list[tuple[Tensor, sf.Algorithm]] = []


def staying(
    algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any
) -> sf.State:
    """A state goes on with the algorithm that made it."""
    masks = [mask for mask in leaves_of(state.masks) if mask.ndim]
    owner = next(
        (maker for known, maker in MADE if any(known is mask for mask in masks)),
        algorithm,
    )
    new = owner.update(state, grads, step)
    MADE[:] = [(mask, owner) for mask in leaves_of(new.masks) if mask.ndim]
    return new


def by_threads(make: Make) -> Make:
    """A new algorithm takes the place of the old one for the number of threads that
    there is then, and for no other.
    """
    known: dict[int, sf.Algorithm] = {}

    def change(
        algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any
    ) -> sf.State:
        return known.setdefault(torch.get_num_threads(), algorithm).update(
            state, grads, step
        )

    def broken(sparsity: Any, key: Tensor, params: Tree) -> sf.Algorithm:
        known[torch.get_num_threads()] = make(sparsity, key, params)
        return updating(change)(make)(sparsity, key, params)

    return broken


def by_mesh(make: Make) -> Make:
    """Shards go on with the first algorithm that they met."""
    known: list[sf.Algorithm] = []

    def change(
        algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any
    ) -> sf.State:
        known[:] = (
            (known or [algorithm])
            if any(isinstance(x, DTensor) for x in leaves_of(state.masks))
            else []
        )
        return (known or [algorithm])[0].update(state, grads, step)

    return updating(change)(make)


def standing(real: Any) -> Any:
    """A donated step on shards does not count."""

    def donated(algorithm: sf.Algorithm) -> sf.Algorithm:
        giving = real(algorithm)

        def update(state: sf.State, grads: Tree, step: Any) -> sf.State:
            counts = {
                path: x.clone()
                for path, x in leaves(state).items()
                if not x.ndim and x.dtype == torch.int64
            }
            new = giving.update(state, grads, step)
            if any(isinstance(x, DTensor) for x in leaves_of(new.masks)):
                return sf.tree.map_with_path(lambda path, x: counts.get(path, x), new)
            return new

        return giving._replace(update=update)

    return donated


def of_template(real: Any) -> Any:
    """What is read from a folder has the counts of the template."""

    def load(template: Tree, folder: Any) -> Tree:
        is_count = lambda x: x.ndim == 0 and x.dtype == torch.int64  # noqa: E731
        return optree.tree_map(
            lambda x, given: given if is_count(x) else x,
            real(template, folder),
            template,
        )

    return load


def kept_code(real: Any) -> Any:
    """What was compiled for a backend is used for every other algorithm, too."""
    known: dict[Any, Any] = {}
    return lambda fn, *, backend, fullgraph: known.setdefault(
        backend, real(fn, backend=backend, fullgraph=fullgraph)
    )


BUGS = {
    "members get the counts of the first": Bug(
        "adam rigl", library={sf.ensemble.member: first_counts}
    ),
    "the first step after a load keeps the gradients": Bug(
        "snfs", updating(keeping_gradients), {sf.checkpoint.load_state_dict: marked}
    ),
    "a load shares memory with what was saved": Bug(
        "adam rigl", library={sf.checkpoint.load_state_dict: sharing}
    ),
    "a state stays with the algorithm that made it": Bug(
        "gmp", updating(staying), ways=(eager,)
    ),
    "other threads go on with an old algorithm": Bug("gmp", by_threads),
    "shards go on with an old algorithm": Bug("gmp", by_mesh, ways=(eager,)),
    "a donated step on shards is not counted": Bug(
        "adam rigl", library={sf.donated: standing}
    ),
    "a folder gives the counts of the template": Bug(
        "adam rigl", library={sf.distributed.load: of_template}
    ),
    "compiled code stays at its sparsity": Bug(
        "gmp", library={torch.compile: kept_code}, ways=(eager, compiled)
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_machine_alone_notices_the_bug(bug: Bug) -> None:
    with bug.planted() as row:
        # What is planted in an update is left out of compiled code, and compiling takes
        # long.
        laws = [
            law for law in sf.testing.LAWS if law is not COMPILE or compiled in bug.ways
        ]
        report = sf.testing.check_laws(
            row.make, meta=row.meta, max_examples=2, laws=laws, on_fail="report"
        )
        assert report.ok and len(report.held) > 20, report.failures
        make = staticmethod(lambda _, sparsity, params: made(row, sparsity, params))
        broken = type(
            "Broken", (Machine,), {"names": (row.name,), "make": make, "ways": bug.ways}
        )
        with pytest.raises((AssertionError, ValueError)) as raised:
            run(broken, 60)
    assert "before step" in str(
        raised.value
    ) or "a donated algorithm has updated the state" in str(raised.value)


@pytest.mark.deep
@pytest.mark.parametrize("row", sorted({bug.row for bug in BUGS.values()}))
def test_without_a_bug_it_notices_nothing_there(row: str) -> None:
    run(type("Healthy", (Machine,), {"names": (row,)}), 10, 10)
