"""Every algorithm of the registry under every transform: the table of
docs/transforms.md, from real runs.

`python -m property_tests.transforms` makes the table again (some minutes); with names
of rows, only these lines of it, with "sharded" only its last column, and with "methods"
only the list of methods below it. A cell is "=" for the bits of the eager run with int
steps, "~" for a derivative within `CLOSE` of finite differences, and a letter for what
cannot work, which the page explains.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

import sparsefn as sf
from property_tests import method_rows
from property_tests.registry import ROWS
from sparsefn.core.state import Algorithm, State
from sparsefn.core.tree import Tree
from sparsefn.testing import Case, Row
from sparsefn.testing.harness import (
    algorithm_of,
    assert_same,
    leaves,
    trained_of,
    updates,
)
from sparsefn.testing.laws_transforms import nested_vmap_is_two_loops, vmap_is_a_loop
from sparsefn.testing.strategies import large
from tests.nn.distributed.harness import Cases, on_ranks
from tests.nn.distributed.sharded import full, layouts

METHODS = [row._replace(name=f"methods: {row.name}") for row in method_rows.ROWS]
PAGE = Path(__file__).parents[1] / "docs" / "transforms.md"
BEGIN, END = (
    "<!-- table: python -m property_tests.transforms -->",
    "<!-- end of table -->",
)
BEGIN_METHODS, END_METHODS = (
    "<!-- methods: python -m property_tests.transforms methods -->",
    "<!-- end of methods -->",
)
EPS = 1e-6  # of central differences, in float64
CLOSE = 1e-6  # how far a derivative may be from them, relative to 1 + its size


# ---- one run -------------------------------------------------------------------------


def case_of(row: Row) -> Case:
    """The fixed run of a row."""
    return large(row.meta.layout.form)


def last(states: Iterable[State]) -> State:
    *_, state = states
    return state


def double(tree: Tree) -> Tree:
    return optree.tree_map(lambda leaf: leaf.double(), tree)


def in_double(case: Case) -> Case:
    return case._replace(
        params=double(case.params), grads=tuple(map(double, case.grads))
    )


def batch_of(
    row: Row, case: Case, *, of: Callable[..., Any] = torch.vmap
) -> tuple[Any, list[Any]]:
    """A batched update of two members, and its members one by one: state, gradients and
    steps differ.
    """
    algorithm = algorithm_of(row, case)
    states = [
        last(updates(algorithm, case._replace(params=params)))
        for params in (case.params, case.grads[0])
    ]
    grads = list(case.grads[1:3])
    args = (sf.ensemble.stack(states), sf.ensemble.stack(grads), torch.tensor([3, 4]))
    singles = [
        algorithm.update(state, tree, 3 + i)
        for i, (state, tree) in enumerate(zip(states, grads, strict=True))
    ]
    return (of(algorithm.update), args), singles


# ---- a later loss, and its derivatives -----------------------------------------------


def misfit(weights: Tree, targets: Tree) -> Tensor:
    """A smooth loss with dense gradients."""
    terms = optree.tree_map(lambda w, t: torch.cos(w - t).sum(), weights, targets)
    return torch.stack(optree.tree_leaves(terms)).sum()


def later_loss(algorithm: Algorithm, case: Case, params: Tree) -> tuple[Tensor, State]:
    """The loss after a few updates, each on the gradient of a loss of its own, and the
    state that has it.
    """
    state = algorithm.init(params)
    for i, targets in enumerate(case.grads):
        state = algorithm.update(
            state, torch.func.grad(misfit)(sf.effective(state), targets), i
        )
    return misfit(sf.effective(state), case.grads[0]), state


def direction(params: Tree) -> Tree:
    """Where to go in finite differences."""
    return sf.tree.map_with_path(
        lambda path, p: sf.random.normal(
            sf.random.leaf_key(sf.random.key(9), path), p.shape, p.dtype
        ),
        params,
    )


def along(params: Tree, way: Tree, by: float) -> Tree:
    return optree.tree_map(lambda p, d: p + by * d, params, way)


def difference(
    loss: Callable[[Tree], tuple[Tensor, State]], params: Tree, way: Tree
) -> float:
    """The central difference of a loss; its masks must not flip between the two
    ends.
    """
    (above, one), (below, other) = (
        loss(along(params, way, EPS)),
        loss(along(params, way, -EPS)),
    )
    assert_same("masks at both ends", one.masks, other.masks)
    return float(above - below) / (2 * EPS)


def check_close(got: Tensor, want: float) -> None:
    assert abs(float(got) - want) <= CLOSE * (1 + abs(want)), (
        f"{float(got)} is not {want}"
    )


def _of_loss(
    row: Row, case: Case
) -> tuple[Callable[[Tree], tuple[Tensor, State]], Tree, Tree, float]:
    case = in_double(case)
    loss = partial(later_loss, trained_of(row, case), case)
    way = direction(case.params)
    return loss, case.params, way, difference(loss, case.params, way)


# ---- the transforms: (row, case) -> "=" or "~", or an error --------------------------


def int_step(row: Row, case: Case) -> str:
    """The reference, twice: once more gives the same bits."""
    assert_same(
        "again", *(last(updates(algorithm_of(row, case), case)) for _ in range(2))
    )
    return "="


def tensor_step(row: Row, case: Case) -> str:
    want, got = (
        last(updates(algorithm_of(row, case), case, step))
        for step in (int, torch.tensor)
    )
    assert_same("tensor steps", want, got)
    return "="


def vmap(row: Row, case: Case) -> str:
    vmap_is_a_loop(row, case)
    return "="


def nested_vmap(row: Row, case: Case) -> str:
    nested_vmap_is_two_loops(row, case)
    return "="


def grad(row: Row, case: Case, of: Callable[..., Any] = torch.func.grad) -> str:
    """The gradient of a later loss in the initial params."""
    loss, params, way, want = _of_loss(row, case)
    slopes = of(lambda params: loss(params)[0])(params)
    check_close(
        sum((leaf * leaves(way)[path]).sum() for path, leaf in leaves(slopes).items()),
        want,
    )  # type: ignore[arg-type]
    return "~"


def jvp(row: Row, case: Case) -> str:
    """The same derivative forwards."""
    loss, params, way, want = _of_loss(row, case)
    paths = list(leaves(params))
    rebuild = sf.tree.flatten(params)[1]
    tangents = tuple(leaves(way)[path] for path in paths)
    check_close(
        torch.func.jvp(
            lambda *values: loss(rebuild(list(values)))[0],
            tuple(leaves(params).values()),
            tangents,
        )[1],
        want,
    )
    return "~"


def compiled(row: Row, case: Case, backend: str = "aot_eager") -> str:
    """A whole update at an int step, `fullgraph=True`; export has the tensor step."""
    torch._dynamo.reset()
    algorithm = algorithm_of(row, case)
    state, step = last(updates(algorithm, case._replace(grads=case.grads[:2]))), 2
    update = torch.compile(algorithm.update, backend=backend, fullgraph=True)
    assert_same(
        "states",
        algorithm.update(state, case.grads[2], step),
        update(state, case.grads[2], step),
    )
    return "="


def compiled_vmap(row: Row, case: Case, backend: str = "aot_eager") -> str:
    """A batched update, compiled whole; members are at steps of their own."""
    torch._dynamo.reset()
    (update, args), singles = batch_of(row, case)
    stacked = torch.compile(update, backend=backend, fullgraph=True)(*args)
    for i, (single, member) in enumerate(
        zip(singles, sf.ensemble.unstack(stacked), strict=True)
    ):
        assert_same(f"member {i}", single, member)
    return "="


class Update(torch.nn.Module):
    """An update as a module, as export wants one."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm

    def forward(self, state: State, grads: Tree, step: Tensor) -> State:
        return self.algorithm.update(state, grads, step)


