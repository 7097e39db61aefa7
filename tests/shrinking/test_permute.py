"""Channels in another order: equal outputs, and N:M masks that keep more."""

import itertools
import re

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.shrinking.proof import Proof
from tests.shrinking.compare import outputs
from tests.shrinking.zoo import MODELS

permute = sf.shrinking.permute
X = torch.linspace(-1, 1, 24).reshape(3, 8)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def mlp():
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4)
    ).eval()


def is_matrix(path, leaf):
    """Whether a leaf is a matrix or kernel, and no weight is computed from it."""
    return leaf.ndim > 1 and "parametrizations" not in path


def kept_sum(model, n, m):
    """The sum of |w| that masks keep of all weights of matrices."""
    pattern = sf.patterns.nm(n, m, axis=1)
    total = 0.0
    for path, weight in model.named_parameters():
        if is_matrix(path, weight) and weight.shape[1] % m == 0:
            size = weight.detach().abs().double()
            total += float(size[sf.masks.topk_mask(size, None, pattern=pattern)].sum())
    return total


def check(model, example, n, m):
    before = {name: x.clone() for name, x in model.state_dict().items()}
    made = permute(model, example, n, m, where=is_matrix)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert type(made.module) is type(model)
    for wanted, got in zip(
        outputs(model, example), outputs(made.module, example), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert made.before == pytest.approx(kept_sum(model, n, m), rel=1e-6)
    assert made.after == pytest.approx(kept_sum(made.module, n, m), rel=1e-6)
    assert made.after >= made.before
    for name, x in made.module.state_dict().items():
        indices = made.kept[name].indices if name in made.kept else ()
        for d, index in enumerate(indices):
            if index is not None:
                assert index.sort().values.tolist() == list(range(x.shape[d]))
                before[name] = before[name].index_select(d, index)
        assert torch.equal(x, before[name])
    return made


FEW = ["vgg", "densenet", "shufflenet v2", "vit", "lstm classifier"]
# no weight of two dimensions that has a mask, or an even number of inputs
NOTHING = [
    "parametrized weights",
    "activations that do not keep zero",
    "concatenations of one",
]


@pytest.mark.filterwarnings("ignore:no leaf is sparsified")  # all are computed
@pytest.mark.deep(but=FEW)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_stay_and_masks_keep_more(name):
    if name in NOTHING:
        with pytest.raises(ValueError, match="whose number of inputs 2 divides, got"):
            check(*MODELS[name](), 1, 2)
        return
    made = check(*MODELS[name](), 1, 2)
    if name in FEW:
        assert made.after > made.before
    # a table in the code is by position: the proof finds it, and nothing else
    assert bool(made.stays) == (name == "constant tables")


def test_no_other_order_of_a_small_layer_keeps_more():
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    made = check(net, (torch.ones(1, 2),), 2, 4)
    assert made.after == made.before  # one group of four keeps two in any order
    made = check(net, (torch.ones(1, 2),), 1, 2)
    weight = net[2].weight.detach().abs()
    best = max(
        float(weight[:, list(order)].reshape(3, 2, 2).amax(-1).sum())
        for order in itertools.permutations(range(4))
    )
    rest = kept_sum(nn.ModuleList([net[0]]), 1, 2)
    assert made.after - rest == pytest.approx(best, rel=1e-6)


def test_a_state_and_an_optimizer_go_along():
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters())
    net(X).sum().backward()
    optimizer.step()
    state = sf.one_shot(0.5).init(sf.modules.params_of(net))
    state = sf.one_shot(0.5).update(state, state.params, 0)
    made = permute(net, X, 2, 4)
    carried = sf.shrinking.carry(state, made)
    torch.testing.assert_close(
        sf.modules.call(made.module, carried, X), sf.modules.call(net, state, X)
    )
    assert sf.masks.n_kept(carried.masks) == sf.masks.n_kept(state.masks)
    after = torch.optim.Adam(made.module.parameters())
    after.load_state_dict(sf.shrinking.carry_optimizer(optimizer, net, made))
    # A step of both, and they are still one model in two orders.
    for model, optimizer_of in ((net, optimizer), (made.module, after)):
        optimizer_of.zero_grad()
        model(X).square().sum().backward()
        optimizer_of.step()
    torch.testing.assert_close(made.module(X), net(X))


