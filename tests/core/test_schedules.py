import math

import pytest
import torch
import torch._dynamo.testing
from torch.func import vmap

from sparsefn.core import schedules, triggers

# Every schedule by its hyper-parameters, so that these can be floats or tensors.
MAKERS = {
    "constant": (schedules.constant, (0.3,)),
    "linear": (schedules.linear, (0.1, 0.002)),
    "exponential": (schedules.exponential, (0.2, -0.003, 0.9)),
    "power": (schedules.power, (0.9, 0.97)),
    "cosine": (schedules.cosine, (0.3, 100.0, 0.1)),
    "cosine_decay": (schedules.cosine_decay, (0.3, 130.0, 0.05)),
    "linear_decay": (schedules.linear_decay, (0.3, 130.0, 0.05)),
    "polynomial": (schedules.polynomial, (0.1, 0.95, 7.0, 130.0, 3.0)),
    "polynomial2.5": (schedules.polynomial, (0.9, 0.2, 0.0, 131.0, 2.5)),
    "cycling": (
        lambda *v: schedules.cycling(v, triggers.every(7, start=3)),
        (0.1, 0.7, 0.3),
    ),
    "cycling at": (
        lambda *v: schedules.cycling(v, triggers.at([9, 2, 40])),
        (0.1, 0.7),
    ),
    "piecewise": (
        lambda *v: schedules.piecewise(dict(zip((5, 50, 100), v, strict=True))),
        (0.1, 0.7, 0.3),
    ),
}
STEPS = [*range(-3, 140), 199, 1000, 3584, 10**6, 2**40]
every_schedule = pytest.mark.parametrize("name", MAKERS)


def made(name):
    make, values = MAKERS[name]
    return make(*values)


