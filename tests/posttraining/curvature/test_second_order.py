"""Fisher information, the diagonal of the Hessian and OBD, against brute force; and
what all such scores share.
"""

import copy
import itertools
import re

import optree
import pytest
import torch
from small_losses import (
    C,
    X,
    Y,
    flat,
    hessian_and_gradient,
    loss,
    sparse_part,
    state_of,
)

import sparsefn as sf


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 6, 100])
def test_fisher_is_the_mean_of_squared_gradients_of_examples(chunk_size):
    state = state_of()
    squares = [
        hessian_and_gradient(state, batch=(X[i : i + 1], Y[i : i + 1]))[1].square()
        for i in range(6)
    ]
    found = C.fisher(loss, (X, Y), chunk_size)(state, (), 0)
    assert torch.allclose(sparse_part(found), torch.stack(squares).mean(0), rtol=1e-12)
    assert not torch.allclose(
        sparse_part(found), hessian_and_gradient(state)[1].square(), rtol=0.1
    )
    assert not found["bias"].any()  # not sparsified


def test_fisher_sees_pruned_positions_and_obd_weighs_them_by_their_weight():
    state = sf.from_masks(state_of().masks).init(state_of().params)
    fisher = C.fisher(loss, (X, Y))
    off = ~state.masks["a"]
    assert (fisher(state, (), 0)["a"][off] > 0).any()
    assert not C.obd(fisher)(state, (), 0)["a"][off].any()  # pruned to zero
    kept = state_of()  # what is pruned has kept its value, and may come back
    assert (C.obd(fisher)(kept, (), 0)["a"][off] > 0).any()
    expected = kept.params["a"].square() * fisher(kept, (), 0)["a"] / 2
    assert torch.allclose(C.obd(fisher)(kept, (), 0)["a"], expected)


def test_obd_is_the_rise_of_a_loss_at_its_minimum():
    best, curvature = (
        torch.tensor([[1.0, -2.0, 0.5, 4.0]]),
        torch.tensor([[3.0, 1.0, 8.0, 0.25]]),
    )

    def quadratic(params):
        return (curvature * (params["w"] - best).square()).sum() / 2

    state = sf.one_shot(0.5).init({"w": best})
    scores = C.obd(C.hessian_diagonal(quadratic, ()))(state, (), 0)["w"]
    rises = [quadratic({"w": best * (torch.arange(4) != i)}).item() for i in range(4)]
    assert scores[0].tolist() == rises == [1.5, 2.0, 1.0, 2.0]


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
def test_the_exact_diagonal_is_that_of_the_hessian(chunk_size):
    state = state_of()
    found = C.hessian_diagonal(loss, (X, Y), chunk_size=chunk_size)(state, (), 0)
    assert torch.allclose(
        sparse_part(found), hessian_and_gradient(state)[0].diagonal(), atol=1e-13
    )
    assert not found["bias"].any()  # not sparsified


def test_one_sample_is_a_vector_of_signs_times_its_product():
    matrix = torch.tensor(
        [
            [2.0, 1.0, 0.5, 4.0],
            [1.0, -3.0, 8.0, 2.0],
            [0.5, 8.0, 1.0, 1.0],
            [4.0, 2.0, 1.0, 0.0],
        ]
    )
    score = C.hessian_diagonal(
        lambda params: params["w"].reshape(-1) @ matrix @ params["w"].reshape(-1) / 2,
        (),
        1,
    )
    state = sf.State(
        {"w": torch.zeros(2, 2)}, {"w": torch.ones(2, 2) > 0}, key=sf.random.key(0)
    )
    possible = {
        tuple((v * (matrix @ v)).tolist())
        for v in map(torch.tensor, itertools.product((-1.0, 1.0), repeat=4))
    }
    seen = {
        tuple(score(state, (), step)["w"].reshape(-1).tolist()) for step in range(60)
    }
    # A vector and its negative give the same: 8 outcomes, all of which come up.
    assert seen == possible and len(possible) == 8
    mean = torch.tensor(list(possible)).mean(0)
    assert mean.tolist() == matrix.diagonal().tolist()  # unbiased


def test_the_estimate_tends_to_the_diagonal_and_is_drawn_from_key_path_step_alone():
    state, score = state_of(), C.hessian_diagonal(loss, (X, Y), 1)
    wanted = sparse_part(C.hessian_diagonal(loss, (X, Y))(state, (), 0))
    keys = sf.random.split(sf.random.key(1), 2000)
    draws = torch.vmap(lambda key: sparse_part(score(state._replace(key=key), (), 0)))(
        keys
    )
    error = draws.std(0) / 2000**0.5
    assert ((draws.mean(0) - wanted).abs() <= 4 * error + 1e-12).all()
    assert error.max() < 0.1 * wanted.abs().max()

    several = C.hessian_diagonal(loss, (X, Y), 8)
    spread = torch.vmap(
        lambda key: sparse_part(several(state._replace(key=key), (), 0))
    )(keys[:500]).std(0)
    assert torch.allclose(spread, draws.std(0) / 8**0.5, rtol=0.2)

    one = C.hessian_diagonal(loss, (X, Y), 2)
    first = one(state, (), 3)
    assert sf.checkpoint.tree_equal(first, one(state, (), torch.tensor(3)))
    reordered = state._replace(params=dict(reversed(state.params.items())))
    assert sf.checkpoint.tree_equal(first, one(reordered, (), 3))
    assert not first["bias"].any()
    for other in (one(state, (), 4), one(state._replace(key=sf.random.key(9)), (), 3)):
        assert not torch.equal(first["a"], other["a"])