def test_masks_of_the_new_order_lose_less_of_the_outputs():
    net = mlp()
    made = permute(net, X, 2, 4)
    pruned = sf.one_shot(0.5, pattern=sf.patterns.nm(2, 4))
    kept = []
    for model in (net, made.module):
        state = pruned.init(sf.modules.params_of(model))
        state = pruned.update(state, state.params, 0)
        weights = state.params
        kept.append(sum(float(w.abs().sum()) for w in weights.values() if w.ndim > 1))
    assert kept[1] > kept[0]


def test_only_chosen_weights_count():
    net = mlp()
    made = permute(net, X, 2, 4, where="2.*")
    assert made.kept["4.weight"].indices[1] is None
    assert made.kept["2.weight"].indices[1] is not None
    torch.testing.assert_close(made.module(X), net(X))


def test_masks_of_other_scores_keep_more_of_them():
    net = mlp()
    stats = sf.calibration.inputs(net, None, X * torch.arange(1, 9))
    state = sf.one_shot(0.5).init(sf.modules.params_of(net))
    scores = sf.scores.wanda(stats)(state, state.params, 0)
    made = permute(net, X, 2, 4, scores=scores)
    carried = sf.shrinking.carry(scores, made)
    pattern = sf.patterns.nm(2, 4)
    sums = [0.0, 0.0]
    for path, size in scores.items():
        for i, one in enumerate((size, carried[path])):
            if size.ndim > 1:
                mask = sf.masks.topk_mask(one, None, pattern=pattern)
                sums[i] += float(one[mask].double().sum())
    assert made.before == pytest.approx(sums[0])
    assert made.before < made.after
    assert made.after == pytest.approx(sums[1])
    torch.testing.assert_close(made.module(X), net(X))


def test_keys_and_groups_are_taken():
    net = mlp()
    groups = sf.shrinking.groups(net, X)
    plain = permute(net, X, 2, 4, groups=groups)
    again = permute(net, X, 2, 4, groups=groups)
    for name, kept in plain.kept.items():
        for one, other in zip(kept.indices, again.kept[name].indices, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    searched = permute(net, X, 2, 4, escapes=3, key=sf.random.key(1), groups=groups)
    assert searched.after >= searched.before
    torch.testing.assert_close(searched.module(X), net(X))


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 8)
            self.middle = nn.Linear(8, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.table.weight

        def forward(self, words):
            x = self.table(words)
            return self.head(x + self.middle(x).relu())

    net = Tied().double().eval()
    made = check(net, (torch.arange(6).reshape(2, 3),), 2, 4)
    assert made.module.head.weight is made.module.table.weight
    assert made.after > made.before


def test_without_the_proof_a_table_in_the_code_would_change_the_outputs(monkeypatch):
    model, example = MODELS["constant tables"]()
    monkeypatch.setattr(Proof, "reason", lambda *_: "")
    made = permute(model, example, 1, 2)
    (wanted, *_), (got, *_) = outputs(model, example), outputs(made.module, example)
    assert not torch.allclose(got, wanted)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"n": 5}, ValueError, "nm: expected n <= m, got n=5, m=4"),
        ({"m": 2.0}, TypeError, "expected m to be an int"),
        (
            {"m": 5},
            ValueError,
            "permute: expected a weight whose number of inputs 5 divides, got the "
            "numbers {'0.weight': 8",
        ),
        ({"escapes": -1}, ValueError, "expected escapes >= 0, got -1"),
        ({"where": "none.*"}, ValueError, "none.*"),
        (
            {"scores": {"0.weight": torch.ones(3)}},
            ValueError,
            "permute: expected scores of the structure of the params, with shape (16, "
            "8) at '0.weight', got (3,)",
        ),
        ({"scores": {}}, ValueError, "(16, 8) at '0.weight', got none"),
        ({"example": "words"}, TypeError, "example"),
    ],
)
def test_bad_input(change, kind, text):
    given = {"example": X, "n": 2, "m": 4, **change}
    with pytest.raises(kind, match=re.escape(text)):
        permute(mlp(), **given)


def test_weights_that_are_not_finite_are_refused():
    net = mlp()
    with torch.no_grad():
        net[2].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="expected finite weights, got NaN or inf"):
        permute(net, X, 2, 4)