def tensors(values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


# int and tensor steps, float and tensor hyper-parameters


@every_schedule
def test_a_tensor_step_gives_the_same_bits(name):
    schedule = made(name)
    want = [schedule(step) for step in STEPS]
    assert all(type(value) is float for value in want)
    got = [schedule(torch.tensor(step)) for step in STEPS]
    assert all(value.dtype == torch.float64 and value.shape == () for value in got)
    assert [value.item() for value in got] == want
    batch = vmap(schedule)(torch.tensor(STEPS))
    assert batch.dtype == torch.float64 and batch.tolist() == want


@every_schedule
def test_tensor_hyper_parameters_give_the_same_bits(name):
    make, values = MAKERS[name]
    want = [made(name)(step) for step in STEPS]
    for i in range(len(values)):
        schedule = make(*values[:i], tensors(values)[i], *values[i + 1 :])
        got = [schedule(step) for step in STEPS]
        assert all(value.dtype == torch.float64 and value.shape == () for value in got)
        assert [value.item() for value in got] == want
    assert make(*tensors(values))(torch.tensor(60)).item() == made(name)(60)


@every_schedule
def test_members_of_an_ensemble_have_their_own_hyper_parameters_and_steps(name):
    make, values = MAKERS[name]
    grid = torch.tensor(values, dtype=torch.float64) * torch.tensor(
        [[1.0], [0.9], [0.5]], dtype=torch.float64
    )
    steps = torch.tensor([0, 20, 200])
    each = [make(*row.tolist()) for row in grid]
    for step in (0, 20, 200):
        got = vmap(lambda row, step=step: make(*row.unbind())(step))(grid)
        assert got.tolist() == [schedule(step) for schedule in each]
    got = vmap(lambda row, step: make(*row.unbind())(step))(grid, steps)
    assert got.tolist() == [
        schedule(int(step)) for schedule, step in zip(each, steps, strict=True)
    ]
    table = vmap(
        vmap(lambda row, step: make(*row.unbind())(step), (None, 0)), (0, None)
    )(grid, steps)
    assert table.tolist() == [
        [schedule(int(step)) for step in steps] for schedule in each
    ]


@pytest.mark.deep
@every_schedule
def test_one_graph_serves_every_step(name):
    schedule, counter = made(name), torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(schedule, fullgraph=True, backend=counter)
    for step in (0, 1, 2, 9, 60, 1000):
        assert compiled(torch.tensor(step)).item() == schedule(step)
    assert counter.frame_count == 1
    for step in range(8):
        assert compiled(step).item() == schedule(step)
    assert counter.frame_count <= 4  # 0 and 1 are special to the compiler


def all_of_them(step):
    return torch.stack([made(name)(step) for name in MAKERS])


@pytest.mark.deep
# torch's own, when inductor is imported
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_vmap_gives_the_same_bits(backend):
    steps = torch.tensor(STEPS)
    got = torch.compile(vmap(all_of_them), fullgraph=True, backend=backend)(steps)
    assert got.tolist() == [[made(name)(step) for name in MAKERS] for step in STEPS]


# Values


@pytest.mark.parametrize(
    "schedule, values",
    [
        (schedules.linear(0.1, 0.002), {0: 0.1, 1: 0.102, 50: 0.2, 3584: 7.268}),
        (
            schedules.exponential(0.0, -0.01),
            {
                0: 0,
                1: 0.009950166250831893,
                25: 0.22119921692859512,
                1000: 0.9999546000702375,
            },
        ),
        (
            schedules.exponential(0.2, -0.003, 0.9),
            {0: 0.2, 1: 0.20209685314763892, 50: 0.2975044165024596},
        ),
        (schedules.power(0.8, 0.5), {0: 0.8, 1: 0.4, 3: 0.1}),
        (
            schedules.cosine(0.3, 100, 0.1),
            {
                0: 0.3,
                1: 0.2999506560,
                25: 0.2707106781,
                50: 0.2,
                99: 0.1000493440,
                100: 0.1,
                101: 0.1000493440,
                200: 0.3,
            },
        ),
        (
            schedules.cosine_decay(0.3, 5),
            {
                0: 0.3,
                1: 0.27135254915624213,
                2: 0.19635254915624212,
                4: 0.028647450843757895,
                5: 0,
                9: 0,
            },
        ),
        (
            schedules.cosine_decay(0.3, 5, 0.05),
            {1: 0.2761271242968684, 3: 0.13637287570313156, 5: 0.05, 99: 0.05},
        ),
        (schedules.linear_decay(0.5, 5), {0: 0.5, 1: 0.4, 2: 0.3, 4: 0.1, 5: 0, 6: 0}),
        (
            schedules.polynomial(0.0, 0.8, 100, 1000),
            {
                0: 0,
                100: 0,
                101: 0.002663704801097344,
                500: 0.6628257887517147,
                999: 0.7999999989026063,
                1000: 0.8,
                65000: 0.8,
            },
        ),
        (
            schedules.polynomial(0.2, 0.95, 700, 65000),
            {
                699: 0.2,
                701: 0.20003499167975036,
                5000: 0.3406285601327379,
                64999: 0.9499999999999972,
                65000: 0.95,
            },
        ),
    ],
)
def test_values_agree_with_other_libraries(schedule, values):
    for step, want in values.items():
        assert schedule(step) == pytest.approx(want, rel=1e-9, abs=1e-15)


def test_ends_are_exact_and_held():
    for first, last in ((0.3, 0.1), (0.1, 0.3), (0.7, 0.7), (1 / 3, 0.9), (0.0, 0.95)):
        for schedule, begin in (
            (schedules.cosine_decay(first, 300, last), 0),
            (schedules.linear_decay(first, 300, last), 0),
            (schedules.polynomial(first, last, 20, 300), 20),
            (schedules.polynomial(first, last, 20, 300, power=0.7), 20),
        ):
            assert {schedule(step) for step in (-5, 0, begin)} == {first}
            assert {schedule(step) for step in (300, 301, 2**40)} == {last}
            values = [schedule(step) for step in range(begin, 302)]
            assert values == sorted(values, reverse=first > last)
            assert min(first, last) <= min(values) and max(values) <= max(first, last)
        assert (
            schedules.cosine(first, 7, last)(0)
            == first
            == schedules.exponential(first, -0.1, last)(0)
        )
        assert schedules.cosine(first, 7, last)(7) == last


def test_the_wave_comes_back_bit_for_bit():
    schedule = schedules.cosine(0.3, 100, 0.1)
    assert [
        schedule(step + 200 * n) for n in (1, 10**6) for step in range(200)
    ] == 2 * [schedule(s) for s in range(200)]


def test_a_constant_may_stay_at_zero_or_one():
    assert (
        schedules.constant(1)(5) == 1.0
        and schedules.power(0.5, 0)(0) == 0.5
        and schedules.power(0.5, 0)(1) == 0.0
    )


def test_cycling_goes_on_when_its_trigger_fires():
    updates = [0, 2, 3, 5, 6, 7]  # firings see 0.1, 0.4, 0.2, 0.1, 0.4, 0.2
    schedule = schedules.cycling([0.1, 0.4, 0.2], triggers.at(updates))
    assert [schedule(step) for step in updates] == [0.1, 0.4, 0.2, 0.1, 0.4, 0.2]
    assert [schedule(step) for step in (-1, 1, 4, 100)] == [0.1, 0.1, 0.2, 0.2]
    assert {
        schedules.cycling([0.1, 0.4], triggers.never())(step) for step in range(5)
    } == {0.1}


def test_cycling_takes_a_trigger_of_ones_own_that_counts():
    class Squares:
        def __call__(self, step):
            return math.isqrt(step) ** 2 == step

        def count(self, step):
            return math.isqrt(step) + 1

    schedule = schedules.cycling([0.1, 0.4], Squares())
    assert [schedule(step) for step in (0, 1, 3, 4, 8, 9)] == [
        0.1,
        0.4,
        0.4,
        0.1,
        0.1,
        0.4,
    ]


def test_piecewise_takes_pairs_in_any_order():
    for given in ({9: 0.3, 3: 0.2}, [(9, 0.3), (3, 0.2)], iter([(3, 0.2), (9, 0.3)])):
        schedule = schedules.piecewise(given)
        assert [schedule(step) for step in (0, 3, 8, 9, 99)] == [
            0.2,
            0.2,
            0.2,
            0.3,
            0.3,
        ]


def test_begins_of_members_may_differ():
    begins = torch.tensor([[0, 4], [3, 5], [2, 60]])
    levels = torch.tensor([[0.5, 0.25], [0.125, 0.75], [0.0, 1.0]], dtype=torch.float64)
    for step in (0, 2, 3, 4, 5, 59, 60):
        rows = zip(begins.tolist(), levels.tolist(), strict=True)
        alone = [
            schedules.piecewise(dict(zip(b, v, strict=True)))(step) for b, v in rows
        ]
        for moment in (step, torch.tensor(step)):
            floats = vmap(
                lambda b, s=moment: schedules.piecewise([(b[0], 0.5), (b[1], 0.25)])(s)
            )(begins)
            assert floats.dtype == torch.float64
            assert floats.tolist() == [
                0.25 if step >= second else 0.5 for _, second in begins.tolist()
            ]
            pairs = vmap(
                lambda b, v, s=moment: schedules.piecewise(zip(b, v, strict=True))(s)
            )(begins, levels)
            assert pairs.tolist() == alone
    assert schedules.piecewise({0: 0.5, torch.tensor(3): 0.25})(3) == 0.25
    with pytest.raises(
        ValueError, match=r"expected every begin to be a 0-d tensor, got shape \(1,\)"
    ):
        schedules.piecewise([(torch.tensor([3]), 0.5)])
    with pytest.raises(
        TypeError,
        match="expected every begin to be an int or a 0-d int64 tensor, got a tensor "
        "of",
    ):
        schedules.piecewise([(torch.tensor(3.0), 0.5)])


def test_periods_of_cycles_may_differ_from_member_to_member():
    def cycled(n, start, step):
        return schedules.cycling([0.5, 0.25, 0.75], triggers.every(n, start))(step)

    n, start = torch.tensor([1, 3, 4]), torch.tensor([0, 2, 5])
    for step in range(20):
        want = [
            cycled(*row, step) for row in zip(n.tolist(), start.tolist(), strict=True)
        ]
        assert (
            vmap(lambda n, start, step=step: cycled(n, start, step))(n, start).tolist()
            == want
        )
        assert (
            vmap(lambda n, start, step=step: cycled(n, start, torch.tensor(step)))(
                n, start
            ).tolist()
            == want
        )


def test_as_schedule_keeps_schedules_and_wraps_floats():
    schedule = schedules.linear(0.1, 0.1)
    assert schedules.as_schedule(schedule) is schedule
    assert schedules.as_schedule(0.25)(3) == 0.25
    assert schedules.as_schedule(torch.tensor(0.25))(3).item() == 0.25


def test_default_dtype_does_not_matter():
    want = [made(name)(60) for name in MAKERS]
    torch.set_default_dtype(torch.float16)
    assert (
        [made(name)(60) for name in MAKERS]
        == want
        == [made(name)(torch.tensor(60)).item() for name in MAKERS]
    )


# min_max_end


@every_schedule
def test_min_max_end_looks_at_every_step(name):
    schedule = made(name)
    for begin, end in ((0, 0), (3, 60), (0, 200)):
        values = [schedule(step) for step in range(begin, end + 1)]
        got = schedules.min_max_end(schedule, begin, end)
        assert got == (min(values), max(values), values[-1]) and all(
            type(x) is float for x in got
        )


def test_min_max_end_crosses_its_chunks():
    spike = schedules.piecewise({0: 0.5, 65_536: 0.9, 65_537: 0.1, 65_538: 0.5})
    assert schedules.min_max_end(spike, 0, 140_000) == (0.1, 0.9, 0.5)
    assert schedules.min_max_end(spike, 0, 65_535) == (0.5, 0.5, 0.5)


def test_min_max_end_takes_schedules_of_ones_own():
    assert schedules.min_max_end(lambda step: 0.5 if step < 3 else 0.25, 0, 9) == (
        0.25,
        0.5,
        0.25,
    )
    assert schedules.min_max_end(lambda step: 0.5, 0, 9) == (0.5, 0.5, 0.5)
    assert schedules.min_max_end(lambda step: 1.0 - step / 10, 2, 4) == (
        1.0 - 4 / 10,
        1.0 - 2 / 10,
        1.0 - 4 / 10,
    )


def test_min_max_end_is_a_tensor_where_the_schedule_is():
    init = torch.tensor([0.25, 0.5], dtype=torch.float64)
    low, high, last = vmap(
        lambda x: schedules.min_max_end(schedules.linear_decay(x, 4), 1, 3)
    )(init)
    assert (low.tolist(), high.tolist(), last.tolist()) == (
        [0.0625, 0.125],
        [0.1875, 0.375],
        [0.0625, 0.125],
    )


# Errors


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda: schedules.constant(math.nan),
            ValueError,
            "expected value to be finite, got nan",
        ),
        (
            lambda: schedules.constant(True),
            TypeError,
            "expected value to be a number or a 0-d float tensor, got bool",
        ),
        (
            lambda: schedules.linear(0.1, math.inf),
            ValueError,
            "expected slope to be finite, got inf",
        ),
        (
            lambda: schedules.linear("a", 0.1),
            TypeError,
            "expected init to be a number .*, got str",
        ),
        (
            lambda: schedules.exponential(0.1, torch.ones(2)),
            ValueError,
            r"expected gamma to be a 0-d tensor, got .*\(2,\)",
        ),
        (
            lambda: schedules.exponential(0.1, -1, math.nan),
            ValueError,
            "expected final to be finite, got nan",
        ),
        (
            lambda: schedules.power(0.1, -0.5),
            ValueError,
            "expected beta >= 0, got -0.5",
        ),
        (
            lambda: schedules.cosine(0.1, 0),
            ValueError,
            "expected half_period > 0, got 0",
        ),
        (
            lambda: schedules.cosine(0.1, 5, None),
            TypeError,
            "expected minimum to be a number .*, got NoneType",
        ),
        (
            lambda: schedules.cosine_decay(0.1, 0),
            ValueError,
            "expected steps > 0, got 0",
        ),
        (
            lambda: schedules.linear_decay(0.1, -5),
            ValueError,
            "expected steps > 0, got -5",
        ),
        (
            lambda: schedules.linear_decay(0.1, torch.tensor(5)),
            TypeError,
            "expected steps .*, got a tensor of torch.int64",
        ),
        (
            lambda: schedules.polynomial(0, 1, 5, 5),
            ValueError,
            "expected end > begin, got begin=5, end=5",
        ),
        (
            lambda: schedules.polynomial(0, 1, 5, 4),
            ValueError,
            "expected end > begin, got begin=5, end=4",
        ),
        (
            lambda: schedules.polynomial(0, 1, 0, 5, power=0),
            ValueError,
            "expected power > 0, got 0",
        ),
        (
            lambda: schedules.polynomial(0, 1, 0, 5, power=-1),
            ValueError,
            "expected power > 0, got -1",
        ),
        (
            lambda: schedules.cycling([], triggers.always()),
            ValueError,
            "expected at least one of values, got none",
        ),
        (
            lambda: schedules.cycling([0.1, "x"], triggers.always()),
            TypeError,
            r"expected values\[1\] .*, got str",
        ),
        (
            lambda: schedules.cycling([0.1], lambda step: True),
            TypeError,
            r"expected when to be a trigger with count\(step\), such as every, got "
            r"function",
        ),
        (
            lambda: schedules.piecewise({}),
            ValueError,
            "expected at least one of values, got none",
        ),
        (
            lambda: schedules.piecewise({0.5: 1.0}),
            TypeError,
            r"piecewise\(values\): expected every begin to be an int, got f",
        ),
        (
            lambda: schedules.piecewise({-1: 1.0}),
            ValueError,
            r"piecewise\(values\): expected every begin >= 0, got -1",
        ),
        (
            lambda: schedules.piecewise([(3, 0.1), (3, 0.2)]),
            ValueError,
            "expected one value for a begin, got two for 3",
        ),
        (
            lambda: schedules.as_schedule(1),
            TypeError,
            "expected a float or a schedule, got the int 1; write 1.0",
        ),
        (
            lambda: schedules.as_schedule(True),
            TypeError,
            "expected a float or a schedule, got the bool True; write 1.0",
        ),
        (
            lambda: schedules.as_schedule([0.1, 0.2]),
            ValueError,
            r"expected a float or a schedule, got a list; write cycling\(values, "
            r"when\) with its trigger",
        ),
        (
            lambda: schedules.as_schedule({0: 0.1}),
            ValueError,
            r"expected a float or a schedule, got a mapping; write piecewise\({begin: "
            r"value}\)",
        ),
        (
            lambda: schedules.as_schedule(None),
            TypeError,
            "expected a float or a schedule, got NoneType",
        ),
        (
            lambda: schedules.as_schedule("0.5"),
            TypeError,
            "expected a float or a schedule, got str",
        ),
        (
            lambda: schedules.as_schedule(torch.tensor(1)),
            TypeError,
            "expected value to be .*, got a tensor of torch.int64",
        ),
        (
            lambda: schedules.min_max_end(made("linear"), 5, 3),
            ValueError,
            "min_max_end: expected end >= 5, got 3",
        ),
        (
            lambda: schedules.min_max_end(made("linear"), 0.0, 3),
            TypeError,
            "min_max_end: expected begin to be an int, got f",
        ),
        (
            lambda: made("linear")(1.0),
            TypeError,
            "expected step to be an int or a 0-d int64 tensor, got float",
        ),
        (
            lambda: made("constant")(True),
            TypeError,
            "expected step to be an int or a 0-d int64 tensor, got bool",
        ),
        (
            lambda: made("piecewise")(torch.tensor(1.0)),
            TypeError,
            "expected step .*, got a tensor of torch.float32",
        ),
        (
            lambda: made("cycling")(torch.tensor([1])),
            ValueError,
            r"expected step to be a 0-d tensor, got shape \(1,\)",
        ),
    ],
)
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_defaults_are_those_of_the_text():
    assert schedules.exponential(0.0, gamma=-1.0)(1000) == 1.0
    assert (
        schedules.cosine(1.0, 2)(2)
        == schedules.cosine_decay(1.0, 2)(2)
        == schedules.linear_decay(1.0, 2)(2)
        == 0.0
    )
    assert schedules.polynomial(1.0, 0.0, begin=0, end=2)(1) == 0.125