@pytest.mark.parametrize("name", ["fisher", "exact", "estimate", "grasp", "synflow"])
def test_a_state_without_a_sparsified_leaf_scores_zero(name):
    state = state_of()
    dense = state._replace(
        masks=optree.tree_map(lambda _: torch.tensor(True), state.masks)
    )
    found = scores()[name](dense, (), 0)
    assert {path: leaf.shape for path, leaf in found.items()} == {
        p: leaf.shape for p, leaf in state.params.items()
    }
    assert not flat(found).any()


def scores():
    return {
        "fisher": C.fisher(loss, (X, Y), chunk_size=4),
        "obd": C.obd(C.fisher(loss, (X, Y))),
        "exact": C.hessian_diagonal(loss, (X, Y), chunk_size=8),
        "estimate": C.hessian_diagonal(loss, (X, Y), 2),
        "grasp": C.grasp(loss, (X, Y), temperature=2.0),
        "synflow": C.synflow(
            lambda p, x: torch.relu(x @ p["a"].T + p["bias"]) @ p["b"].T, (2,)
        ),
    }


@pytest.mark.parametrize("name", scores())
def test_an_ensemble_is_a_loop(name):
    score = scores()[name]
    states = [state_of(seed) for seed in range(3)]
    found = torch.vmap(lambda state: score(state, (), 5))(sf.ensemble.stack(states))
    for i, state in enumerate(states):
        single = score(state, (), 5)
        for path, leaf in single.items():
            assert torch.allclose(found[path][i], leaf, rtol=1e-10, atol=1e-12)


@pytest.mark.deep
# the Fisher is in obd
@pytest.mark.parametrize("name", ["obd", "exact", "estimate", "grasp", "synflow"])
def test_a_compiled_score_is_an_eager_one(name):
    score, state = scores()[name], state_of()
    compiled = torch.compile(score, backend="eager", fullgraph=True)
    for path, leaf in score(state, state.params, 3).items():
        assert torch.allclose(
            compiled(state, state.params, torch.tensor(3))[path],
            leaf,
            rtol=1e-10,
            atol=1e-12,
        )


@pytest.mark.deep
def test_an_algorithm_with_such_a_score_compiles():
    algorithm = sf.gmp(
        0.5, when=sf.every(2), score=C.grasp(loss, (X, Y)), where="[ab]", init="dense"
    )
    update = torch.compile(algorithm.update, backend="eager", fullgraph=True)
    state = algorithm.init(state_of().params)
    eager, compiled = (
        algorithm.update(state, state.params, 2),
        update(state, state.params, torch.tensor(2)),
    )
    assert sf.checkpoint.tree_equal(eager.masks, compiled.masks)
    assert int(sparse_part(compiled.masks).sum()) == 10


@pytest.mark.parametrize("name", scores())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_close_and_nothing_else_changes(name, dtype):
    score = scores()[name]
    state, wide = state_of(dtype=dtype), state_of()
    tampered = copy.deepcopy(state)
    generator = torch.get_rng_state()
    found = score(state, (), 0)
    assert torch.equal(torch.get_rng_state(), generator)
    assert sf.checkpoint.tree_equal(state, tampered)
    for path, leaf in score(wide, (), 0).items():
        assert found[path].is_floating_point() and not found[path].requires_grad
        assert found[path].dtype in (dtype, torch.float32, torch.float64)
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.15}[dtype]
        assert torch.allclose(
            found[path].double(),
            leaf,
            rtol=tolerance,
            atol=tolerance * float(leaf.abs().max()),
        )
    assert optree.tree_structure(found) == optree.tree_structure(state.params)


def test_results_hang_on_no_graph():
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    for score in (
        C.fisher(lambda *args: scale * loss(*args), (X, Y)),
        C.hessian_diagonal(lambda *args: scale * loss(*args), (X, Y)),
        C.hessian_diagonal(lambda *args: scale * loss(*args), (X, Y), 1),
        C.grasp(lambda *args: scale * loss(*args), (X, Y), None),
        C.synflow(lambda p, x: scale * (x @ p["a"].T) @ p["b"].T, (2,)),
    ):
        assert not any(leaf.requires_grad for leaf in score(state_of(), (), 0).values())


