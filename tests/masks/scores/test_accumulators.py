"""Scores with memory."""

import math

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.core.state import check_score

S = sf.scores
NONE = sf.State((), ())


def vector(*values, dtype=torch.float32):
    return {"w": torch.tensor(values, dtype=dtype)}


def state_of(*values, **fields):
    return sf.State(vector(*values), {"w": torch.tensor(True)}, **fields)


def over(score, grads, state=None):
    """Values of a score with memory after each of several gradients."""
    state = state_of(*grads[0]) if state is None else state
    memory, seen = score.init(state.params), []
    for step, values in enumerate(grads):
        memory = score.accumulate(memory, state, vector(*values), step)
        seen.append(score.value(memory, state, vector(*values), step)["w"].tolist())
    return seen


def test_momentum_is_the_size_of_a_moving_average():
    # By hand: .5, .25, then .5 * .25 - .5 = -.375.
    assert over(S.momentum(0.5), [(1.0,), (0.0,), (-1.0,)]) == [[0.5], [0.25], [0.375]]
    assert over(S.momentum(0.0), [(1.0,), (-3.0,)]) == [[1.0], [3.0]]


def test_ema_averages_the_score_and_not_the_gradient():
    assert over(S.ema(S.gradient, 0.5), [(1.0,), (0.0,), (-1.0,)]) == [
        [0.5],
        [0.25],
        [0.625],
    ]


def test_sum_and_mean_without_a_reset():
    assert over(S.sum(S.gradient), [(1.0,), (-2.0,), (6.0,)]) == [[1.0], [3.0], [9.0]]
    assert over(S.mean(S.gradient), [(1.0,), (-2.0,), (6.0,)]) == [[1.0], [1.5], [3.0]]


def test_sum_and_mean_start_afresh_after_a_reset():
    # Steps 1 and 3 fire: they end a sum, which is read there, and the next step begins
    # one.
    grads = [(1.0,), (2.0,), (3.0,), (5.0,), (7.0,)]
    assert over(S.sum(S.gradient, reset=sf.every(2, start=1)), grads) == [
        [1.0],
        [3.0],
        [3.0],
        [8.0],
        [7.0],
    ]
    assert over(S.mean(S.gradient, reset=sf.every(2, start=1)), grads) == [
        [1.0],
        [1.5],
        [3.0],
        [4.0],
        [7.0],
    ]


def test_a_sum_may_reset_where_the_algorithm_reads_it():
    algorithm = sf.one_shot(
        sf.schedules.piecewise({0: 0.0, 1: 0.5}),
        score=S.sum(S.gradient, reset=sf.every(2, start=1)),
        when=sf.every(2, start=1),
        regrow=True,
    )
    state = algorithm.init({"w": torch.ones(1, 2)})
    kept = []
    for step, grads in enumerate(([3.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0])):
        state = algorithm.update(state, {"w": torch.tensor([grads])}, step)
        kept.append(state.masks["w"].tolist()[0])
    assert kept == [[True, True], [True, False], [True, False], [False, True]]


def test_infinities_leave_a_sum_with_its_reset():
    assert over(S.sum(S.gradient, reset=sf.always()), [(math.inf,), (2.0,)]) == [
        [math.inf],
        [2.0],
    ]


@pytest.mark.parametrize(
    "score",
    [S.momentum(0.9), S.ema(S.gradient, 0.9), S.sum(S.gradient), S.mean(S.gradient)],
)
def test_memories_of_16_bit_leaves_are_float32_and_those_of_float64_are_float64(score):
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        params = vector(1.0, dtype=dtype)
        memory = score.init(params)
        memory = score.accumulate(memory, sf.State(params, ()), params, 0)
        assert (
            score.value(memory, sf.State(params, ()), params, 0)["w"].dtype == expected
        )
    ones = vector(1.0, dtype=torch.bfloat16)
    memory = S.sum(S.gradient).init(ones)
    for step in range(300):  # a bfloat16 sum of ones stops at 256
        memory = S.sum(S.gradient).accumulate(memory, sf.State(ones, ()), ones, step)
    assert S.sum(S.gradient).value(memory, NONE, (), 0)["w"].item() == 300.0


