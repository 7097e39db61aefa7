"""What Python decides by the step while an update sees a tensor."""

import pytest
import torch

import sparsefn as sf
from sparsefn.timing.decisions import decide, has_host_step, host_step

STEP = torch.tensor(0)


@pytest.mark.parametrize(
    ("when", "fires"),
    [
        (sf.every(10), True),
        (sf.every(7), False),
        (sf.at([20]), True),
        (sf.at([0]), False),
        (sf.always(), True),
    ],
    ids=repr,
)
def test_triggers_are_asked_with_the_number(when, fires):
    with host_step(STEP, 20) as decisions:
        assert when(STEP) is fires
    ((question, answer),) = decisions
    assert answer is fires
    assert question(20) is fires


def test_never_asks_nothing():
    with host_step(STEP, 20) as decisions:
        assert sf.never()(STEP) is False
    assert decisions == []


@pytest.mark.parametrize(
    ("step", "number", "when"),
    [
        (STEP + 1, 20, sf.every(10)),
        (STEP, None, sf.every(10)),
        (STEP, 20, sf.every(torch.tensor(10))),
        (STEP, 20, sf.at([torch.tensor(20)])),
    ],
    ids=["another tensor", "no number", "every of a tensor", "at a tensor"],
)
def test_other_answers_are_tensors_of_the_step(step, number, when):
    with host_step(STEP, number) as decisions:
        assert torch.equal(when(step), when(step.clone()))
        assert isinstance(when(step), torch.Tensor)
    assert decisions == []


def test_counts_and_schedules_see_the_tensor():
    with host_step(STEP, 20) as decisions:
        assert torch.equal(sf.every(10).count(STEP), torch.tensor(1))
        assert torch.equal(
            sf.schedules.linear(0.5, 0.1)(STEP), torch.tensor(0.5).double()
        )
    assert decisions == []


def test_compiled_code_asks_with_its_own_step():
    fires = torch.compile(sf.every(10), backend="eager", fullgraph=True)
    with host_step(STEP, 20):
        assert torch.equal(fires(torch.tensor(5)), torch.tensor(False))


def test_a_context_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), host_step(STEP, 20):
        assert has_host_step()
        raise ZeroDivisionError
    assert not has_host_step()
    assert torch.equal(decide(lambda step: step > 10, STEP), torch.tensor(False))
