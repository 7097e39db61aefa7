"""A digest of every registry row and method, to hold a change of the code against: the
same bits, or which differ.

    python -m property_tests.digests before.json
    python -m property_tests.digests after.json before.json

A digest is that of the states after init and after each update of the fixed run of a
row. Ways are eager, vmapped, compiled, donated, sharded (on a mesh of one process) and
on "meta", where a leaf has a shape and a dtype only. Rows without an optimizer get one
in every way but the first. What a way refuses stands there as the error. Numbers of one
machine are not those of another: roots and products of matrices may be rounded in other
ways.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import optree
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import sparsefn as sf
from property_tests.registry import ROWS
from property_tests.transforms import METHODS, case_of
from sparsefn.core.state import State
from sparsefn.core.tree import Tree
from sparsefn.testing import Case, Row
from sparsefn.testing.harness import algorithm_of, hash_of, leaves, trained_of, updates
from tests.nn.distributed.sharded import full, laid


def eager(row: Row, case: Case) -> Iterator[State]:
    """The algorithm as it is."""
    return updates(algorithm_of(row, case), case)


def trained(row: Row, case: Case) -> Iterator[State]:
    """With an optimizer, at steps that are tensors."""
    return updates(trained_of(row, case), case, torch.tensor)


def vmapped(row: Row, case: Case) -> Iterator[State]:
    """A batch of two runs, of other weights and gradients."""
    algorithm = trained_of(row, case)
    state = sf.ensemble.stack(
        [algorithm.init(params) for params in (case.params, case.grads[0])]
    )
    for i, grads in enumerate(case.grads):
        batch = sf.ensemble.stack([grads, case.grads[i - 1]])
        state = torch.vmap(algorithm.update, in_dims=(0, 0, None))(state, batch, i)
        yield state


def compiled(row: Row, case: Case) -> Iterator[State]:
    """Updates in one graph."""
    torch._dynamo.reset()
    algorithm = trained_of(row, case)
    return updates(
        algorithm._replace(
            update=torch.compile(algorithm.update, backend="eager", fullgraph=True)
        ),
        case,
    )


def donated(row: Row, case: Case) -> Iterator[State]:
    """States that updates write over; a digest is made before the next one."""
    return updates(sf.donated(trained_of(row, case)), case)


def sharded(row: Row, case: Case) -> Iterator[State]:
    """Every leaf split along its first dimension."""
    mesh = init_device_mesh("cpu", (1,))
    params, *grads = (
        laid(tree, mesh, [Shard(0)]) for tree in (case.params, *case.grads)
    )
    spread = case._replace(params=params, grads=tuple(grads))
    return (full(state) for state in updates(trained_of(row, spread), spread))


def on_meta(row: Row, case: Case) -> Iterator[State]:
    """Without values."""
    params, *grads = (
        optree.tree_map(lambda x: x.to("meta"), tree)
        for tree in (case.params, *case.grads)
    )
    there = case._replace(params=params, grads=tuple(grads))
    return updates(trained_of(row, there), there)


WAYS: dict[str, Callable[[Row, Case], Iterator[State]]] = {
    "eager": eager,
    "trained": trained,
    "vmapped": vmapped,
    "compiled": compiled,
    "donated": donated,
    "sharded": sharded,
    "meta": on_meta,
}


def digest_of(states: Iterable[Tree]) -> str:
    """The digest of all states; a leaf on "meta" counts as its path, shape and
    dtype.
    """
    found = hashlib.sha256()
    for state in states:
        known = {
            path: leaf
            for path, leaf in leaves(state).items()
            if leaf.device.type != "meta"
        }
        others = [
            (path, leaf.shape, leaf.dtype)
            for path, leaf in leaves(state).items()
            if path not in known
        ]
        found.update(f"{hash_of(known)} {others}".encode())
    return found.hexdigest()


def digests(rows: Iterable[Row], ways: Iterable[str] = tuple(WAYS)) -> dict[str, str]:
    """`{"row, way": digest}`, or the first line of the error."""
    found, chosen = {}, list(ways)
    for row in rows:
        case = case_of(row)
        for way in chosen:
            try:
                found[f"{row.name}, {way}"] = digest_of(WAYS[way](row, case))
            except Exception as error:
                found[f"{row.name}, {way}"] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0]}"
                )
    return found


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """What has other digests, or stands on one side only."""
    return sorted(
        key for key in one.keys() | other.keys() if one.get(key) != other.get(key)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("other", type=Path, nargs="?")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        found = digests([*ROWS, *METHODS])
        dist.destroy_process_group()
    options.out.write_text(json.dumps(found, indent=1))
    whole = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    print(
        f"{len(found)} digests, {sum(':' in text for text in found.values())} of them "
        f"errors; all: {whole}"
    )
    if options.other is not None:
        others = differing(found, json.loads(options.other.read_text()))
        print(f"{len(others)} differ from {options.other}", *others, sep="\n")


if __name__ == "__main__":
    main()
