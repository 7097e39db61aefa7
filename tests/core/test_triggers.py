import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch.func import vmap

from sparsefn._engine.torch_limits import OLD
from sparsefn.core import schedules, triggers
from sparsefn.core.checks import checks

KINDS = [
    (triggers.every(1), range(60)),
    (triggers.every(10), [0, 10, 20, 30, 40, 50]),
    (triggers.every(10, start=5, stop=36), [5, 15, 25, 35]),
    (triggers.every(10, start=5, stop=35), [5, 15, 25]),
    (triggers.every(7, stop=28), [0, 7, 14, 21]),
    (triggers.every(100, start=59), [59]),
    (triggers.at([0, 59]), [0, 59]),
    (triggers.at([7, 3, 7]), [3, 7]),
    (triggers.always(), range(60)),
    (triggers.never(), []),
]


@pytest.mark.parametrize("when, steps", KINDS)
def test_it_fires_at_these_steps(when, steps):
    fired = [when(step) for step in range(60)]
    assert all(isinstance(fires, bool) for fires in fired)
    assert [step for step, fires in enumerate(fired) if fires] == list(steps)
    assert not when(-10)


@pytest.mark.parametrize("when, steps", KINDS)
def test_count_is_the_number_of_firings_so_far(when, steps):
    assert [when.count(step) for step in range(-3, 60)] == [
        sum(s <= step for s in steps) for step in range(-3, 60)
    ]


@pytest.mark.parametrize("when, steps", KINDS[:-1])
def test_a_tensor_step_gives_the_same_answers(when, steps):
    batch = torch.arange(-3, 60)
    fires, count = vmap(lambda step: (when(step), when.count(step)))(batch)
    assert fires.dtype == torch.bool and count.dtype == torch.int64
    assert fires.tolist() == [when(step) for step in range(-3, 60)]
    assert count.tolist() == [when.count(step) for step in range(-3, 60)]
    assert when(torch.tensor(7)).shape == when.count(torch.tensor(7)).shape == ()
    assert torch.equal(when(torch.tensor(7)), torch.tensor(when(7)))


@pytest.mark.parametrize(
    "when", [triggers.every(10, start=5, stop=36), triggers.at([3, 7])]
)
def test_one_graph_serves_every_step(when):
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda step: (when(step), when.count(step)), fullgraph=True, backend=counter
    )
    for step in range(9):
        fires, count = compiled(torch.tensor(step))
        assert (fires.item(), count.item()) == (when(step), when.count(step))
    assert counter.frame_count == 1


def test_never_is_a_bool_whatever_hides_the_step():
    never, seen = triggers.never(), []

    def asked(step):
        seen.append(never(step))
        return never.count(step)

    assert asked(torch.tensor(7)).item() == 0
    assert vmap(asked)(torch.arange(3)).tolist() == [0, 0, 0]
    assert seen == [False, False] and all(isinstance(fires, bool) for fires in seen)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda step: 1 / 0 if never(step) else step + 1, fullgraph=True, backend=counter
    )
    assert [compiled(torch.tensor(step)).item() for step in range(4)] == [1, 2, 3, 4]
    assert counter.frame_count == 1
    with pytest.raises(TypeError, match="expected step to be an int"):
        never(1.0)


def test_compiled_vmap_equals_a_loop():
    when = triggers.at([3, 7])
    compiled = torch.compile(
        vmap(lambda step: (when(step), when.count(step))),
        fullgraph=True,
        backend="aot_eager",
    )
    fires, count = compiled(torch.arange(9))
    assert fires.tolist() == [when(step) for step in range(9)]
    assert count.tolist() == [when.count(step) for step in range(9)]


def test_triggers_compare_and_print_by_value():
    assert (
        triggers.every(3)
        == triggers.every(3, start=0, stop=None)
        != triggers.every(3, start=1)
    )
    assert triggers.at([2, 1]) == triggers.at((1, 2, 2))
    assert repr(triggers.every(10, stop=30)) == "every(10, stop=30)"