def exported(row: Row, case: Case) -> str:
    """`torch.export` of an update with the step as a tensor."""
    torch._dynamo.reset()
    algorithm = algorithm_of(row, case)
    eager = state = algorithm.init(case.params)
    program = torch.export.export(
        Update(algorithm), (state, case.grads[0], torch.tensor(0))
    ).module()
    for i, grads in enumerate(case.grads):
        eager, state = (
            algorithm.update(eager, grads, i),
            program(state, grads, torch.tensor(i)),
        )
        assert_same(f"state {i}", eager, state)
    return "="


def old_names(row: Row, case: Case) -> str:
    """`functorch.vmap` and `functorch.grad`."""
    import functorch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        (update, args), singles = batch_of(row, case, of=functorch.vmap)
        for i, (single, member) in enumerate(
            zip(singles, sf.ensemble.unstack(update(*args)), strict=True)
        ):
            assert_same(f"member {i}", single, member)
        grad(row, case, functorch.grad)
    return "="


def sharded(row: Row, case: Case) -> str:
    """Trained weights and gradients in two halves, along rows and along columns; runs
    on two processes at once.
    """
    states = list(updates(trained_of(row, case), case))
    for name in ("S0", "S1"):
        lay = layouts(2)[name]
        halved = case._replace(
            params=lay(case.params), grads=tuple(map(lay, case.grads))
        )
        for i, (want, got) in enumerate(
            zip(states, updates(trained_of(row, halved), halved), strict=True)
        ):
            assert_same(f"state {i} of {name}", want, full(got))
    return "="


