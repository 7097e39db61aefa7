"""What of an algorithm has not happened when a run ends: schedules, triggers, lengths
of runs.
"""

import re

import pytest
import torch

import sparsefn as sf
from sparsefn.core.timetable import changes_once, pace, unfinished

RISE = sf.schedules.polynomial(0.0, 0.9, 0, 150)
LATE = sf.every(300, start=300)
RUN = "the run of 200 steps"


@pytest.mark.parametrize(
    ("steps", "n", "stop"),
    [(1, 1, 1), (2, 1, 1), (99, 1, 74), (500, 5, 375), (20_000, 100, 15_000)],
)
def test_masks_change_in_the_first_three_quarters(steps, n, stop):
    assert pace("rigl", steps) == (n, stop)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            sf.gmp(sf.schedules.polynomial(0.0, 0.9, begin=0, end=1000)),
            f"polynomial(0.0, 0.9, begin=0, end=1000) ends at step 1000, after {RUN}: "
            "its last value there is 0.437, not 0.9",
        ),
        (
            sf.gmp(sf.schedules.polynomial(0.0, 0.9, 0, 200)),
            f"polynomial(0.0, 0.9, 0, 200) ends at step 200, after {RUN}: its last "
            "value there is 0.8999998875, not 0.9",
        ),
        (
            sf.gmp(RISE, when=sf.every(100)),
            f"{RISE!r} ends at step 150, but every(100) fires last at step 100 in "
            f"{RUN}: its last value there is 0.867, not 0.9",
        ),
        (
            sf.gmp(sf.schedules.piecewise({500: 0.5, 0: 0.25})),
            f"piecewise({{500: 0.5, 0: 0.25}}) ends at step 500, after {RUN}: its "
            "last value there is 0.25, not 0.5",
        ),
        (
            sf.gmp(
                sf.schedules.polynomial(
                    torch.tensor(0.0), torch.tensor(0.5), 0, torch.tensor(400.0)
                )
            ),
            "polynomial(tensor(0.0), tensor(0.5), 0, tensor(400.0)) ends at step 400, "
            "after " + RUN + ": its last value "
            "there is 0.437, not 0.5",
        ),
        (
            sf.with_optimizer(
                sf.dense(), sf.optimizers.sgd(sf.schedules.linear_decay(0.5, 201))
            ),
            f"linear_decay(0.5, 201) ends at step 201, after {RUN}: its last value "
            "there is 0.00498, not 0",
        ),
        (sf.one_shot(0.9, when=sf.at([2000])), f"at([2000]) never fires in {RUN}"),
        (
            sf.one_shot(0.9, when=sf.at([7, 2000, 300])),
            f"at([7, 300, 2000]) fires at step 300, after {RUN}",
        ),
        (
            sf.set(0.9, when=sf.every(10, start=200)),
            f"every(10, start=200) never fires in {RUN}",
        ),
        (
            sf.set(0.9, when=sf.every(10, stop=500)),
            f"every(10, stop=500) fires until step 500, after {RUN}",
        ),
        (
            sf.rigl(0.9, steps=10_000),
            f"rigl(0.9, steps=10000) takes 10000 steps, more than {RUN}",
        ),
        (
            sf.gmp(0.9, steps=201),
            f"gmp(0.9, steps=201) takes 201 steps, more than {RUN}",
        ),
        (
            sf.methods.force(0.9, rounds=300),
            f"force(0.9, rounds=300) takes 300 rounds, more than {RUN}",
        ),
        (
            sf.phases([(0, sf.dense()), (100, sf.one_shot(0.9))]),
            "at([0]) never fires in its phase, steps 100 to 199",
        ),
        (
            sf.phases([(0, sf.gmp(RISE)), (50, sf.dense())]),
            f"{RISE!r} ends at step 150, after its phase, steps 0 to 49: its last "
            "value there is 0.625, not 0.9",
        ),
        (
            sf.phases([(0, sf.dense()), (500, sf.static(0.5))]),
            f"the phase static(0.5) begins at step 500, after {RUN}",
        ),
        (
            sf.partition(
                [("a", sf.chain(sf.static(0.5), sf.one_shot(0.9, when=sf.at([300]))))]
            ),
            f"at([300]) never fires in {RUN}",
        ),
        (
            sf.rewinding(
                sf.iterative(0.2, when=sf.every(300, start=300)),
                to=sf.at([9]),
                when=sf.every(300, start=300),
            ),
            f"every(300, start=300) never fires in {RUN}",
        ),
        (
            sf.set(0.9, when=sf.at(torch.tensor([300]))),
            f"at([tensor(300)]) never fires in {RUN}",
        ),
        (
            sf.schedules.cycling([0.5, 0.8], sf.every(300, start=300)),
            f"every(300, start=300) never fires in {RUN}",
        ),
        (
            sf.methods.granet(0.9, steps=200),
            f"granet(0.9, steps=200) changes masks once in {RUN}, at step 0: give it "
            "`when` in the place of every(1000)",
        ),
        (
            sf.phases([(0, sf.dense()), (50, sf.rigl(0.9))]),
            "rigl(0.9) changes masks once in its phase, steps 50 to 199, at step 100: "
            "give it `when` in the place of every(100)",
        ),
    ],
)
def test_what_has_not_happened_is_told(made, expected):
    assert unfinished(made, 200) == [expected]