def test_check_step_lets_steps_through():
    step = torch.tensor(4)
    assert checks.check_step(0) == 0 and checks.check_step(7) == 7
    assert checks.check_step(step) is step
    assert vmap(checks.check_step)(torch.arange(3)).tolist() == [0, 1, 2]


def test_check_step_makes_one_graph_for_all_ints():
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda step: checks.check_step(step) * 2, fullgraph=True, backend=counter
    )
    for step in range(8):
        result = compiled(step)
        assert result.dtype == torch.int64 and result.item() == 2 * step
    assert counter.frame_count <= 3  # 0 and 1 are special to the compiler


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: triggers.every(0), ValueError, r"every\(n\): expected n >= 1, got 0"),
        (
            lambda: triggers.every(-3),
            ValueError,
            r"every\(n\): expected n >= 1, got -3",
        ),
        (
            lambda: triggers.every(True),
            TypeError,
            r"every\(n\): expected n to be an int, got bool",
        ),
        (
            lambda: triggers.every(2.0),
            TypeError,
            r"every\(n\): expected n to be an int, got float",
        ),
        (
            lambda: triggers.every(2, start=-1),
            ValueError,
            r"expected start >= 0, got -1",
        ),
        (
            lambda: triggers.every(2, start=0.0),
            TypeError,
            r"expected start to be an int, got float",
        ),
        (
            lambda: triggers.every(2, stop=1.5),
            TypeError,
            r"expected stop to be an int, got float",
        ),
        (
            lambda: triggers.every(2, start=5, stop=5),
            ValueError,
            r"expected stop > start \(stop is exclusive\), got start=5, stop=5",
        ),
        (
            lambda: triggers.at([]),
            ValueError,
            r"at\(steps\): expected at least one step, got none; never\(\) fires at no",
        ),
        (
            lambda: triggers.at(5),
            TypeError,
            r"at\(steps\): expected a list of ints, got 5; write at\(\[5\]\)",
        ),
        (
            lambda: triggers.at([1, -2]),
            ValueError,
            r"at\(steps\): expected every step >= 0, got -2",
        ),
        (
            lambda: triggers.at([1, 2.0]),
            TypeError,
            r"at\(steps\): expected every step to be an int, got float",
        ),
        (lambda: checks.check_step(-1), ValueError, "expected step >= 0, got -1"),
    ],
)
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    "use",
    [checks.check_step, triggers.every(2), triggers.at([1]), triggers.at([1]).count],
)
@pytest.mark.parametrize(
    "step, error, text",
    [
        (True, TypeError, "expected step to be an int or a 0-d int64 tensor, got bool"),
        (1.0, TypeError, "expected step to be an int or a 0-d int64 tensor, got float"),
        (
            torch.tensor(1.0),
            TypeError,
            "expected step to be an int or .* tensor, got a tensor of torch.float32",
        ),
        (
            torch.tensor(1, dtype=torch.int32),
            TypeError,
            "expected step .*, got a tensor of torch.int32",
        ),
        (
            torch.tensor([1]),
            ValueError,
            r"expected step to be a 0-d tensor, got shape \(1,\)",
        ),
    ],
)
def test_what_is_no_step_is_named(use, step, error, text):
    with pytest.raises(error, match=text):
        use(step)


# hyper-parameters as tensors: one a member


EVERY = [
    (1, 0, None),
    (10, 0, None),
    (10, 5, 36),
    (7, 3, 28),
    (3, 59, None),
    (2, 9, 9),
    (4, 30, 8),
]


def plain(n, start, stop):
    """The same steps, by their definition."""
    return [
        step
        for step in range(60)
        if step >= start and (step - start) % n == 0 and (stop is None or step < stop)
    ]