COLUMNS: dict[str, Callable[[Row, Case], str]] = {
    "int step": int_step,
    "tensor step": tensor_step,
    "vmap": vmap,
    "nested vmap": nested_vmap,
    "grad": grad,
    "jvp": jvp,
    "compile": compiled,
    "compile(vmap)": compiled_vmap,
    "functorch": old_names,
    "export": exported,
    "sharded": sharded,
}

# ---- the table -----------------------------------------------------------------------

# What cannot work: a part of the message, and the letter on the page.
# tests/test_upstream.py has a test of each "a".
REASONS = {
    "Tensor that doesn't have storage": "a",
    "level <= current_level": "a",
    "aten.equal.default": "a",
    "got mixed torch.Tensor and DTensor": "b",
    "aten._has_same_storage_numel.default": "b",
    "expected plain tensors, got a DTensor": "c",
    "differs at scores.latent.threshold": "d",
    "differs at opt.momentum.latent.threshold": "d",
}


def cell(row: Row, column: str) -> str:
    """What one transform does to one row: "=", "~" or a letter; any other failure is
    raised.
    """
    try:
        return COLUMNS[column](row, case_of(row))
    except Exception as error:
        letters = [letter for text, letter in REASONS.items() if text in str(error)]
        if not letters:
            raise RuntimeError(
                f"{row.name}, {column}: {type(error).__name__}: {error}"
            ) from error
        return letters[0]


def cells_of(name: str) -> tuple[str, list[str]]:
    """The cells of a row but the last one."""
    (row,) = (row for row in ROWS if row.name == name)
    return name, [cell(row, column) for column in COLUMNS if column != "sharded"]