def test_memories_give_the_same_bits_for_tensor_steps_and_under_vmap():
    score = S.mean(S.gradient, reset=sf.every(3))
    grads = torch.randn(4, 2, 5)

    def run(rows, tensor_steps):
        memory = score.init({"w": rows[0]})
        for step in range(4):
            at = torch.tensor(step) if tensor_steps else step
            memory = score.accumulate(memory, NONE, {"w": rows[step]}, at)
        return score.value(memory, NONE, (), 3)["w"]

    loop = torch.stack([run(grads[:, i], False) for i in range(2)])
    assert torch.equal(run(grads[:, 0], True), loop[0])
    assert torch.equal(
        torch.func.vmap(lambda rows: run(rows, False), in_dims=1)(grads), loop
    )


@pytest.mark.parametrize(
    "score",
    [S.momentum(0.9), S.ema(S.saliency, 0.9), S.sum(S.movement), S.mean(S.gradient)],
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64]
)
def test_memories_of_leaves_without_dimensions_have_the_bits_of_a_batch(score, dtype):
    def remembered(w, g):
        memory, state = (
            score.init({"t": w}),
            sf.State({"t": w}, {"t": torch.tensor(True)}),
        )
        for step in range(3):
            memory = score.accumulate(memory, state, {"t": g * 2**step}, step)
        return score.value(memory, state, {"t": g}, 2)["t"]

    w, g = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(
        torch.vmap(remembered)(w, g),
        torch.stack([remembered(*row) for row in zip(w, g, strict=True)]),
    )


@pytest.mark.parametrize("remember", [S.sum, S.mean, lambda score: S.ema(score, 0.5)])
def test_memories_of_a_wider_score_keep_their_dtype(remember):
    wide = remember(
        lambda state, grads, step: optree.tree_map(torch.Tensor.double, grads)
    )
    algorithm = sf.one_shot(0.5, score=wide, when=sf.at([2]))
    state = first = algorithm.init({"w": torch.randn(4, 4)})
    for step in range(4):
        saved = sf.checkpoint.state_dict(state)
        state = algorithm.update(state, {"w": torch.randn(4, 4)}, step)
        resumed = sf.checkpoint.load_state_dict(first, sf.checkpoint.state_dict(state))
        assert sf.checkpoint.tree_equal(resumed, state)
        assert all(
            x.dtype == saved[path].dtype
            for path, x in sf.checkpoint.state_dict(state).items()
        )


@pytest.mark.parametrize("name", ["gradient", "saliency", "movement"])
def test_scores_of_gradients_say_that_there_are_none(name):
    with pytest.raises(
        ValueError, match=f"scores.{name} reads gradients, got grads=None"
    ):
        getattr(S, name)(state_of(1.0), None, 0)
    with pytest.raises(
        ValueError, match="scores.momentum reads gradients, got grads=None"
    ):
        S.momentum(0.5).accumulate(vector(0.0), NONE, None, 0)