@pytest.mark.parametrize("as_step", [int, torch.tensor])
def test_periods_starts_and_stops_may_differ_from_member_to_member(as_step):
    n, start, stop = (
        torch.tensor([case[i] for case in EVERY if case[2] is not None])
        for i in range(3)
    )
    cases = [case for case in EVERY if case[2] is not None]

    def both(n, start, stop):
        when = triggers.every(n, start, stop)
        return when(as_step(step)), when.count(as_step(step))

    for step in range(60):
        fires, count = vmap(both)(n, start, stop)
        assert fires.dtype == torch.bool and count.dtype == torch.int64
        assert fires.tolist() == [step in plain(*case) for case in cases]
        assert count.tolist() == [
            sum(s <= step for s in plain(*case)) for case in cases
        ]


@pytest.mark.parametrize("case", EVERY)
def test_each_argument_alone_may_be_a_tensor(case):
    for chosen in range(3):
        if case[chosen] is None or (
            chosen == 0 and case[2] is not None and case[2] <= case[1]
        ):
            continue  # as ints, start and stop are compared
        when = triggers.every(
            *(torch.tensor(x) if i == chosen else x for i, x in enumerate(case))
        )
        for step in (0, 5, 35, 59, torch.tensor(35)):
            assert when(step).tolist() == (int(step) in plain(*case))
            assert when.count(step) == sum(s <= step for s in plain(*case))


def test_a_tensor_period_below_one_counts_as_one():
    when = triggers.every(torch.tensor(0), start=2)
    assert [bool(when(step)) for step in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("as_step", [int, torch.tensor])
def test_listed_steps_may_differ_from_member_to_member(as_step):
    steps = torch.tensor([[3, 1, 3], [0, 7, 2], [5, 5, 5]])
    for step in range(9):
        fires, count = vmap(
            lambda s, step=as_step(step): (
                triggers.at(s)(step),
                triggers.at(s).count(step),
            )
        )(steps)
        assert fires.tolist() == [step in set(row) for row in steps.tolist()]
        assert count.tolist() == [
            sum(s <= step for s in set(row)) for row in steps.tolist()
        ]
    mixed = vmap(lambda first: triggers.at([4, first, 4]).count(as_step(6)))(
        torch.tensor([4, 5, 9])
    )
    assert mixed.tolist() == [1, 2, 1]


@pytest.mark.skipif(
    OLD, reason="the compiler of torch 2.11 calls no trigger that it has made"
)
def test_one_graph_serves_every_member_and_step():
    def both(n, stop, steps, step):
        every, at = triggers.every(n, 1, stop), triggers.at(steps)
        return every(step), every.count(step), at(step), at.count(step)

    n, stop, steps = (
        torch.tensor([2, 3]),
        torch.tensor([9, 5]),
        torch.tensor([[1, 4], [6, 6]]),
    )
    batched = vmap(both, in_dims=(0, 0, 0, None))
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(batched, fullgraph=True, backend=counter)
    for step in map(torch.tensor, range(9)):
        assert all(
            map(
                torch.equal,
                compiled(n, stop, steps, step),
                batched(n, stop, steps, step),
            )
        )
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda t: triggers.every(t.double()),
            TypeError,
            r"every\(n\): expected n to be .* 0-d int64 tensor, got a te",
        ),
        (
            lambda t: triggers.every(2, t.int()),
            TypeError,
            "expected start to be .* got a tensor of torch.int32",
        ),
        (
            lambda t: triggers.every(t[None]),
            ValueError,
            r"expected n to be a 0-d tensor, got shape \(1,\)",
        ),
        (
            lambda t: triggers.every(2, 0, t[None]),
            ValueError,
            r"expected stop to be a 0-d tensor, got shape \(1,\)",
        ),
        (
            lambda t: triggers.at(t),
            TypeError,
            r"at\(steps\): expected a list of ints, got tensor\(3\)",
        ),
        (
            lambda t: triggers.at([t[None]]),
            ValueError,
            r"expected every step to be a 0-d tensor, got shape \(1,\)",
        ),
        (
            lambda t: triggers.at([t, -1]),
            ValueError,
            "expected every step >= 0, got -1",
        ),
    ],
)
def test_a_tensor_that_is_no_step_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.tensor(3))


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpys_integers_are_steps(kind):
    assert checks.check_step(kind(3)) == 3 and type(checks.check_step(kind(3))) is int
    assert triggers.every(3)(kind(3)) is True and triggers.at([4]).count(kind(3)) == 0
    compiled = torch.compile(
        lambda step: checks.check_step(step) * 2, fullgraph=True, backend="eager"
    )
    result = compiled(kind(3))
    assert result.dtype == torch.int64 and result.item() == 6