def shards_of(names: Sequence[str]) -> dict[str, str]:
    """The last cells of rows, all from one start of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cells.json"
        on_ranks(2, shard_cases, names, file, seconds=300)
        found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found


def shard_cases(names: Sequence[str], file: Path) -> Cases:
    """The rows one after another, on one of the processes; the first one writes what it
    found.
    """
    found: dict[str, str] = {}
    for row in (*ROWS, *METHODS):
        if row.name in names:
            yield (
                row.name,
                lambda row=row: found.update({row.name: cell(row, "sharded")}),
            )
    if not torch.distributed.get_rank():
        file.write_text(json.dumps(found), encoding="utf-8")


def line(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def others(n: int) -> str:
    """The name of the line of all rows that have no name in the table. That they are
    `n` shows that none was added.
    """
    return f"the other {n} rows"


HEAD = [line("", COLUMNS), line("---", ["---"] * len(COLUMNS))]


def table(page: str, new: Collection[str] = ()) -> dict[str, list[str]]:
    """The cells of a page's table, by row, in the order of the registry; rows that are
    new may have none.
    """
    lines = page.split(BEGIN)[1].split(END)[0].strip().splitlines()
    rows = [
        [field.strip() for field in text.strip("|").split("|")]
        for text in lines[len(HEAD) :]
    ]
    found = {name: cells for names, *cells in rows for name in names.split(", ")}
    unnamed = [row.name for row in ROWS if row.name not in found]
    for rest in (unnamed, [name for name in unnamed if name not in new]):
        if others(len(rest)) in found:
            found |= dict.fromkeys(rest, found.pop(others(len(rest))))
    return {row.name: found[row.name] for row in ROWS if row.name in found}


def with_table(page: str, cells: dict[str, list[str]]) -> str:
    """The page with another table: a line for all rows with the same cells; of most
    rows it says how many they are.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in ROWS:
        if row.name in cells:
            alike.setdefault(tuple(cells[row.name]), []).append(row.name)
    names = {found: ", ".join(alike[found]) for found in alike}
    if len(cells) == len(ROWS):
        most = max(alike, key=lambda found: len(alike[found]))
        names[most] = others(len(alike[most]))
    lines = [*HEAD, *(line(names[found], found) for found in alike)]
    return "\n".join(
        [page.split(BEGIN)[0] + BEGIN, "", *lines, "", END + page.split(END)[1]]
    )


def listed(cells: dict[str, str]) -> str:
    """The methods that shards do not serve, by letter."""
    found = {
        letter: [name for name in cells if cells[name] == letter]
        for letter in sorted({*cells.values()} - {"="})
    }
    return "\n".join(
        f"- **{letter}**: "
        f"{', '.join(name.removeprefix('methods: ') for name in found[letter])}"
        for letter in found
    )


def with_methods(page: str, cells: dict[str, str]) -> str:
    """The page with another list of methods."""
    before, after = page.split(BEGIN_METHODS)[0], page.split(END_METHODS)[1]
    return f"{before}{BEGIN_METHODS}\n\n{listed(cells)}\n\n{END_METHODS}{after}"


def main(names: list[str]) -> None:
    if not names or "methods" in names:
        cells = shards_of([row.name for row in METHODS])
        PAGE.write_text(
            with_methods(PAGE.read_text(encoding="utf-8"), cells), encoding="utf-8"
        )
    if "sharded" in names:
        page = PAGE.read_text(encoding="utf-8")
        old, new = table(page), shards_of([row.name for row in ROWS])
        PAGE.write_text(
            with_table(page, {name: [*old[name][:-1], new[name]] for name in new}),
            encoding="utf-8",
        )
    chosen = [row.name for row in ROWS if row.name in names or not names]
    if not chosen:
        return
    known = table(PAGE.read_text(encoding="utf-8"), new=chosen)
    if lost := [row.name for row in ROWS if row.name not in (*known, *chosen)]:
        raise ValueError(
            f"expected the names of all new rows, and of no other rows, got {names}; "
            f"unknown are {lost}"
        )
    last = shards_of(chosen)
    # One process a row: a failed export leaves levels of torch.func behind.
    with multiprocessing.get_context("spawn").Pool(
        os.cpu_count(), maxtasksperchild=1
    ) as pool:
        for name, cells in pool.imap_unordered(cells_of, chosen, chunksize=1):
            known[name] = [*cells, last[name]]
            print(line(name, known[name]), flush=True)
            # row by row: nothing is lost if the run is stopped
            page = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(with_table(page, known), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
