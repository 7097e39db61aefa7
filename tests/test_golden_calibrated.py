"""Held against recorded outputs of the authors' code of Wanda, RIA and OWL on a toy
model of residual blocks.
"""

import pytest
import torch
from golden_data import cases
from torch import nn

import sparsefn as sf


class Block(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = (
            nn.Linear(w.shape[1], w.shape[0], bias=False) for w in (up, down)
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def named(system, fn):
    return pytest.mark.parametrize("case", cases(system, fn), ids=lambda case: case.id)


def under(tensors, prefix):
    return {
        name.removeprefix(prefix + "/"): x
        for name, x in tensors.items()
        if name.startswith(prefix + "/")
    }


def toy(case):
    """The model, the globs of its blocks, and the recorded masks by the names of this
    model.
    """
    weights = {
        name.removeprefix("layers."): w
        for name, w in under(case.inputs, "weight").items()
    }
    layers = range(len(weights) // 2)
    model = nn.Sequential(
        *(Block(weights[f"{i}.up.weight"], weights[f"{i}.down.weight"]) for i in layers)
    )
    model.load_state_dict(weights)
    masks = {
        name.removeprefix("layers."): mask
        for name, mask in under(case.outputs, "mask").items()
    }
    return model, [f"{i}.*" for i in layers], masks


def kept_in_rows(sparsity):
    """Their counts are truncated in each row."""
    return lambda shapes, _: {
        p: rows * (n - int(n * sparsity)) for p, (rows, n) in shapes.items()
    }


def by_rows_or_nm(args):
    if args["prune_m"]:
        return {
            "sparsity": None,
            "pattern": sf.patterns.nm(
                args["prune_m"] - args["prune_n"], args["prune_m"]
            ),
        }
    counts = kept_in_rows(args["sparsity"])
    return {
        "sparsity": args["sparsity"],
        "pattern": sf.patterns.row_balanced(),
        "distribution": counts,
    }


def same(state, masks):
    return all(torch.equal(state.masks[name], mask) for name, mask in masks.items())


@named("wanda", "prune_wanda")
def test_wanda(case):
    model, blocks, masks = toy(case)
    seen = {}

    def prune(stats):
        seen.update(stats)
        return sf.one_shot(score=sf.scores.wanda(stats), **by_rows_or_nm(case.args))

    x = case.inputs["x"]
    assert same(
        sf.calibration.in_order(model, None, blocks, prune, x, of="square"), masks
    )
    # theirs is a mean over samples
    for name, scaler in under(case.outputs, "scaler_row").items():
        assert torch.allclose(
            seen[name.removeprefix("layers.")]["square"] / len(x),
            scaler.double(),
            rtol=1e-5,
        )
    assert same(
        sf.calibration.in_order(
            model, None, blocks, prune, x, of="square", chunk_size=1
        ),
        masks,
    )


@named("ria", "prune_ria")
def test_ria(case):
    model, blocks, masks = toy(case)
    args = case.args

    def prune(stats):
        score = sf.scores.ria(stats, args["a"])
        if args["reallocation"]:
            return sf.Algorithm(*reallocated(score, args))
        if args["prune_m"] or args["per_outneuron"]:
            return sf.one_shot(score=score, **by_rows_or_nm(args))
        # One competition a layer; theirs drops the weight at the threshold, too.
        return sf.one_shot(args["sparsity"], score, distribution=kept_of_layer)

    def kept_of_layer(shapes, sparsity):
        return {p: a * b - int(a * b * sparsity) - 1 for p, (a, b) in shapes.items()}

    assert same(
        sf.calibration.in_order(
            model, None, blocks, prune, case.inputs["x"], of="square"
        ),
        masks,
    )


def reallocated(score, args):
    """2:4 after columns of like sums have been dealt to different groups, to and
    fro.
    """
    m = args["prune_m"]

    def masks(scores):
        dealt = scores.sum(0).argsort().reshape(m, -1)
        order = torch.stack(
            [row if i % 2 == 0 else row.flip(0) for i, row in enumerate(dealt)]
        ).T.flatten()
        found = sf.masks.topk_mask(
            scores[:, order], None, pattern=sf.patterns.nm(m - args["prune_n"], m)
        )
        return torch.empty_like(found).index_copy(1, order, found)

    start = sf.one_shot(0.5)

    def update(state, grads, step):
        new = {
            path: masks(scores) for path, scores in score(state, grads, step).items()
        }
        return state._replace(params=sf.apply_masks(state.params, new), masks=new)

    return start.init, update


@named("owl", "prune_wanda_outlier")
def test_owl(case):
    model, blocks, masks = toy(case)
    params, args = sf.modules.params_of(model), case.args
    stats = sf.calibration.inputs(model, None, case.inputs["x"], of="square")
    ratios = sf.calibration.outlier_ratios(
        sf.dense().init(params), stats, blocks, multiple=args["M"]
    )
    found = torch.tensor([100 * ratios[block] for block in blocks], dtype=torch.float64)
    assert torch.allclose(found, case.outputs["outlier_ratio"], atol=1e-9)
    shares = sf.budgets.owl(ratios, spread=args["Lamda"])
    million = {block.replace("*", "w"): (1000, 1000) for block in blocks}
    kept = torch.tensor(
        [count / 1e6 for count in shares(million, args["sparsity"]).values()],
        dtype=torch.float64,
    )
    assert torch.allclose(kept, case.outputs["kept_ratio"], atol=1e-6)
    assert float(kept.mean()) == pytest.approx(1 - args["sparsity"], abs=1e-6)

    def counts(shapes, _):  # truncated in each row, of their own ratios
        own = {
            block: float(k)
            for block, k in zip(blocks, case.outputs["kept_ratio"], strict=True)
        }
        return {
            p: r * (n - int(n * (1 - own[f"{p.split('.')[0]}.*"])))
            for p, (r, n) in shapes.items()
        }

    def prune(stats):
        rows = sf.patterns.row_balanced()
        return sf.one_shot(
            args["sparsity"], sf.scores.wanda(stats), pattern=rows, distribution=counts
        )

    assert same(
        sf.calibration.in_order(
            model, None, blocks, prune, case.inputs["x"], of="square"
        ),
        masks,
    )