def test_a_fresh_batch_comes_for_the_step_and_only_when_it_is_needed():
    asked = []

    def batch(step):
        asked.append(int(step))
        return X[int(step) : int(step) + 2], Y[int(step) : int(step) + 2]

    algorithm = sf.gmp(
        0.5,
        when=sf.every(2, start=2),
        score=C.fisher(loss, batch),
        where="[ab]",
        init="dense",
    )
    state = algorithm.init(state_of().params)
    assert asked == []
    for step in range(5):
        state = algorithm.update(state, state.params, step)
    assert asked == [2, 4]
    by_step = C.fisher(loss, batch)(state_of(), (), torch.tensor(3))
    assert sf.checkpoint.tree_equal(
        by_step, C.fisher(loss, (X[3:5], Y[3:5]))(state_of(), (), 0)
    )


def test_scores_compose_with_memory_optimizers_and_patterns():
    batches = [(X[i : i + 3], Y[i : i + 3]) for i in (0, 3)]
    pruner = sf.one_shot(
        0.5,
        sf.scores.mean(C.grasp(loss, lambda step: batches[int(step) % 2])),
        when=sf.at([1]),
        where="[ab]",
        pattern=sf.patterns.row_balanced(),
    )
    trained = sf.with_optimizer(pruner, sf.optimizers.sgd(0.1), skip=sf.at([0, 1]))
    state, params = trained.init(state_of().params), state_of().params
    for step in range(4):
        grads = torch.func.grad(loss)(sf.effective(state), X, Y)
        state = trained.update(state, grads, step)
        # the weights have not moved: both batches are scored at the same ones
        if step == 1:
            dense = state_of(masked=False)
            found = [C.grasp(loss, batch)(dense, (), 0)["b"] for batch in batches]
            best = sf.masks.topk_mask(
                (found[0] + found[1]) / 2, 2, pattern=sf.patterns.row_balanced()
            )
            assert torch.equal(state.masks["b"], best)
            assert torch.equal(state.params["b"], torch.where(best, params["b"], 0.0))
    assert state.masks["b"].sum(1).tolist() == [2, 2, 2]
    assert not torch.equal(state.params["bias"], params["bias"])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: C.fisher(3, (X, Y)),
            TypeError,
            "expected loss to be a function (params, *batch) -> 0-d tensor, got int",
        ),
        (
            lambda: C.grasp(loss, X),
            TypeError,
            "arguments after params, got Tensor; for one write (x,)",
        ),
        (
            lambda: C.fisher(loss, (X, Y[:2])),
            ValueError,
            "examples, got 6 at '0' and 2 at '1'",
        ),
        (
            lambda: C.fisher(loss, (X, Y), 0),
            ValueError,
            "expected chunk_size >= 1, got 0",
        ),
        (
            lambda: C.fisher(loss, (X, Y), 2.0),
            TypeError,
            "expected chunk_size to be an int, got float",
        ),
        (
            lambda: C.hessian_diagonal(loss, (X, Y), True),
            TypeError,
            "expected samples to be an int, got bool",
        ),
        (
            lambda: C.hessian_diagonal(loss, (X, Y), 0),
            ValueError,
            "expected samples >= 1, got 0",
        ),
        (
            lambda: C.hessian_diagonal(loss, (X, Y), chunk_size=0),
            ValueError,
            "expected chunk_size >= 1, got 0",
        ),
        (
            lambda: C.hessian_diagonal(loss, (X, Y), 2)(state_of(key=()), (), 0),
            ValueError,
            "expected a PRNG key in the state for an estimate, got none; pass "
            "key=sf.random.key(seed)",
        ),
        (
            lambda: C.obd(sf.scores.ema(sf.scores.gradient, 0.5)),
            TypeError,
            "expected diagonal to be a score function such as "
            "sf.curvature.fisher(loss, batch), got Accumulated",
        ),
        (
            lambda: C.obd(lambda state, grads, step: {"a": 1})(state_of(), (), 0),
            ValueError,
            "expected the diagonal with the structure of params, but there is no leaf "
            "at 'b'",
        ),
        (
            lambda: C.synflow(3, (2,)),
            TypeError,
            "expected a module or a function (params, x) -> tensor, got int",
        ),
        (
            lambda: C.synflow(loss, 2),
            TypeError,
            "expected input_shape to be positive ints without the batch axis, such as "
            "(3, 32, 32), got 2",
        ),
        (lambda: C.synflow(loss, (2, 0)), TypeError, "such as (3, 32, 32), got (2, 0)"),
        (
            lambda: C.synflow(loss, (True, 2)),
            TypeError,
            "such as (3, 32, 32), got (True, 2)",
        ),
        (
            lambda: C.synflow(lambda params, x: (x, x), (2,))(state_of(), (), 0),
            TypeError,
            "expected forward to give a tensor, got tuple",
        ),
        (
            lambda: C.grasp(lambda params: params["a"], (), None)(state_of(), (), 0),
            ValueError,
            "expected the loss to be a 0-d tensor, got shape (4, 2)",
        ),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()
