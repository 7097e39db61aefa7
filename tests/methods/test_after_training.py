"""Pruning of trained networks: held against recordings of the authors' code, and
against brute force.
"""

import re

import pytest
import torch
from golden_data import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden_calibrated import same, toy
from torch import nn

import sparsefn as sf

methods = sf.methods


def pruned(algorithm, weight, path="w"):
    state = algorithm.init({path: weight})
    state = algorithm.update(state, state.params, 0)
    return state.params[path], state.masks[path]


def statistics(gram):
    return {
        "w": {
            "count": torch.tensor(len(gram)),
            "square": gram.diagonal().double(),
            "gram": gram,
        }
    }


def error(new, weight, gram):
    return float(((new - weight) @ gram * (new - weight)).sum())


@pytest.mark.parametrize(
    "case", cases("wanda", "prune_wanda"), ids=lambda case: case.id
)
def test_wanda_has_the_masks_of_its_authors(case):
    model, blocks, masks = toy(case)
    n, m = case.args["prune_n"], case.args["prune_m"]

    def prune(stats):
        if m:  # their n is how many are pruned
            return methods.wanda(None, stats, pattern=sf.patterns.nm(m - n, m))
        return methods.wanda(case.args["sparsity"], stats)

    assert same(
        sf.calibration.in_order(
            model, None, blocks, prune, case.inputs["x"], of="square"
        ),
        masks,
    )


# The reallocation of channels is no part of the method.
IN_PLACE = [case for case in cases("ria", "prune_ria") if not case.args["reallocation"]]


@pytest.mark.parametrize("case", IN_PLACE, ids=lambda case: case.id)
def test_ria_has_the_masks_of_its_authors(case):
    model, blocks, masks = toy(case)
    args, shares = (
        case.args,
        {path: 1 - float(mask.double().mean()) for path, mask in masks.items()},
    )
    pattern = (
        sf.patterns.row_balanced()
        if args["per_outneuron"]
        else sf.patterns.unstructured()
    )

    # theirs also drops the weight at the threshold, so leaves have shares of their own
    def prune(
        stats,
    ):
        return sf.partition(
            [
                (
                    p,
                    methods.ria(
                        shares[p], stats, power=args["a"], pattern=pattern, where=p
                    ),
                )
                for p in stats
            ]
        )

    assert same(
        sf.calibration.in_order(
            model, None, blocks, prune, case.inputs["x"], of="square"
        ),
        masks,
    )


@pytest.mark.parametrize(
    "case", cases("sparsegpt", "fasterprune"), ids=lambda case: case.id
)
def test_sparsegpt_has_the_weights_of_its_authors(case):
    weight, hessian, mask = (
        case.inputs["weight"],
        case.inputs["hessian"],
        case.outputs["mask"],
    )
    m, block = case.args.get("prunem"), case.args.get("blocksize", 128)
    # theirs prunes one more in each block
    share = None if m else 1 - int(mask.sum()) / mask.numel()
    pattern = sf.patterns.nm(m - case.args["prunen"], m) if m else None
    algorithm = methods.sparsegpt(
        share, statistics(hessian), pattern=pattern, block=block
    )
    new, kept = pruned(algorithm, weight)
    assert torch.equal(kept, mask)
    torch.testing.assert_close(new, case.outputs["weight_after"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case", cases("obc", "TrueOBS.nmprune"), ids=lambda case: case.id
)
def test_obs_has_the_weights_of_its_authors(case):
    m = case.args["m"]
    pattern = sf.patterns.nm(m - case.args["n"], m)
    algorithm = methods.obs(
        None, statistics(case.inputs["hessian"]), pattern=pattern, damp=0.0
    )
    new, _ = pruned(algorithm, case.inputs["weight"])
    torch.testing.assert_close(new, case.outputs["weight_after"], rtol=1e-3, atol=1e-3)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from([0.1, 0.3, 0.5, 0.7]))
