import gc
import re

import numpy as np
import pytest
import torch

import sparsefn as sf
from sparsefn.nn.attach.attach import owned_parameters
from sparsefn.nn.attach.loop import (
    Loop,
    ParameterLinks,
    Position,
    later,
    left_dense,
    left_out,
    watch,
    watched,
    without_step,
)
from sparsefn.nn.attach.parameters import Record


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


# ---- the order of the calls ----------------------------------------------------------

FIRST, SECOND = (
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2)
)
READY = Position(last=4)
MASKED = READY.begin(5, {"w": torch.ones(2)}, False)
STEPPED = MASKED.enter(FIRST, False).leave(FIRST)
DETACHED = Position(Loop.DETACHED, 4)
DETACHED_TEXT = "this algorithm was detached: attach it again"
BETWEEN_TEXT = (
    "check: called between before_step and after_step: call after_step after every "
    "before_step, also where the optimizer skipped its step"
)


def test_each_call_leads_to_the_state_of_the_table():
    assert (READY.loop, MASKED.loop, STEPPED.loop) == (
        Loop.READY,
        Loop.GRADIENTS_MASKED,
        Loop.STEPPED,
    )
    assert (MASKED.last, MASKED.number, MASKED.stepped) == (4, 5, ())
    both = STEPPED.enter(SECOND, False).leave(SECOND)
    assert both.loop is Loop.STEPPED and both.stepped == (FIRST, SECOND)
    assert both.number == 5 and both.gradients is MASKED.gradients


def test_only_a_step_moves_weights():
    entered = MASKED.enter(FIRST, False)
    assert entered.loop is Loop.GRADIENTS_MASKED and entered.moving is FIRST
    assert STEPPED.moving is None
    # one optimizer of several is enough
    assert entered.leave(FIRST).enter(SECOND, True).mixes
    assert MASKED.enter(FIRST, True).leave(FIRST).enter(SECOND, False).mixes


def test_a_closure_begins_the_step_again_and_forgets_no_optimizer():
    again = STEPPED.enter(SECOND, True).begin_again()
    assert again == Position(Loop.READY, last=4, stepped=(FIRST,))
    assert again.begin(5, {}, False).loop is Loop.STEPPED
    assert MASKED.begin_again() == READY


@pytest.mark.parametrize(
    ("position", "ready", "between", "in_step", "attached"),
    [
        (READY, None, None, "after_step: call before_step first, between", None),
        (MASKED, BETWEEN_TEXT, BETWEEN_TEXT, None, None),
        (STEPPED, BETWEEN_TEXT, BETWEEN_TEXT, None, None),
        (DETACHED, DETACHED_TEXT, None, DETACHED_TEXT, DETACHED_TEXT),
    ],
    ids=["ready", "masked", "stepped", "detached"],
)
def test_each_check_reads_the_state(position, ready, between, in_step, attached):
    rows = [
        (lambda: position.check_ready("check"), ready),
        (lambda: position.check_between("check"), between),
        (position.check_in_step, in_step),
        (position.check_attached, attached),
    ]
    for check, text in rows:
        if text is None:
            check()
            continue
        with pytest.raises(RuntimeError, match=text):
            check()


def test_weights_that_move_without_their_optimizer():
    assert without_step([]) == (
        "after_step: no optimizer has stepped since before_step: where several "
        "batches make a step, call both around optimizer.step(), after the last "
        "backward; where a step is left out on purpose, all is well"
    )
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(
        RuntimeError,
        match="after_step: 'w' moved without its optimizer: for another optimizer, "
        "call",
    ):
        without_step([Record("w", weight, torch.optim.SGD([weight], lr=0.1))])


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


# ---- module and optimizers are what they were ----------------------------------------


def test_places_are_found_through_wrappers_and_containers():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
            )

    model = torch.nn.DataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = list(owned_parameters(model, [optimizer]).values())
    links = ParameterLinks(model, reversed(records), records)
    links.check_module()
    # module, layers, two layers, four parameters
    assert len(links.links) == 8
    model.module.layers[1] = torch.nn.Linear(2, 2)
    with pytest.raises(
        RuntimeError,
        match=r"before_step: 'layers.1.bias', or a layer that holds it, was replaced",
    ):
        links.check_module()


def test_new_members_of_an_optimizer():
    layer = torch.nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    own = Record("weight", layer.weight, torch.optim.SGD(layer.parameters(), lr=0.1))
    links = ParameterLinks(layer, [own], [own])
    assert links.new_members() == []
    layer.bias.requires_grad_(True)
    (new,) = links.new_members()
    assert new is layer.bias and links.new_members() == []
    own.optimizer.param_groups[0]["params"].pop(0)
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match="before_step: the optimizer of 'weight' has it no more: call detach",
        ):
            links.new_members()


@pytest.mark.parametrize(
    "made", [sf.static(0.5), sf.supermask(0.5), sf.partition([("*", sf.rigl(0.5))])]
)
def test_weights_that_would_have_been_masked(made):
    model = torch.nn.DataParallel(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    )
    layer, norm = model.module
    assert left_dense(made, model, [norm.weight, layer.bias, torch.ones(2, 2)]) == ""
    assert left_dense(made, model, [layer.bias, layer.weight]) == (
        "before_step: '0.weight' trains since attach, and stays dense: add or "
        "unfreeze it before, or call detach(), then attach again"
    )


def test_weights_that_where_does_not_choose():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    algorithm = sf.rigl(0.5, where="0.*")
    assert left_dense(algorithm, model, [model[1].weight]) == ""
    assert "'0.weight' trains since attach" in left_dense(
        algorithm, model, [model[0].weight]
    )
