"""Scores, plain and with memory."""

import math

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.state import check_score

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


def test_plain_scores():
    state, grads = state_of(2.0, -1.0, 0.5, -0.0), vector(-0.5, 3.0, -1.0, 4.0)
    for score, expected in (
        (S.magnitude, [2.0, 1.0, 0.5, 0.0]),
        (S.gradient, [0.5, 3.0, 1.0, 4.0]),
        (S.saliency, [1.0, 3.0, 0.5, 0.0]),
        (S.movement, [1.0, 3.0, 0.5, 0.0]),
    ):
        assert score(state, grads, 0)["w"].tolist() == expected
    assert S.movement(state, vector(1.0, 1.0, 1.0, 1.0), 0)["w"].tolist() == [-2.0, 1.0, -0.5, 0.0]


def test_gradients_are_scored_off_the_mask_too():
    masks = {"w": torch.tensor([True, False])}
    state = sf.State(vector(1.0, 0.0), masks)
    assert S.gradient(state, vector(1.0, -7.0), 0)["w"].tolist() == [1.0, 7.0]


def test_values_that_are_not_numbers_pass_through():
    nan, inf = math.nan, math.inf
    scores = S.gradient(NONE, vector(nan, -inf, 0.0), 0)["w"]
    assert math.isnan(scores[0])
    assert scores[1:].tolist() == [inf, 0.0]


def test_random_scores_depend_on_key_path_step_and_index_alone():
    tree = {"a": torch.zeros(50), "b": torch.zeros(50)}
    state = sf.State(tree, {}, key=sf.random.key(0))
    draws = S.random(state, (), 3)
    assert not torch.equal(draws["a"], draws["b"])
    reordered = state._replace(params={"b": tree["b"], "a": tree["a"]})
    assert sf.checkpoint.tree_equal(S.random(reordered, (), torch.tensor(3)), draws)
    longer = S.random(state._replace(params={"a": torch.zeros(90)}), (), 3)
    assert torch.equal(longer["a"][:50], draws["a"])
    for other in (S.random(state, (), 4), S.random(state._replace(key=sf.random.key(1)), (), 3)):
        assert not torch.equal(other["a"], draws["a"])
    assert 0.3 < float(draws["a"].mean()) < 0.7


def test_random_scores_need_a_key():
    with pytest.raises(ValueError, match=r"expected a state with a PRNG key for random scores, got none; pass key="):
        S.random(state_of(1.0), (), 0)


def test_momentum_is_the_size_of_a_moving_average():
    # By hand: .5, .25, then .5 * .25 - .5 = -.375.
    assert over(S.momentum(0.5), [(1.0,), (0.0,), (-1.0,)]) == [[0.5], [0.25], [0.375]]
    assert over(S.momentum(0.0), [(1.0,), (-3.0,)]) == [[1.0], [3.0]]


def test_ema_averages_the_score_and_not_the_gradient():
    assert over(S.ema(S.gradient, 0.5), [(1.0,), (0.0,), (-1.0,)]) == [[0.5], [0.25], [0.625]]


def test_sum_and_mean_without_a_reset():
    assert over(S.sum(S.gradient), [(1.0,), (-2.0,), (6.0,)]) == [[1.0], [3.0], [9.0]]
    assert over(S.mean(S.gradient), [(1.0,), (-2.0,), (6.0,)]) == [[1.0], [1.5], [3.0]]


def test_sum_and_mean_start_afresh_after_a_reset():
    # Steps 1 and 3 fire: they end a sum, which is read there, and the next step begins one.
    grads = [(1.0,), (2.0,), (3.0,), (5.0,), (7.0,)]
    assert over(S.sum(S.gradient, reset=sf.every(2, start=1)), grads) == [[1.0], [3.0], [3.0], [8.0], [7.0]]
    assert over(S.mean(S.gradient, reset=sf.every(2, start=1)), grads) == [[1.0], [1.5], [3.0], [4.0], [7.0]]


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
    assert over(S.sum(S.gradient, reset=sf.always()), [(math.inf,), (2.0,)]) == [[math.inf], [2.0]]