def test_counts_are_those_of_every_sparsity_and_refitting_is_never_worse(
    seed, columns, sparsity
):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, columns, generator=generator, dtype=torch.float64)
    x = torch.randn(40, columns, generator=generator, dtype=torch.float64)
    gram = x.T @ (x @ torch.eye(columns, dtype=torch.float64) + 0.5)
    gram = gram @ gram.T / len(x) + torch.eye(columns, dtype=torch.float64)
    stats = statistics(gram)
    rows = sf.patterns.row_balanced()
    for make in (methods.sparsegpt, methods.obs):
        for pattern, size in ((None, 3 * columns), (rows, columns)):
            new, mask = pruned(make(sparsity, stats, pattern=pattern, damp=0.0), weight)
            assert int(mask.sum()) == sf.budgets.n_kept(size, sparsity) * (
                1 if pattern is None else 3
            )
            best = error(sf.solve.refit(weight, gram, mask), weight, gram)
            assert best <= error(new, weight, gram) * (1 + 1e-9) + 1e-12
            assert (
                best
                <= error(torch.where(mask, weight, 0.0), weight, gram) * (1 + 1e-9)
                + 1e-12
            )
            if make is methods.obs:
                assert error(new, weight, gram) <= best * (1 + 1e-9) + 1e-12


def test_a_model_is_pruned_block_after_block_with_weights_that_make_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    x = torch.randn(256, 4) @ torch.randn(4, 16) + 0.3 * torch.randn(256, 16)
    wanted, errors = model(x).detach(), {}
    for name, make in (
        ("magnitude", lambda stats: sf.one_shot(0.7)),
        ("wanda", lambda stats: methods.wanda(0.7, stats)),
        ("sparsegpt", lambda stats: methods.sparsegpt(0.7, stats)),
        ("obs", lambda stats: methods.obs(0.7, stats)),
    ):
        state = sf.calibration.in_order(model, None, ["0.*", "2.*"], make, x)
        counts = {
            path: int(mask.sum()) for path, mask in state.masks.items() if mask.ndim
        }
        assert counts == {"0.weight": 154, "2.weight": 77}
        errors[name] = float(
            (sf.modules.call(model, state, x).detach() - wanted).square().mean()
        )
    assert (
        errors["obs"] < 0.5 * errors["magnitude"]
        and errors["sparsegpt"] < 0.5 * errors["magnitude"]
    )
    assert errors["sparsegpt"] < errors["wanda"]


def regression(params, x, y):
    return (x @ params["w"].mT - y).square().sum(-1).mean() / 2


def test_woodfisher_prunes_by_gradients_of_examples_and_lowers_the_loss_of_masking():
    torch.manual_seed(0)
    x = torch.randn(200, 4) @ torch.randn(4, 12) + 0.2 * torch.randn(200, 12)
    weight = torch.randn(1, 12)
    y = x @ weight.T + torch.randn(200, 1)
    params = {"w": torch.linalg.lstsq(x, y).solution.T, "bias": torch.zeros(1)}
    gradients = sf.curvature.example_gradients(regression, params, (x, y))
    algorithm = methods.woodfisher(0.5, gradients)
    state = algorithm.update(algorithm.init(params), params, 0)
    new, kept = sf.solve.obs_fisher(params["w"], gradients["w"], 6)
    assert (
        torch.equal(state.params["w"], new)
        and torch.equal(state.masks["w"], kept)
        and int(kept.sum()) == 6
    )
    assert torch.equal(state.params["bias"], params["bias"])
    whole = params | {"w": torch.where(kept, params["w"], 0.0)}
    least, masked, made_up = (
        float(regression(p, x, y)) for p in (params, whole, state.params)
    )
    assert made_up - least < 0.7 * (masked - least)
    # In stages: what was pruned stays pruned.
    later = methods.woodfisher(0.75, gradients, when=sf.at([1]))
    both = sf.sequence(algorithm, later)
    state = both.init(params)
    for step in range(2):
        state = both.update(state, params, step)
    assert int(state.masks["w"].sum()) == 3 and not (state.masks["w"] & ~kept).any()


def test_woodfisher_with_a_diagonal_fisher_matrix_is_obd():
    # Examples whose gradients have one entry each.
    weight = torch.randn(2, 3)
    entries = 0.5 + torch.rand(6)

    def loss(params, g):
        return (g * params["w"].flatten()).sum(-1).mean()

    batch = (torch.diag(entries),)
    gradients = sf.curvature.example_gradients(loss, {"w": weight}, batch)
    new, kept = pruned(methods.woodfisher(0.5, gradients, damp=1e-9), weight)
    plain, mask = pruned(methods.obd(0.5, loss, batch), weight)
    assert torch.equal(kept, mask)
    torch.testing.assert_close(new, plain)
    assert torch.equal(plain, torch.where(mask, weight, 0.0))
    costs = weight.flatten().square() * entries.square() / 12
    assert torch.equal(mask.flatten(), sf.masks.topk_mask(costs, 3))