def test_memory_makes_no_leaf_of_another_structure_than_its_params():
    params = {"a": [torch.ones(2), (torch.ones(3),)]}
    memory = S.momentum(0.5).init(params)
    assert optree.tree_structure(memory) == optree.tree_structure(params)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: S.momentum(1.0), ValueError, r"expected decay in \[0, 1\), got 1.0"),
        (
            lambda: S.ema(S.gradient, -0.1),
            ValueError,
            r"expected decay in \[0, 1\), got -0.1",
        ),
        (
            lambda: S.momentum(math.nan),
            ValueError,
            r"expected decay in \[0, 1\), got nan",
        ),
        (
            lambda: S.ema(S.momentum(0.5), 0.5),
            TypeError,
            r"expected a score function of \(state, grads, step\), got Accumulated",
        ),
        (
            lambda: S.sum("gradient"),
            TypeError,
            r"expected a score function of \(state, grads, step\), got str",
        ),
        (
            lambda: check_score("grow", 3),
            TypeError,
            r"expected grow to be a score such as sf.scores.magnitude, got 3",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_absolute_value_of_a_score_with_memory_has_its_memory():
    # Averages of a signed score whose signs change: the size of the average, not the
    # average of sizes.
    total = S.absolute(S.mean(S.movement))
    params, grads = (
        {"w": torch.tensor([[2.0, -1.0, 1.0, 3.0]])},
        {"w": torch.tensor([[1.0, 3.0, -2.0, 0.5]])},
    )
    algorithm = sf.one_shot(0.5, score=total, when=sf.at([1]), pruned="keep")
    state = algorithm.init(params)
    for step in range(2):
        state = algorithm.update(state, grads, step)
    # of -2, 3, 2 and -1.5: ties to the lower
    assert state.masks["w"].tolist() == [[True, True, False, False]]
    for score in (S.sum(S.movement), S.ema(S.movement, 0.5), S.momentum(0.5)):
        memory = score.accumulate(score.init(params), sf.State(params, ()), grads, 0)
        signed, size = (
            each.value(memory, sf.State(params, ()), grads, 0)["w"]
            for each in (score, S.absolute(score))
        )
        assert torch.equal(size, signed.abs())


class TestSteered:
    @pytest.mark.parametrize(
        ("small", "factor"), [(8, 0.5), (7, 1.0), (5, 1.0), (4, 2.0)]
    )
    def test_the_threshold_follows_how_many_are_under_it(self, small, factor):
        # Pruned entries are not counted. From 5 to 7 are near enough to 6.
        state = sf.State(
            vector(*[0.1] * small, *[9.0] * 4), {"w": torch.arange(small + 4) < small}
        )
        score = S.steered(sf.always(), 6, tau=0.5, slack=0.2, spare=0)
        memory = score.accumulate(score.init(state.params), state, (), 0)
        assert (float(memory["tau"]), float(memory["next"])) == (0.5, 0.5 * factor)

    def test_it_changes_where_the_trigger_fires_and_is_read_a_step_later(self):
        state = sf.State(vector(1.0, 2.0), {"w": torch.tensor([True, True])})
        score = S.steered(sf.every(2), 2, tau=0.5)
        memory, taus = score.init(state.params), []
        for step in range(4):
            memory = score.accumulate(
                memory, state, (), torch.tensor(step) if step else step
            )
            taus.append(float(memory["tau"]))
            assert score.value(memory, state, (), step)["w"].tolist() == [
                1 / taus[-1],
                2 / taus[-1],
            ]
        assert taus == [0.5, 0.5, 1.0, 1.0]

    def test_dense_leaves_count_for_nothing(self):
        state = sf.State(
            {"w": torch.ones(3), "b": torch.zeros(9)},
            {"w": torch.ones(3) > 0, "b": torch.tensor(True)},
        )
        score = S.steered(sf.always(), 1, tau=0.5)
        memory = score.accumulate(score.init(state.params), state, (), 0)
        assert (
            float(memory["next"]) == 1.0
            and not score.value(memory, state, (), 0)["b"].any()
        )

    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            (
                lambda: S.steered(sf.always(), -1),
                ValueError,
                "steered: expected target >= 0, got -1",
            ),
            (
                lambda: S.steered(sf.always(), 0.5),
                TypeError,
                "steered: expected target to be an int, got float",
            ),
            (
                lambda: S.steered(sf.always(), 1, tau=-1.0),
                ValueError,
                "expected tau > 0, got -1.0",
            ),
            (
                lambda: S.steered(sf.always(), 1, spare=-1),
                ValueError,
                "expected spare >= 0, got -1",
            ),
            (lambda: S.steered(3, 1), TypeError, "expected when to be a trigger"),
            (
                lambda: S.steered(sf.always(), 1, score=S.momentum(0.5)),
                TypeError,
                "expected a score function",
            ),
        ],
    )
    def test_bad_input(self, call, error, message):
        with pytest.raises(error, match=message):
            call()


def test_the_first_sign_is_that_of_the_start():
    score = S.first_sign()
    memory = score.init(vector(1.0, -1.0, 0.0, -0.0, dtype=torch.float16))
    assert memory["w"].dtype == torch.float16 and memory["w"].tolist() == [1, -1, 1, 1]
    state = state_of(-2.0, -3.0, 4.0, -5.0)
    memory = score.accumulate({"w": memory["w"].float()}, state, (), 0)
    assert score.value(memory, state, (), 0)["w"].tolist() == [-2, 3, 4, -5]
