"""One run of an algorithm through all that people do with a state, in any order, beside
plain eager updates.

The oracle makes its algorithm anew for every update and copies what it is given, so
that nothing is remembered there. A machine runs inside `one_process()`.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import optree
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import sparsefn as sf
from property_tests.registry import ROWS
from sparsefn.core.tree import Tree, leaves_of
from sparsefn.testing import Row
from sparsefn.testing.harness import assert_same
from sparsefn.testing.laws_states import threads
from sparsefn.testing.strategies import large
from tests.nn.distributed.sharded import full, laid

NAMES = (
    "gmp",
    "rigl",
    "snfs",
    "ste",
    "chain",
    "set",
    "adam rigl",
    "sgd ste",
    "parts supermask",
    "gmp channel",
)
CHOSEN = {row.name: row for row in ROWS if row.name in NAMES}
SPARSITIES = (0.5, 0.25, 0.75)
Update = Callable[[sf.Algorithm, sf.State, Tree, Any], sf.State]


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A group of this process alone, on whose mesh states are sharded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def cloned(tree: Tree) -> Tree:
    return optree.tree_map(torch.clone, tree)


def eager(algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any) -> sf.State:
    return algorithm.update(state, grads, step)


def given_away(
    algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any
) -> sf.State:
    return sf.donated(algorithm).update(state, grads, step)


def in_a_batch(
    algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any
) -> sf.State:
    """The second of two members, the first of which gets other gradients."""
    others = optree.tree_map(torch.neg, grads)
    stacked = sf.ensemble.stack([state, state]), sf.ensemble.stack([others, grads])
    new: sf.State = sf.ensemble.unstack(
        torch.vmap(algorithm.update, in_dims=(0, 0, None))(*stacked, step)
    )[1]
    return new


def with_threads(
    algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any
) -> sf.State:
    with threads(3):
        return algorithm.update(state, grads, step)


def compiled(
    algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any
) -> sf.State:
    torch._dynamo.reset()
    update = torch.compile(algorithm.update, backend="eager", fullgraph=True)
    new: sf.State = update(state, grads, torch.tensor(step))
    return new


UNSHARDED = (in_a_batch, compiled)  # DTensors are not served there


def loaded(algorithm: sf.Algorithm, params: Tree, saved: dict[str, Any]) -> sf.State:
    return sf.checkpoint.load_state_dict(algorithm.init(params), saved)


def made(row: Row, sparsity: float, params: Tree) -> sf.Algorithm:
    return row.make(sparsity, sf.random.key(3), params)


class Machine(RuleBasedStateMachine):
    """What is done to one state; `made` is where a bug is planted."""

    names: tuple[str, ...] = NAMES
    ways: ClassVar[tuple[Update, ...]] = (eager, given_away, in_a_batch, with_threads)
    make = staticmethod(made)

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.row, self.step = CHOSEN[data.draw(st.sampled_from(self.names))], 0
        self.case = large(self.row.meta.layout.form, 40)
        self.sparsity = SPARSITIES[0]
        self.lay: Callable[[Tree], Tree] = cloned  # or onto shards
        self.saved: tuple[dict[str, Any], sf.State, int] | None = None
        self.algorithm = self.make(self.row, self.sparsity, self.case.params)
        self.state = self.algorithm.init(cloned(self.case.params))
        self.wanted = made(self.row, self.sparsity, self.case.params).init(
            cloned(self.case.params)
        )
        self.same()
        self.updated(0, 0, 0)

    def same(self) -> None:
        assert_same(
            f"{self.row.name} before step {self.step}", self.wanted, full(self.state)
        )

    @rule(way=st.integers(0, 100), which=st.integers(0, 2), skipped=st.integers(0, 2))
    def update(self, way: int, which: int, skipped: int) -> None:
        """The next step, or one that is later, so that a trigger may be left out."""
        self.updated(way, which, skipped)

    @rule(way=st.integers(0, 100), which=st.integers(0, 2), times=st.integers(1, 4))
    def go_on(self, way: int, which: int, times: int) -> None:
        """A few steps, each in another way."""
        for i in range(times):
            self.updated(way + i, which, 0)

    def updated(self, way: int, which: int, skipped: int) -> None:
        """A step in one of the ways, and in the oracle."""
        self.step += skipped
        run = self.ways[way % len(self.ways)]
        if run in UNSHARDED:
            self.gather()
        oracle = made(self.row, self.sparsity, self.case.params)
        self.wanted = oracle.update(
            cloned(self.wanted), cloned(self.case.grads[which]), self.step
        )
        grads = self.lay(self.case.grads[which])
        self.state = run(self.algorithm, self.state, grads, self.step)
        # buffers of gradients are written to again
        optree.tree_map_(lambda x: x.fill_(7), grads)
        self.step += 1
        self.same()

    @rule(fresh=st.booleans())
    def save_and_load(self, fresh: bool) -> None:
        if fresh:
            self.algorithm = self.make(self.row, self.sparsity, self.case.params)
        if self.lay is not cloned:
            return self.move(self.lay)
        saved = {
            name: x.clone() for name, x in sf.checkpoint.state_dict(self.state).items()
        }
        self.saved = saved, self.wanted, self.step
        self.state = loaded(self.algorithm, self.case.params, saved)
        self.same()

    @precondition(lambda self: getattr(self, "saved", None))
    @rule()
    def go_back(self) -> None:
        """To what was saved last, which may have been loaded before."""
        assert self.saved is not None
        saved, self.wanted, self.step = self.saved
        self.lay, self.state = cloned, loaded(self.algorithm, self.case.params, saved)
        self.same()

    @rule()
    def shard(self) -> None:
        """Every leaf is split along its first dimension."""
        mesh = init_device_mesh("cpu", (1,))
        self.move(lambda tree: laid(cloned(tree), mesh, [Shard(0)]))
        assert all(
            isinstance(x, DTensor) for x in leaves_of(self.state.masks) if x.ndim
        )

    @rule()
    def gather(self) -> None:
        if self.lay is not cloned:
            self.move(cloned)

    def move(self, lay: Callable[[Tree], Tree]) -> None:
        """Through a folder, as between programs of other numbers of processes."""
        self.lay = lay
        with tempfile.TemporaryDirectory() as folder:
            sf.distributed.save(self.state, Path(folder) / "ckpt")
            self.state = sf.distributed.load(
                self.algorithm.init(lay(self.case.params)), Path(folder) / "ckpt"
            )
        self.same()

    @rule()
    def stack_and_unstack(self) -> None:
        other = self.algorithm.init(self.lay(self.case.params))
        self.state = sf.ensemble.unstack(sf.ensemble.stack([other, self.state]))[1]
        self.same()

    @rule(
        to=st.sampled_from(SPARSITIES),
        way=st.integers(0, 100),
        which=st.integers(0, 2),
        times=st.integers(0, 2),
    )
    def change_the_sparsity(self, to: float, way: int, which: int, times: int) -> None:
        """With two steps, one of which is a trigger's, or with fewer."""
        self.sparsity = to
        self.algorithm = self.make(self.row, to, self.case.params)
        self.go_on(way, which, times)

    @rule()
    def copy(self) -> None:
        self.state = copy.deepcopy(self.state)
        self.same()
