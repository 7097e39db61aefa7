"""Every algorithm of the registry, and every method, attached to modules that torch's
optimizers train.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import sparsefn as sf
from property_tests.attach_machine import KINDS, ROWS, Loop, Setup
from property_tests.attach_rules import (
    MISUSES,
    WRITES,
    LbfgsMachine,
    Machine,
    misuse,
    pickled,
    settled,
    step,
)
from property_tests.effort import tries
from property_tests.laws_attach import Kind, Reference, step_of_reference
from property_tests.registry import QUICK_ROWS
from sparsefn._engine.torch_limits import OLD
from sparsefn.nn.attach import (
    Attached,
    files,
    handle,
    loop,
    module_state,
    optimizer_state,
)
from sparsefn.nn.attach.parameters import dense_gradient, set_gradients
from sparsefn.testing.harness import assert_same, leaves
from sparsefn.testing.strategies import large

pytestmark = pytest.mark.filterwarnings(
    "ignore:before_step. other code wrote to pruned entries"
)
TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=2 * tries(),
    stateful_step_count=40,
    report_multiple_bugs=False,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLbfgsMachine = LbfgsMachine.TestCase
TestLbfgsMachine.settings = settings(TestMachine.settings, max_examples=8 * tries())


@pytest.mark.deep(but=[row for row in QUICK_ROWS if row in ROWS])
@pytest.mark.parametrize("name", ROWS)
def test_the_reference_is_with_optimizer(name: str) -> None:
    case = large(ROWS[name].meta.layout.form, 24)
    params = dict(leaves(case.params))
    algorithm = ROWS[name].make(0.5, sf.random.key(3), params)
    skip, reset = sf.at([1]), sf.at([2])
    alone = sf.with_optimizer(
        algorithm, sf.optimizers.sgd(0.25, momentum=0.5), skip=skip, reset=reset
    )
    kind, groups = (
        Kind(torch.optim.SGD, {"lr": 0.25, "momentum": 0.5}),
        [[list(params)]],
    )
    reference, state = (
        Reference(algorithm, params, groups, [kind], skip, reset, None),
        alone.init(params),
    )
    for i in range(4):
        grads = {
            path: x / 2**i
            for path, x in leaves(case.grads[i % len(case.grads)]).items()
        }
        state = alone.update(state, grads, i)
        assert_same(
            f"step {i}", step_of_reference(reference, grads, i), state._replace(opt=())
        )


@pytest.mark.deep(
    but=[
        "chain",
        "gmp nm",
        "low_rank",
        "partition",
        "rigl",
        "sequence",
        "soft_threshold",
        "ste",
        "supermask",
        "with_terms",
    ]
)
@pytest.mark.parametrize("name", ROWS)
def test_a_script(name: str) -> None:
    """What the machine does by chance, once in order for each row; rows take turns with
    the optimizers.
    """
    # torch 2.11's Adagrad takes no parameter that is added later
    left_out = {"lbfgs", "adagrad"} if OLD else {"lbfgs"}
    kinds = [kind for kind in KINDS if kind not in left_out]
    turn = list(ROWS).index(name)
    kind = kinds[turn % len(kinds)]
    script(Loop(settled(Setup(name, (kind,), skip=[None, sf.at([1])][turn % 2]))))


def script(loop: Loop) -> None:
    """The days of a run."""
    step(loop, 0)
    saved = loop.save()
    for name in MISUSES:
        misuse(loop, name)
    loop.backward(1)
    for name in MISUSES:
        misuse(loop, name)
    loop.before()
    for name in MISUSES:
        misuse(loop, name)
    if loop.phase == "before":
        loop.write_grads("norm")
        loop.step()
    for name in MISUSES:
        misuse(loop, name)
    loop.write_grads("to zero")
    loop.after(numpy=True)
    loop.write("checkpoint", 2)
    step(loop, 2, "other")
    loop.write("some", 3)
    loop.load(saved, ["optimizers"])
    step(loop, 3, "value")
    loop.load(saved, ["module", "optimizers", "sparse"])
    step(loop, 4)
    loop.resume(saved, ["module", "attach", "sparse", "optimizers"], 7)
    step(loop, 5)
    loop.resume(saved, ["attach", "module", "optimizers", "sparse"], 8)
    step(loop, 5)
    loop.resume(saved, ["attach", "secret", "sparse", "optimizers"], 8)
    step(loop, 5)
    loop.copies((0, 1, 2), pickled(loop))
    step(loop, 6)
    loop.rate(0.5)
    if loop.setup.dtype != torch.float16:  # a GradScaler takes none
        loop.scaled(7, finite=False)
        loop.after()
    loop.regroup()
    loop.reattach(hooks=True, keeps=True)
    step(loop, 8)
    loop.reattach(hooks=False, keeps=False)
    loop.closure(9, calls=False)
    for name in MISUSES:
        misuse(loop, name)
    loop.after()
    step(loop, 9)
    loop.reattach(hooks=False, keeps=True)
    for kind in WRITES:
        loop.write(kind, 2)
        step(loop, 3)
    loop.write("data", 4)
    loop.apply_masks()
    step(loop, 4)


@pytest.mark.deep(but=["rigl"])
@pytest.mark.parametrize("name", ["rigl", "ste", "supermask"])
def test_a_compiled_module(name: str) -> None:
    loop = Loop(settled(Setup(name, compiled=True)))
    for seed in range(3):
        step(loop, seed)


# ---- bugs that the law must notice ---------------------------------------------------


def given_anew(give: Any) -> Any:
    """Latents whose gradient is that of their weight get none."""

    def wrong(records: Any, trained: Any, *rest: Any) -> None:
        dense = list(rest[-1].values())
        give(records, trained, *rest)
        for record in trained:
            if record.added_for and any(
                torch.equal(record.parameter.grad, grad) for grad in dense
            ):
                set_gradients([record], [None])

    return wrong


def given_alike(give: Any) -> Any:
    """Gradients that pass through are kept as they are, and not copied."""

    def wrong(*arguments: Any) -> None:
        give(*arguments)
        records, dense = {record.name: record for record in arguments[0]}, arguments[-1]
        for name, grad in dense.items():
            own = records[name].parameter.grad
            if own is not None and torch.equal(own, grad):
                dense[name] = own

    return wrong


def twice(before_step: Any) -> Any:
    """A forgotten `after_step` is not noticed."""

    def wrong(self: Any, *arguments: Any) -> None:
        self._position = self._position.begin_again()
        before_step(self, *arguments)

    return wrong


def by_closure(enter_step: Any) -> Any:
    """A forgotten `after_step` is not noticed where steps have a closure."""

    def wrong(self: Any, optimizer: Any, closes: bool) -> None:
        if not closes:
            enter_step(self, optimizer, closes)

    return wrong


def restored(unmasked: Any) -> Any:
    """Weights that are all zeros are taken for those that nobody has loaded."""

    def wrong(self: Any) -> Any:
        found = {
            name: x
            for name, x in self.found.items()
            if not self.weights[name].parameter.any()
        }
        return unmasked(self) | found

    return wrong


def shared(_: Any) -> Any:
    """A copy writes to the parameters of the original."""

    def wrong(self: Any, memo: Any) -> Any:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    return wrong


def by_nobody(_: Any) -> Any:
    """Which optimizers have stepped is forgotten."""
    return lambda self, optimizer: self._replace(moving=None)


def always(value: Any) -> Any:
    return lambda _: lambda *arguments, **options: value


Plant = Callable[[Any], Any]

# bug: (setup, where, name, what is made of it)
BUGS: dict[str, tuple[Setup, Any, str, Plant]] = {
    "latents that are weights do not train": (
        Setup("soft_nm"),
        handle,
        "give",
        given_anew,
    ),
    "latents with an exponent of one do not train": (
        Setup("powerprop of one"),
        handle,
        "give",
        given_anew,
    ),
    "every optimizer keeps entries apart": (
        Setup("static", ("adafactor",)),
        module_state,
        "zeros_stay",
        always(True),
    ),
    "pruned weights are not zeroed": (
        Setup("static"),
        module_state,
        "zero_",
        always(None),
    ),
    "what is written in secret is lost": (
        Setup("ste"),
        module_state.ModuleState,
        "shows",
        always(True),
    ),
    "what follows is written": (
        Setup("supermask"),
        module_state,
        "check_followers",
        always(None),
    ),
    "what is loaded in secret is lost": (
        Setup("rigl"),
        module_state,
        "differ",
        lambda _: lambda pairs: [False] * len(pairs),
    ),
    "dense gradients are those of the optimizer": (
        Setup("ste by mean saliency"),
        handle,
        "give",
        given_alike,
    ),
    "a gradient is missing": (
        Setup("rigl"),
        handle,
        "dense_gradients",
        lambda _: zero_gradients,
    ),
    "before_step may come twice": (Setup("rigl"), Attached, "before_step", twice),
    "closures may step twice": (Setup("rigl"), Attached, "enter_step", by_closure),
    "step sizes begin at zero": (
        Setup("rigl", ("rprop",)),
        optimizer_state,
        "first_value",
        always(0.0),
    ),
    "sums begin at zero": (
        Setup("rigl", ("adagrad",)),
        optimizer_state,
        "first_value",
        always(0.0),
    ),
    "what users write is lost": (
        Setup("rigl"),
        module_state,
        "with_module_values",
        lambda _: lambda call, state, written: state,
    ),
    "zeros are not loaded": (
        Setup("nothing at first"),
        module_state.ModuleState,
        "unmasked",
        restored,
    ),
    "other arguments are loaded": (
        Setup("rigl"),
        files,
        "_check_arguments",
        always(None),
    ),
    "a copy is the original": (Setup("rigl"), Attached, "__deepcopy__", shared),
    "moments are kept where masks change": (
        Setup("rigl"),
        handle,
        "clear_changed",
        always(None),
    ),
    "moments that are loaded are not masked": (
        Setup("gmp"),
        module_state,
        "clear_moments",
        always(None),
    ),
    "nothing is hidden": (Setup("ste"), module_state, "set_hidden", always(None)),
    "no gradient is finite": (Setup("rigl"), handle, "all_finite", always(False)),
    "members are not looked at": (
        Setup("rigl"),
        loop.ParameterLinks,
        "new_members",
        always([]),
    ),
    "replaced layers are not looked at": (
        Setup("rigl"),
        loop.ParameterLinks,
        "check_module",
        always(None),
    ),
    "who stepped is forgotten": (Setup("rigl"), loop.Position, "leave", by_nobody),
    "others may move weights": (Setup("rigl"), loop, "without_step", always("")),
}


def zero_gradients(records: Any) -> Any:
    return {
        record.name: dense_gradient(record.parameter, record.parameter)
        for record in records
    }


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS)
def test_the_law_notices_the_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, where, name, plant = BUGS[bug]
    setup = settled(setup)
    script(Loop(setup))
    monkeypatch.setattr(
        where, name, plant(getattr(where, name, None)), raising=name != "__deepcopy__"
    )
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        script(Loop(setup))