@pytest.mark.parametrize("score", [S.momentum(0.9), S.ema(S.gradient, 0.9), S.sum(S.gradient), S.mean(S.gradient)])
def test_memories_of_16_bit_leaves_are_float32_and_those_of_float64_are_float64(score):
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        params = vector(1.0, dtype=dtype)
        memory = score.init(params)
        memory = score.accumulate(memory, sf.State(params, ()), params, 0)
        assert score.value(memory, sf.State(params, ()), params, 0)["w"].dtype == expected
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
    assert torch.equal(torch.func.vmap(lambda rows: run(rows, False), in_dims=1)(grads), loop)


@pytest.mark.parametrize("score", [S.momentum(0.9), S.ema(S.saliency, 0.9), S.sum(S.movement), S.mean(S.gradient)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_memories_of_leaves_without_dimensions_have_the_bits_of_a_batch(score, dtype):
    def remembered(w, g):
        memory, state = score.init({"t": w}), sf.State({"t": w}, {"t": torch.tensor(True)})
        for step in range(3):
            memory = score.accumulate(memory, state, {"t": g * 2**step}, step)
        return score.value(memory, state, {"t": g}, 2)["t"]

    w, g = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(torch.vmap(remembered)(w, g), torch.stack([remembered(*row) for row in zip(w, g, strict=True)]))


@pytest.mark.parametrize("remember", [S.sum, S.mean, lambda score: S.ema(score, 0.5)])
def test_memories_of_a_wider_score_keep_their_dtype(remember):
    wide = remember(lambda state, grads, step: optree.tree_map(torch.Tensor.double, grads))
    algorithm = sf.one_shot(0.5, score=wide, when=sf.at([2]))
    state = first = algorithm.init({"w": torch.randn(4, 4)})
    for step in range(4):
        saved = sf.checkpoint.state_dict(state)
        state = algorithm.update(state, {"w": torch.randn(4, 4)}, step)
        resumed = sf.checkpoint.load_state_dict(first, sf.checkpoint.state_dict(state))
        assert sf.checkpoint.tree_equal(resumed, state)
        assert all(x.dtype == saved[path].dtype for path, x in sf.checkpoint.state_dict(state).items())


@pytest.mark.parametrize("name", ["gradient", "saliency", "movement"])
def test_scores_of_gradients_say_that_there_are_none(name):
    with pytest.raises(ValueError, match=f"scores.{name} reads gradients, got grads=None"):
        getattr(S, name)(state_of(1.0), None, 0)
    with pytest.raises(ValueError, match="scores.momentum reads gradients, got grads=None"):
        S.momentum(0.5).accumulate(vector(0.0), NONE, None, 0)


def test_memory_makes_no_leaf_of_another_structure_than_its_params():
    params = {"a": [torch.ones(2), (torch.ones(3),)]}
    memory = S.momentum(0.5).init(params)
    assert optree.tree_structure(memory) == optree.tree_structure(params)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: S.momentum(1.0), ValueError, r"expected decay in \[0, 1\), got 1.0"),
        (lambda: S.ema(S.gradient, -0.1), ValueError, r"expected decay in \[0, 1\), got -0.1"),
        (lambda: S.momentum(math.nan), ValueError, r"expected decay in \[0, 1\), got nan"),
        (
            lambda: S.ema(S.momentum(0.5), 0.5),
            TypeError,
            r"expected a score function of \(state, grads, step\), got Accumulated",
        ),
        (lambda: S.sum("gradient"), TypeError, r"expected a score function of \(state, grads, step\), got str"),
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


def leaf_state(w):
    return sf.State({"w": w}, {"w": torch.ones_like(w, dtype=torch.bool)})


def distances(w, *args, **kwargs):
    return S.distance(*args, **kwargs)(leaf_state(w), (), 0)["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", [1, 2, 3.0, math.inf])
@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 7), 0), ((5, 7), -1), ((4, 3, 2, 2), 0), ((4, 3, 2, 2), 1), ((6,), 0)]
)
def test_distance_sums_over_the_other_slices(shape, axis, norm, dtype):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = distances(w, norm, axis=axis)
    flat = w.movedim(axis, 0).reshape(w.shape[axis], -1)
    want = torch.cdist(flat, flat, p=norm).sum(1)
    assert found.shape == w.shape
    assert found.dtype == dtype
    for entry in found.movedim(axis, 0).reshape(w.shape[axis], -1).unbind(1):
        torch.testing.assert_close(entry, want)