@pytest.mark.parametrize(
    "made",
    [
        sf.dense(),
        sf.static(0.9),
        sf.one_shot(0.9),
        sf.one_shot(0.9, when=sf.never()),
        sf.one_shot(0.9, when=lambda step: step == 500),
        sf.gmp(lambda step: 0.5),
        sf.gmp(sf.schedules.linear(0.0, 0.001)),
        sf.gmp(sf.schedules.polynomial(0.0, 0.9, 0, 199)),
        sf.gmp(RISE, when=sf.every(50)),
        sf.gmp(0.9, steps=200),
        sf.rigl(0.9, steps=200),
        sf.rigl(
            0.9,
            when=sf.every(50, stop=200),
            drop_fraction=sf.schedules.cosine_decay(0.3, 200),
        ),
        sf.rigl(0.9, when=sf.every(150, stop=300)),
        sf.phases([(0, sf.dense()), (100, sf.one_shot(0.9, when=sf.at([100])))]),
        sf.methods.snip(0.5),
        sf.rigl(0.9),  # twice
        sf.rigl(0.9, when=sf.every(199)),
        sf.rigl(0.9, when=sf.every(200)),  # on purpose
        sf.rigl(0.9, when=sf.every(300, stop=200)),
        sf.methods.srigl(0.9, steps=200),
    ],
    ids=repr,
)
def test_what_has_happened_is_not(made):
    assert unfinished(made, 200) == []


@pytest.mark.parametrize(
    "made",
    [
        sf.drop_grow(0.9, drop=sf.scores.magnitude, grow=sf.scores.gradient),
        sf.rigl(0.9),
        sf.set(0.9, drop_fraction=0.5),
        sf.snfs(0.9),
        sf.partition([("*", sf.rigl(0.9))]),
        sf.with_optimizer(sf.rigl(0.9), sf.optimizers.sgd(0.1)),
        sf.sequence(sf.gmp(0.9, steps=50), sf.rigl("current")),
    ],
    ids=repr,
)
def test_masks_that_change_once_are_told(made):
    (told,) = unfinished(made, 50)
    assert told.endswith(
        " changes masks once in the run of 50 steps, at step 0: give it steps=50, the "
        "length of the run"
    )
    assert changes_once(made, 50, "the run of 50 steps") == [told]
    assert not any(
        "once" in told for steps in (1, 101) for told in unfinished(made, steps)
    )


def test_a_trigger_that_is_given_by_position_was_chosen():
    algorithm = sf.methods.dsr(0.9, when=sf.every(2))
    assert changes_once(algorithm, 2, "the run of 2 steps") == []


def test_the_length_of_the_run_is_the_mend():
    assert unfinished(sf.rigl(0.9, steps=50), 50) == []


def test_the_words_are_those_given():
    (told,) = unfinished(sf.rigl(0.9), 50, "{} steps so far")
    assert told.startswith("rigl(0.9) changes masks once in 50 steps so far, at step 0")


def test_a_value_that_a_transform_hides_is_left_out():
    seen = []

    def inner(end):
        seen.append(unfinished(sf.gmp(sf.schedules.polynomial(0.0, 0.5, 0, end)), 10))
        seen.append(unfinished(sf.set(0.5, when=sf.every(100, start=end.long())), 10))
        return end

    torch.vmap(inner)(torch.tensor([100, 200]).double())
    assert seen == [[], []]


def test_every_sentence_comes_once():
    assert (
        len(
            unfinished(
                [sf.iterative(0.2, when=LATE), sf.iterative(0.5, when=LATE)], 200
            )
        )
        == 1
    )


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        (0, ValueError, "unfinished: expected steps >= 1, got 0"),
        (1.0, TypeError, "expected steps to be an int, got float"),
    ],
)
def test_bad_steps(steps, error, message):
    with pytest.raises(error, match=re.escape(message)):
        unfinished(sf.dense(), steps)