@pytest.mark.parametrize("step", [np.float64(3), np.bool_(True)])
def test_other_numbers_of_numpy_are_none(step):
    with pytest.raises(
        TypeError,
        match="expected step to be an int or a 0-d int64 tensor, got (float64|bool)",
    ):
        checks.check_step(step)


@pytest.mark.parametrize("step", [2**63 - 1, 2**63, -(2**63) - 1])
@pytest.mark.parametrize(
    "take", [checks.check_kind, triggers.every(3), triggers.at([1]).count]
)
def test_a_step_and_the_one_after_it_fit_int64(take, step):
    with pytest.raises(
        ValueError,
        match=f"expected a step that fits int64, as the one after it must, got {step}",
    ):
        take(step)
    take(2**63 - 2)


def test_bounds_of_triggers_fit_int64():
    with pytest.raises(
        ValueError,
        match=r"every\(n, start, stop\): expected stop to fit int64, got "
        r"18446744073709551616",
    ):
        triggers.every(3, stop=2**64)
    with pytest.raises(
        ValueError,
        match=r"at\(steps\): expected every step to fit int64, got 9223372036854775808",
    ):
        triggers.at([2**63])
    last = triggers.every(3, stop=2**63 - 1)
    assert last(6) is True and last(torch.tensor(6)).item() is True


# ---- while an update sees the step as a tensor ---------------------------------------

STEP = torch.tensor(0)


@pytest.mark.parametrize(
    ("when", "fires"),
    [
        (triggers.every(10), True),
        (triggers.every(7), False),
        (triggers.at([20]), True),
        (triggers.at([0]), False),
        (triggers.always(), True),
    ],
    ids=repr,
)
def test_triggers_are_asked_with_the_number(when, fires):
    with triggers.host_step(STEP, 20) as decisions:
        assert when(STEP) is fires
    ((asked, answer),) = decisions
    assert answer is fires
    assert asked(20) is fires


def test_never_asks_nothing():
    with triggers.host_step(STEP, 20) as decisions:
        assert triggers.never()(STEP) is False
    assert decisions == []


@pytest.mark.parametrize(
    ("step", "number", "when"),
    [
        (STEP + 1, 20, triggers.every(10)),
        (STEP, None, triggers.every(10)),
        (STEP, 20, triggers.every(torch.tensor(10))),
        (STEP, 20, triggers.at([torch.tensor(20)])),
    ],
    ids=["another tensor", "no number", "every of a tensor", "at a tensor"],
)
def test_other_answers_are_tensors_of_the_step(step, number, when):
    with triggers.host_step(STEP, number) as decisions:
        assert torch.equal(when(step), when(step.clone()))
        assert isinstance(when(step), torch.Tensor)
    assert decisions == []


def test_counts_and_schedules_see_the_tensor():
    with triggers.host_step(STEP, 20) as decisions:
        assert torch.equal(triggers.every(10).count(STEP), torch.tensor(1))
        assert torch.equal(schedules.linear(0.5, 0.1)(STEP), torch.tensor(0.5).double())
    assert decisions == []


def test_compiled_code_asks_with_its_own_step():
    fires = torch.compile(triggers.every(10), backend="eager", fullgraph=True)
    with triggers.host_step(STEP, 20):
        assert torch.equal(fires(torch.tensor(5)), torch.tensor(False))


def test_a_context_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), triggers.host_step(STEP, 20):
        assert triggers.has_host_step()
        raise ZeroDivisionError
    assert not triggers.has_host_step()