def test_distance_takes_a_function_of_the_slices():
    w = torch.tensor([[[1.0, 2.0]], [[3.0, 5.0]]])
    seen = []

    def signed(rows):
        seen.append(rows.tolist())
        return rows[:, :1] - rows[None, :, 0]

    assert distances(w, signed).tolist() == [[[2.0, 2.0]], [[2.0, 2.0]]]
    assert seen == [[[1.0, 2.0], [3.0, 5.0]]]
    with pytest.raises(ValueError, match=r"distance: expected norm to give shape \(2, 2\) at 'w', got \(2, 1\)"):
        distances(w, lambda rows: rows[:, :1])


def test_distance_looks_at_sparsified_leaves_alone():
    params = {"b": torch.ones(9), "s": torch.ones(()), "w": torch.eye(2)}
    masks = {"b": torch.tensor(True), "s": torch.tensor(True), "w": torch.ones(2, 2, dtype=torch.bool)}
    found = S.distance(1)(sf.State(params, masks), (), 0)
    assert not found["b"].any()
    assert not found["s"].any()
    assert found["w"].tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_distance_of_16_bit_weights_is_summed_in_32(dtype):
    w = torch.tensor([[1.0], [1.0078125], [256.0]], dtype=dtype)
    found = distances(w, 1)
    assert found.dtype == torch.float32
    assert found.flatten().tolist() == distances(w.float(), 1).flatten().tolist()


def test_distance_errors():
    with pytest.raises(ValueError, match=r"distance: no axis 2 in shape \(2, 2\) at 'w'"):
        distances(torch.ones(2, 2), axis=2)
    for bad in ("2", True, None):
        with pytest.raises(TypeError, match=f"expected norm to be a number or a function of the slices, got {bad!r}"):
            S.distance(bad)


@pytest.mark.parametrize("norm", [1, 2])
def test_distance_is_the_same_bits_whatever_runs_it(norm, monkeypatch):
    w = torch.randn(6, 37, 33, generator=torch.Generator().manual_seed(0))
    want = torch.stack([distances(x, norm) for x in w])

    def score(x):
        return distances(x, norm)

    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(torch.stack([score(x) for x in w]), want)
    assert torch.equal(torch.func.vmap(score)(w), want)
    assert torch.equal(torch.func.vmap(score, in_dims=2)(w.permute(1, 2, 0)), want)
    assert torch.equal(torch.compile(score, fullgraph=True, backend="aot_eager")(w[0]), want[0])
    monkeypatch.setattr(S, "_PIECE", 5000)
    assert torch.equal(score(w[1]), want[1])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 4)])
def test_distance_of_few_slices(shape):
    assert not distances(torch.ones(shape)).any()


def test_the_slices_nearest_to_all_others_are_pruned():
    w = torch.tensor([[0.0, 0.0], [9.0, 9.0], [1.0, 0.0], [-9.0, 9.0]])
    algorithm = sf.one_shot(0.5, score=S.distance(), pattern=sf.patterns.channel(0, norm=math.inf))
    mask = algorithm.update(algorithm.init({"w": w}), {"w": w}, 0).masks["w"]
    assert mask.all(1).tolist() == [False, True, False, True]
    assert mask.any(1).tolist() == [False, True, False, True]


def test_the_absolute_value_of_a_score_with_memory_has_its_memory():
    # Averages of a signed score whose signs change: the size of the average, not the average of sizes.
    total = S.absolute(S.mean(S.movement))
    params, grads = {"w": torch.tensor([[2.0, -1.0, 1.0, 3.0]])}, {"w": torch.tensor([[1.0, 3.0, -2.0, 0.5]])}
    algorithm = sf.one_shot(0.5, score=total, when=sf.at([1]), pruned="keep")
    state = algorithm.init(params)
    for step in range(2):
        state = algorithm.update(state, grads, step)
    assert state.masks["w"].tolist() == [[True, True, False, False]]  # of -2, 3, 2 and -1.5: ties to the lower
    for score in (S.sum(S.movement), S.ema(S.movement, 0.5), S.momentum(0.5)):
        memory = score.accumulate(score.init(params), sf.State(params, ()), grads, 0)
        signed, size = (each.value(memory, sf.State(params, ()), grads, 0)["w"] for each in (score, S.absolute(score)))
        assert torch.equal(size, signed.abs())
