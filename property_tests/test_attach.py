"""Every algorithm of the registry, and every method, attached to modules that torch's optimizers train."""

import pytest
import torch
from hypothesis import HealthCheck, settings

import sparsefn as sf
from property_tests.attach_machine import KINDS, ROWS, Loop, Setup
from property_tests.attach_rules import MISUSES, Machine, misuse, needs_skip, pickled, settled, step
from property_tests.effort import tries
from property_tests.laws_attach import Kind, Reference, step_of_reference
from sparsefn.testing.harness import assert_same, leaves
from sparsefn.testing.strategies import large

TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=max(1, tries()),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", ROWS)
def test_the_reference_is_with_optimizer(name: str) -> None:
    case = large(ROWS[name].meta.layout.form, 24)
    params = {path: leaf for path, leaf in leaves(case.params).items()}
    algorithm = ROWS[name].make(0.5, sf.random.key(3), params)
    skip, reset = sf.at([1]), sf.at([2])
    alone = sf.with_optimizer(algorithm, sf.optimizers.sgd(0.25, momentum=0.5), skip=skip, reset=reset)
    kind, groups = Kind(torch.optim.SGD, {"lr": 0.25, "momentum": 0.5}), [[list(params)]]
    reference, state = Reference(algorithm, params, groups, [kind], skip, reset, None), alone.init(params)
    for i in range(4):
        grads = {path: x / 2**i for path, x in leaves(case.grads[i % len(case.grads)]).items()}
        state = alone.update(state, grads, i)
        assert_same(f"step {i}", step_of_reference(reference, grads, i), state._replace(opt=()))


@pytest.mark.parametrize("name", ROWS)
def test_a_script(name: str) -> None:
    """What the machine does by chance, once in order for each row; rows take turns with the optimizers."""
    kinds = [kind for kind in KINDS if kind != "lbfgs"]
    turn = list(ROWS).index(name)
    kind = kinds[turn % len(kinds)]
    script(Loop(settled(Setup(name, (kind,), skip=[None, sf.at([1])][turn % 2]))))


def script(loop: Loop) -> None:
    """The days of a run."""
    step(loop, 0)
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
    saved = loop.save()
    loop.write("checkpoint", 2)
    step(loop, 2, "other")
    loop.write("some", 3)
    loop.load(saved, ["optimizers"])
    step(loop, 3, "value")
    loop.load(saved, ["module", "optimizers", "sparse"])
    step(loop, 4)
    loop.resume(saved, ["module", "attach", "sparse", "optimizers"], 7)
    step(loop, 5)
    loop.copies((0, 1, 2), pickled(loop))
    step(loop, 6)
    loop.rate(0.5)
    loop.scaled(7, finite=False)
    loop.after()
    loop.regroup()
    loop.reattach(hooks=True, keeps=True)
    step(loop, 8)
    loop.reattach(hooks=False, keeps=False)
    loop.closure(9, calls=False)
    loop.after()
    step(loop, 9)
