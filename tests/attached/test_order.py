import gc

import numpy as np
import pytest
import torch

from sparsefn.attached.order import later, watch, watched
from sparsefn.attached.records import Record


class Notes:
    def __init__(self):
        self.seen = []

    def enter_step(self, optimizer):
        self.seen.append("enter")

    def leave_step(self, optimizer):
        self.seen.append("leave")

    def around_closure(self, optimizer, closure):
        self.seen.append("before")
        result = closure()
        self.seen.append("after")
        return result


def watching(keep=False):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    notes = Notes()
    return notes, weight, optimizer, watch(notes, [Record("w", weight, optimizer)], keep)


def test_a_step_is_seen():
    notes, weight, optimizer, remove = watching()
    optimizer.step()
    assert notes.seen == ["enter", "leave"] and watched(weight)
    remove()
    optimizer.step()
    assert notes.seen == ["enter", "leave"] and not watched(weight)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_a_closure_is_wrapped():
    notes, _, optimizer, _remove = watching()
    assert optimizer.step(lambda: 3.0) == 3.0
    assert optimizer.step(closure=lambda: 4.0) == 4.0
    assert notes.seen == ["before", "after", "leave"] * 2


@pytest.mark.parametrize("keep", [False, True])
def test_what_watches_may_become_garbage(keep):
    notes, weight, optimizer, _remove = watching(keep)
    del notes, _remove
    gc.collect()
    if keep:
        optimizer.step()
        assert watched(weight)
        return
    with pytest.raises(RuntimeError, match=r"step: what sf.attach returned .* is gone: keep it, or call detach\(\)"):
        optimizer.step()
    assert not watched(weight)  # and its hooks are removed
    optimizer.step()


def test_steps_only_rise():
    assert later("after_step", 3, 2) == 3 and type(later("after_step", np.int64(3), 2)) is int
    for wrong in (True, 3.0, None, torch.tensor(3)):
        with pytest.raises(TypeError, match="after_step: expected step to be an int, got"):
            later("after_step", wrong, 2)
    with pytest.raises(ValueError, match="before_step: expected a step after 3, got 3"):
        later("before_step", 3, 3)
    with pytest.raises(ValueError, match="expected a step that fits int64"):
        later("before_step", 2**63, 3)
