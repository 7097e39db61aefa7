"""What may be done wrong around an attached algorithm, and a state machine that does
all that people do.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import sparsefn as sf
from property_tests.attach_machine import HIDDEN, KINDS, ROWS, Loop, Saved, Setup
from sparsefn.testing.introspection import first_state, learned

# ---- misuse --------------------------------------------------------------------------


class Misuse(NamedTuple):
    """Something wrong to do, the phases that it is tried in, and whether also where
    hooks call the methods.
    """

    do: Callable[[Loop], None]
    phases: str
    hooked: bool = False


def begin(loop: Loop) -> None:
    """The call that looks at the module first."""
    if loop.hooks:
        loop.trio.optimizers[0].step()
    else:
        loop.trio.sparse.before_step()


def before_without_gradients(loop: Loop) -> None:
    with loop.refused(RuntimeError, "no parameter has a new gradient.*backward"):
        begin(loop)


def step_without_before(loop: Loop) -> None:
    with loop.refused(RuntimeError, "before_step"):
        loop.trio.optimizers[-1].step()


def step_twice(loop: Loop) -> None:
    # LBFGS has to have one
    for closure in [[lambda: 0.0], []][: 1 if "lbfgs" in loop.setup.kinds else 2]:
        with loop.refused(RuntimeError, "after_step"):
            loop.trio.optimizers[next(iter(loop.stepped))].step(*closure)


def before_twice(loop: Loop) -> None:
    with loop.refused(RuntimeError, "after_step"):
        loop.trio.sparse.before_step()


def after_without_before(loop: Loop) -> None:
    with loop.refused(RuntimeError, "before_step"):
        loop.trio.sparse.after_step(loop.reference.last + 1)


def moved_without_step(loop: Loop) -> None:
    old = loop.weights()
    with torch.no_grad():
        next(iter(loop.parameters().values())).add_(1.0)
    with loop.refused(RuntimeError, "step"):
        loop.trio.sparse.after_step(loop.now)
    restore(loop, old)
    # as if nothing had been
    loop.step(next(i for i in range(2) if i not in loop.stepped))


def step_of_the_past(loop: Loop) -> None:
    with loop.refused(ValueError, "expected a step after"):
        loop.trio.sparse.after_step(loop.reference.last)


def step_of_another_kind(loop: Loop) -> None:
    with loop.refused(TypeError, "step to be an int"):
        loop.trio.sparse.after_step(1.5)


def other_dtype(loop: Loop) -> None:
    held = {p: (p.data, p.grad) for p in loop.parameters().values()}
    for p in held:
        p.grad = None
    loop.trio.module.to(
        torch.float32 if loop.setup.dtype == torch.float64 else torch.float64
    )
    loop.trio.module(loop.slopes(0)).backward()
    with loop.refused(RuntimeError, "attach again"):
        begin(loop)
    for p, (data, grad) in held.items():
        p.grad = None
        p.data, p.grad = data, grad


def other_parameter(loop: Loop) -> None:
    *path, name = loop.names[-1].split(".")
    layer = loop.trio.module.get_submodule(".".join(path))
    old = getattr(layer, name)
    setattr(layer, name, torch.nn.Parameter(old.detach().clone()))
    with loop.refused(RuntimeError, f"{loop.names[-1]}.*attach again"):
        begin(loop)
    setattr(layer, name, old)


def other_layer(loop: Loop) -> None:
    name = next((path for path in loop.names if "." in path), "").split(".")[0]
    if name:
        old = loop.trio.module.get_submodule(name)
        setattr(loop.trio.module, name, copy.deepcopy(old))
        with loop.refused(RuntimeError, f"{name}.*attach again"):
            begin(loop)
        setattr(loop.trio.module, name, old)


def left_its_optimizer(loop: Loop) -> None:
    trained = {id(slot.parameter) for slot in loop.reference.slots}
    own = next(
        p
        for p, q in zip(loop.optimized(), loop.reference.parameters(), strict=True)
        if id(q) in trained
    )
    group = next(
        g
        for o in loop.trio.optimizers
        for g in o.param_groups
        if any(p is own for p in g["params"])
    )
    old = group["params"]
    group["params"] = [p for p in old if p is not own]
    with loop.refused(RuntimeError, "attach again"):
        begin(loop)
    group["params"] = old


def what_follows_is_not_written(loop: Loop, hides: bool = False) -> None:
    follows = [name for name in loop.names if loop.follows(name)]
    if follows:
        old, weight = loop.weights(), loop.parameters()[follows[0]]
        with torch.no_grad():
            (weight.data if hides else weight).add_(1.0)
        with loop.refused(
            RuntimeError, f"{follows[0]}.*follows? from (latents|scores)"
        ):
            if loop.phase == "stepped":
                loop.trio.sparse.after_step(loop.now)
            else:
                begin(loop)
        restore(loop, old)


def assigned(loop: Loop) -> None:
    module = loop.trio.module
    owners = {
        name: module.get_submodule(name.rpartition(".")[0]) for name in loop.names
    }
    held = loop.parameters()
    module.load_state_dict(
        {name: p.detach().clone() for name, p in held.items()},
        strict=False,
        assign=True,
    )
    with loop.refused(RuntimeError, "was replaced since attach"):
        begin(loop)
    for name, owner in owners.items():
        setattr(owner, name.rpartition(".")[2], held[name])


def copied_alone(loop: Loop) -> None:
    alone = copy.deepcopy(loop.trio.sparse)
    with loop.refused(RuntimeError, "gradient"):
        alone.before_step()


def attached_twice(loop: Loop) -> None:
    with loop.refused(ValueError, "detach"):
        sf.attach(sf.static(0.5), loop.trio.module, loop.trio.optimizers)


def rubbish_loaded(loop: Loop) -> None:
    with loop.refused(ValueError, "load_state_dict"):
        loop.trio.sparse.load_state_dict({"masks": {}})


def other_arguments_loaded(loop: Loop) -> None:
    other = loop.make(0.75)
    if repr(other) == repr(loop.algorithm):
        return
    module, optimizers = loop.fresh(loop._params) if loop.groups else (None, None)
    if module is None or optimizers is None:
        return
    found = sf.attach(
        other, module, optimizers, skip=loop.setup.skip or sf.never()
    ).state_dict()
    with loop.refused(ValueError, "load_state_dict"):
        loop.trio.sparse.load_state_dict(found)


def gone(loop: Loop) -> None:
    module, optimizers, sparse = copy.deepcopy(tuple(loop.trio))
    module(loop.slopes(0)).backward()
    sparse.before_step()
    del sparse
    with pytest.raises(RuntimeError, match="gone.*detach"):
        optimizers[0].step()


@torch.no_grad()
def restore(loop: Loop, old: dict[str, torch.Tensor]) -> None:
    for name, p in loop.parameters().items():
        p.copy_(old[name])


MISUSES = {
    "before without gradients": Misuse(before_without_gradients, "idle", hooked=True),
    "step without before": Misuse(step_without_before, "idle graded"),
    "step twice": Misuse(step_twice, "stepped"),
    "before twice": Misuse(before_twice, "before stepped"),
    "after without before": Misuse(after_without_before, "idle graded"),
    "moved without step": Misuse(moved_without_step, "before"),
    "step of the past": Misuse(step_of_the_past, "before stepped"),
    "step of another kind": Misuse(step_of_another_kind, "before stepped"),
    "other dtype": Misuse(other_dtype, "graded", hooked=True),
    "other parameter": Misuse(other_parameter, "graded", hooked=True),
    "other layer": Misuse(other_layer, "graded", hooked=True),
    "left its optimizer": Misuse(left_its_optimizer, "graded", hooked=True),
    "what follows is not written": Misuse(
        what_follows_is_not_written, "graded stepped"
    ),
    "nor in secret": Misuse(
        functools.partial(what_follows_is_not_written, hides=True), "graded stepped"
    ),
    "assigned": Misuse(assigned, "graded", hooked=True),
    "copied alone": Misuse(copied_alone, "idle graded", hooked=True),
    "attached twice": Misuse(attached_twice, "idle graded before stepped", hooked=True),
    "rubbish loaded": Misuse(rubbish_loaded, "idle graded before stepped", hooked=True),
    "other arguments loaded": Misuse(
        other_arguments_loaded, "idle graded before stepped"
    ),
    "gone": Misuse(gone, "idle"),
}


def misuse(loop: Loop, name: str) -> bool:
    """Do something wrong if its time has come; whether it was done."""
    found = MISUSES[name]
    if (
        loop.phase not in found.phases.split()
        or (loop.hooks and not found.hooked)
        or not fits(loop, name)
    ):
        return False
    found.do(loop)
    return True


def fits(loop: Loop, name: str) -> bool:
    is_lbfgs = "lbfgs" in loop.setup.kinds
    if name in ("copied alone", "gone"):
        return not is_lbfgs  # torch cannot copy it
    if name == "moved without step":
        return loop.must_step and not loop.written and not loop.moved
    if name == "step twice":
        return bool(loop.stepped) and not loop.written
    return not (is_lbfgs and (loop.hooks or name.startswith(("step", "moved"))))


# ---- all that people do --------------------------------------------------------------

CLIPS = ("norm", "value", "noise", "other", "to zero", "to none", "model to none")
WRITES = (
    *(
        "times",
        "some",
        "memory",
        "checkpoint",
        "set",
        "swap",
        "vector",
        "foreach",
        "other dtype and back",
    ),
    *HIDDEN,
)
PARTS = ("module", "optimizers", "sparse")
SEEDS = st.integers(0, 9)
CHOSEN = {
    "default": None,
    "never": sf.never(),
    "at the first": sf.at([0]),
    "every second": sf.every(2),
    "at the third": sf.at([2]),
}


def setups(names: Sequence[str] = tuple(KINDS)) -> st.SearchStrategy[Setup]:
    """Ways to attach: every row, optimizer, dtype, one optimizer or two, with hooks or
    without.
    """
    kinds = st.sampled_from(names)
    several = st.tuples(kinds, kinds).filter(lambda pair: "lbfgs" not in pair)
    triggers = st.sampled_from(list(CHOSEN.values()))
    return st.builds(
        Setup,
        st.sampled_from(list(ROWS)),
        st.tuples(kinds) | several if len(names) > 1 else st.tuples(kinds),
        st.sampled_from(
            [torch.float32] * 4 + [torch.float64, torch.float16, torch.bfloat16]
        ),
        st.sampled_from([False, False, True]),
        triggers,
        st.sampled_from([None, None, None, sf.at([2])]),
        st.sampled_from([None, {"lr": 0.05}]),
        st.just(False),
    ).map(settled)


def settled(setup: Setup) -> Setup:
    """The nearest setup that `attach` takes: some need `skip`, and a group of their own
    is for what is added.
    """
    if setup.skip is None and needs_skip(setup.row):
        setup = setup._replace(skip=sf.never())
    if not learns(setup.row) or "lbfgs" in setup.kinds:
        setup = setup._replace(extra=None)
    return setup._replace(hooks=setup.hooks and len(setup.kinds) == 1)


@functools.cache
def learns(row: str) -> bool:
    """Whether something else than params trains, which `attach` adds to an
    optimizer.
    """
    return bool(learned(first_state(ROWS[row])))


@functools.cache
def needs_skip(row: str) -> bool:
    """Whether a score of a row multiplies weights by gradients, so that `attach` asks
    for `skip`.
    """
    try:
        Loop(Setup(row))
    except ValueError as error:
        assert "skip=" in str(error)
        return True
    return False


class Machine(RuleBasedStateMachine):
    """A loop in which anything may come next that makes sense, and much that does
    not.
    """

    @initialize(setup=setups())
    def begin(self, setup: Setup) -> None:
        self.loop, self.saved = Loop(setup), list[Saved]()
        self.lbfgs, self.alone = "lbfgs" in setup.kinds, len(setup.kinds) == 1

    def phase(self, *phases: str) -> bool:
        return self.loop.phase in phases

    # ---- a step ----------------------------------------------------------------------

    @precondition(lambda self: not self.lbfgs and self.phase("idle", "graded"))
    @rule(seed=SEEDS, part=st.booleans())
    def backward(self, seed: int, part: bool) -> None:
        self.loop.backward(
            seed, self.loop.names[:1] if part and not self.loop.has_grads() else None
        )

    @precondition(lambda self: self.phase("stepped", "before"))
    @rule(seed=SEEDS)
    def backward_too_late(self, seed: int) -> None:
        self.loop.backward(seed)

    @precondition(
        lambda self: self.phase("graded") and not self.loop.hooks and not self.lbfgs
    )
    @rule(jump=st.sampled_from([None, None, 0, 3]))
    def before_step(self, jump: int | None) -> None:
        self.loop.before(None if jump is None else self.loop.reference.last + 1 + jump)

    @precondition(lambda self: self.phase("graded", "before", "stepped"))
    @rule(kind=st.sampled_from(CLIPS))
    def gradients(self, kind: str) -> None:
        self.loop.write_grads(kind)

    @precondition(lambda self: self.phase("before") and not self.lbfgs)
    @rule()
    def step(self) -> None:
        self.loop.step(next(i for i in range(2) if i not in self.loop.stepped))

    @precondition(
        lambda self: self.phase("graded") and self.loop.hooks and not self.lbfgs
    )
    @rule()
    def hooked_step(self) -> None:
        self.loop.step()

    @precondition(lambda self: self.phase("before", "stepped"))
    @rule(numpy=st.booleans())
    def after_step(self, numpy: bool) -> None:
        loop = self.loop
        if loop.must_step and loop.moved:
            with loop.refused(RuntimeError, "another optimizer"):
                loop.trio.sparse.after_step(loop.now)
        else:
            loop.after(numpy)

    @precondition(lambda self: self.phase("idle", "graded") and not self.loop.hooks)
    @rule(seed=SEEDS, clip=st.sampled_from([None, *CLIPS]))
    def whole_step(self, seed: int, clip: str | None) -> None:
        if self.lbfgs and not self.loop.written:
            self.loop.closure(seed, calls=clip is None)
        elif not self.lbfgs:
            step(self.loop, seed, clip)

    @precondition(
        lambda self: (
            self.alone and self.phase("idle", "graded") and not self.loop.written
        )
    )
    @rule(seed=SEEDS, calls=st.booleans(), wipes=st.booleans())
    def closure(self, seed: int, calls: bool, wipes: bool) -> None:
        self.loop.closure(seed, calls and not self.loop.hooks, wipes)

    @precondition(
        lambda self: (
            self.phase("idle", "graded") and not self.loop.hooks and not self.lbfgs
        )
    )
    @rule(seed=SEEDS, finite=st.booleans())
    def scaled(self, seed: int, finite: bool) -> None:
        if self.loop.setup.dtype in (torch.float32, torch.float64):
            self.loop.scaled(seed, finite)

    # ---- between steps ---------------------------------------------------------------

    @rule(kind=st.sampled_from(WRITES), seed=SEEDS)
    def write(self, kind: str, seed: int) -> None:
        self.loop.write(kind, seed)

    @precondition(lambda self: self.phase("idle", "graded"))
    @rule()
    def apply_masks(self) -> None:
        self.loop.apply_masks()

    @rule(factor=st.sampled_from([0.5, 2.0]))
    def rate(self, factor: float) -> None:
        self.loop.rate(factor)

    @precondition(lambda self: not self.lbfgs and self.loop.groups is not None)
    @rule()
    def regroup(self) -> None:
        if any(
            len(group["params"]) > 1
            for group in self.loop.trio.optimizers[0].param_groups
        ):
            self.loop.regroup()
            self.saved.clear()

    @precondition(lambda self: self.phase("idle", "graded") and not self.loop.written)
    @rule()
    def save(self) -> None:
        self.saved = [*self.saved[-1:], self.loop.save()]

    @precondition(lambda self: bool(self.saved))
    @rule(order=st.permutations(PARTS), which=st.integers(0, 1))
    def load(self, order: list[str], which: int) -> None:
        self.loop.load(self.saved[-which], order)

    @precondition(lambda self: bool(self.saved))
    @rule()
    def load_optimizers(self) -> None:
        self.loop.load(self.saved[-1], ["optimizers"])

    @precondition(lambda self: bool(self.saved))
    @rule(order=st.permutations(["module", "sparse"]))
    def load_without_optimizers(self, order: list[str]) -> None:
        self.loop.load(self.saved[-1], order)

    @precondition(lambda self: bool(self.saved) and self.loop.groups is not None)
    @rule(order=st.permutations(["attach", *PARTS]), seed=SEEDS)
    def resume(self, order: list[str], seed: int) -> None:
        attached, adds = order.index("attach"), learns(self.loop.setup.row)
        late = ["sparse", "optimizers"] if adds else ["sparse"]
        self.loop.resume(
            self.saved[-1],
            sorted(
                order, key=lambda x: attached + 0.5 if x in late else order.index(x)
            ),
            seed,
        )

    @precondition(
        lambda self: self.phase("idle") and not self.lbfgs and not self.loop.written
    )
    @rule(order=st.permutations(range(3)), pickles=st.booleans())
    def copy(self, order: list[int], pickles: bool) -> None:
        self.loop.copies(order, pickles and pickled(self.loop))

    @precondition(lambda self: self.phase("idle", "graded") and not self.loop.written)
    @rule(hooks=st.booleans(), keeps=st.booleans())
    def reattach(self, hooks: bool, keeps: bool) -> None:
        self.loop.reattach(hooks and self.alone, keeps)
        self.saved.clear()

    @rule(name=st.sampled_from(list(MISUSES)))
    def misuse(self, name: str) -> None:
        misuse(self.loop, name)


def step(loop: Loop, seed: int, clip: str | None = None) -> None:
    """A whole step, with a clipping of gradients."""
    for p in loop.optimized():
        p.grad = None
    loop.backward(seed)
    if loop.hooks:
        loop.step()
    else:
        loop.before()
        if clip:
            loop.write_grads(clip)
        for owner in range(len(loop.trio.optimizers)):
            loop.step(owner)
        loop.write_grads("model to none" if seed % 2 else "to none")
        loop.after()


def pickled(loop: Loop) -> bool:
    """Whether the parts of an algorithm have names to be pickled by."""
    try:
        pickle.dumps((loop.algorithm, loop.setup.skip, loop.setup.reset))
    except (AttributeError, pickle.PicklingError):
        return False
    return True


class LbfgsMachine(Machine):
    """The machine with LBFGS alone, whose one state is that of all parameters."""

    @initialize(setup=setups(["lbfgs"]))
    def begin(self, setup: Setup) -> None:
        super().begin(setup)