def test_obd_prunes_over_all_leaves_by_the_mean_of_squares_not_the_square_of_the_mean():
    def loss(params, g):
        return (g @ torch.cat([params["a"], params["b"]])).mean()

    params = {"a": torch.tensor([1.0]), "b": torch.tensor([-1.0, 2.0])}
    examples = (torch.tensor([[1.0, 2.0, 1.0], [-1.0, 1.0, 0.0]]),)
    # Means of squares 1, 2.5 and 0.5, so scores 0.5, 1.25 and 1.
    state = (
        algorithm := methods.obd(1 / 3, loss, examples, where="*", chunk_size=1)
    ).init(params)
    masks = algorithm.update(state, params, 0).masks
    assert (masks["a"].tolist(), masks["b"].tolist()) == ([False], [True, True])


WEIGHT = torch.ones(2, 4)
GRADS = torch.ones(3, 2, 4)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (
            lambda: methods.wanda(0.5, {}),
            ValueError,
            "wanda: no data for the leaf 'w', but for 0 others",
        ),
        (
            lambda: methods.ria(0.5, {"w": {}}),
            ValueError,
            "ria: expected 'count' in the statistics at 'w', got",
        ),
        (
            lambda: methods.sparsegpt(0.5, {}),
            ValueError,
            "layerwise: no data for the leaf 'w', but for 0 others",
        ),
        (
            lambda: methods.sparsegpt(1.5, {}),
            ValueError,
            "expected sparsity in [0, 1], got 1.5",
        ),
        (
            lambda: methods.sparsegpt(0.5, statistics(torch.ones(4, 4)), damp=0.0),
            ValueError,
            "at 'w', obs: expected a positive definite hessian",
        ),
        (
            lambda: methods.sparsegpt(
                None, statistics(torch.eye(4)), pattern=sf.patterns.nm(2, 4), block=2
            ),
            ValueError,
            "at 'w', obs: expected groups inside blocks of 2 columns",
        ),
        (
            lambda: methods.sparsegpt(None, statistics(torch.eye(4))),
            TypeError,
            "expected one of mask, keep and pattern",
        ),
        (
            lambda: methods.obs(2.0, {}),
            ValueError,
            "expected sparsity in [0, 1], got 2.0",
        ),
        (
            lambda: methods.obs(
                0.5, statistics(torch.eye(4)), pattern=sf.patterns.block((2, 2))
            ),
            ValueError,
            "at 'w', obs_exact: expected a pattern of single weights",
        ),
        (
            lambda: methods.woodfisher(0.5, {"v": GRADS}),
            ValueError,
            "woodfisher: no gradients for the leaf 'w', but for 1",
        ),
        (
            lambda: methods.woodfisher(0.5, {"w": torch.ones(3, 4, 2)}),
            ValueError,
            "at 'w', obs_fisher: expected grads of shape (examples, 2, 4), got (3, 4, "
            "2)",
        ),
        (
            lambda: methods.woodfisher(0.5, {"w": GRADS / 0}),
            ValueError,
            "at 'w', fisher_inverse: expected a finite grads, got 24 of 24",
        ),
        (
            lambda: methods.woodfisher(0.5, {"w": GRADS}, damp=0.0),
            ValueError,
            "fisher_inverse: expected damp to be a number > 0, got 0.0",
        ),
        (
            lambda: methods.woodfisher(-0.5, {}),
            ValueError,
            "expected sparsity in [0, 1], got -0.5",
        ),
        (lambda: methods.obd(0.5, 3, ()), TypeError, "expected loss to be a function"),
    ],
)
def test_bad_arguments(make, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        pruned(make(), WEIGHT)


def test_wanda_wants_the_outputs_of_a_conv1d_along_axis_1():
    stats = {"w": {"count": torch.tensor(3), "square": torch.ones(4, 1).double()}}
    weights = {"w": torch.randn(4, 6)}
    text = (
        r"row_balanced\(\) crosses outputs of 'w', which lie along 1 of its shape \(4, "
        r"6\): give row_balanced\(axis=1\)"
    )
    with pytest.raises(ValueError, match=text):
        sf.methods.wanda(0.5, stats).init(weights)
    rows = sf.methods.wanda(0.5, stats, pattern=sf.patterns.row_balanced(axis=1))
    state = rows.init({"w": torch.randn(4, 6)})
    assert rows.update(state, state.params, 0).masks["w"].sum(0).tolist() == [2] * 6