def test_min_max_end_looks_at_the_step_after_a_chunk():
    # Steps are looked at in chunks of 2^16; the last step is known already, the one
    # before it is not.
    peak = schedules.piecewise({0: 0.5, 2**16: 0.75, 2**16 + 1: 0.25})
    assert schedules.min_max_end(peak, 0, 2**16 + 1) == (0.25, 0.75, 0.25)
    assert schedules.min_max_end(peak, 2**16, 2**16) == (0.75, 0.75, 0.75)


@pytest.mark.parametrize("step", [7, torch.tensor(7)])
def test_a_wave_longer_than_half_of_all_floats(step):
    assert float(schedules.cosine(1.0, 1e308)(step)) == 1.0
    assert float(schedules.cosine(1.0, 1e308, 0.5)(step)) == 1.0


@pytest.mark.parametrize("step", [1000, torch.tensor(1000)])
def test_an_exponential_that_goes_nowhere_stays_there(step):
    assert float(schedules.exponential(1.0, 1.0, final=1.0)(step)) == 1.0
    assert float(schedules.exponential(0.5, 1.0, final=1.0)(step)) == -math.inf


def test_an_int_beyond_all_floats_is_refused():
    with pytest.raises(
        ValueError, match="expected half_period to fit a float, got an int of 1329 bits"
    ):
        schedules.cosine(0.3, 10**400)
