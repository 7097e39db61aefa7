import gc
import re

import numpy as np
import pytest
import torch

import sparsefn as sf
from sparsefn.nn.attach.order import later, left_out, watch, watched
from sparsefn.nn.attach.records import Record


class Notes:
    def __init__(self):
        self.seen = []

    def enter_step(self, optimizer, closes):
        self.seen.append("enter with a closure" if closes else "enter")

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
    return (
        notes,
        weight,
        optimizer,
        watch(notes, [Record("w", weight, optimizer)], keep),
    )


def test_a_step_is_seen():
    notes, weight, optimizer, remove = watching()
    optimizer.step()
    assert notes.seen == ["enter", "leave"] and watched(weight)
    remove()
    optimizer.step()
    assert notes.seen == ["enter", "leave"] and not watched(weight)
    assert (
        not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
    )


def test_a_closure_is_wrapped():
    notes, _, optimizer, _remove = watching()
    assert optimizer.step(lambda: 3.0) == 3.0
    assert optimizer.step(closure=lambda: 4.0) == 4.0
    assert notes.seen == ["enter with a closure", "before", "after", "leave"] * 2


@pytest.mark.parametrize("keep", [False, True])
def test_what_watches_may_become_garbage(keep):
    notes, weight, optimizer, _remove = watching(keep)
    del notes, _remove
    gc.collect()
    if keep:
        optimizer.step()
        assert watched(weight)
        return
    with pytest.raises(
        RuntimeError,
        match=r"step: what sf.attach returned .* is gone: keep it, or call detach\(\)",
    ):
        optimizer.step()
    assert not watched(weight)  # and its hooks are removed
    optimizer.step()


def test_steps_only_rise():
    assert (
        later("after_step", 3, 2) == 3
        and type(later("after_step", np.int64(3), 2)) is int
    )
    for wrong in (True, 3.0, None, torch.tensor(3)):
        with pytest.raises(
            TypeError, match="after_step: expected step to be an int, got"
        ):
            later("after_step", wrong, 2)
    with pytest.raises(ValueError, match="before_step: expected a step after 3, got 3"):
        later("before_step", 3, 3)
    with pytest.raises(ValueError, match="expected a step that fits int64"):
        later("before_step", 2**63, 3)


@pytest.mark.parametrize(
    ("algorithm", "last", "step", "trigger"),
    [
        (sf.one_shot(0.5), -1, 1, r"at\(\[0\]\)"),
        (sf.gmp(0.8, steps=20), -1, 100, r"every\(1, stop=15\)"),
        (sf.rigl(0.9), 99, 103, r"every\(100\)"),
        (sf.rigl(0.9, steps=1000), 7, 11, r"every\(10, stop=750\)"),
        (sf.gmp(0.8, steps=20), 12, 16, r"every\(1, stop=15\)"),
        (
            sf.phases([(0, sf.static(0.5)), (4, sf.one_shot(0.7, when=sf.at([5])))]),
            4,
            6,
            r"at\(\[5\]\)",
        ),
        (sf.with_terms(sf.one_shot(0.5), sf.terms.l2(0.1)), -1, 3, r"at\(\[0\]\)"),
        (
            sf.methods.imp(0.5, when=sf.every(10, start=9), to=sf.at([1])),
            0,
            2,
            r"at\(\[1\]\)",
        ),
        (sf.supermask(0.5, when=sf.every(4)), 3, 7, r"every\(4\)"),
    ],
)
def test_a_trigger_that_is_left_out_is_named(algorithm, last, step, trigger):
    text = (
        f"after_step: expected step {last + 1}, got {step}, which leaves out where "
        f"{trigger} fires: count steps of the"
    )
    assert re.match(text, left_out(algorithm, last, step))


@pytest.mark.parametrize(
    ("algorithm", "last", "step"),
    [
        (sf.rigl(0.9), -1, 1),  # it fires again
        (sf.gmp(0.8, steps=20), -1, 14),
        (sf.one_shot(0.5, when=sf.at([1000])), -1, 1000),
        (sf.static(0.5), -1, 1000),
        (sf.ste(0.5), 3, 7),  # it fires there, too
        (sf.rigl(0.9, when=sf.every(4)), 4, 8),
        (sf.rigl(0.9), 100, 104),
        (
            sf.rigl(sf.schedules.cycling([0.5, 0.8], sf.every(5)), when=sf.at([20])),
            3,
            7,
        ),  # schedules count
        (sf.rigl(0.9, when=lambda step: step == 5), 4, 6),  # nothing is known of it
        (sf.dense(), 4, 600),
    ],
)
def test_steps_that_leave_out_nothing(algorithm, last, step):
    assert left_out(algorithm, last, step) == ""
