"""Any dict of named tensors is a tree of params: embeddings, data that comes and goes,
settings by name.
"""

import functools
import re
import warnings

import optree
import pytest
import torch
from torch import nn

import sparsefn as sf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.ao announces its own end
    from torch.ao.pruning._experimental.data_scheduler import BaseDataScheduler
    from torch.ao.pruning._experimental.data_sparsifier import DataNormSparsifier
    from torch.ao.pruning._experimental.data_sparsifier.quantization_utils import (
        post_training_sparse_quantize,
    )

BLOCKS = sf.patterns.block((1, 4))


def normal(*shape, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


DATA = {"emb": normal(6, 8), "table.left": normal(4, 12, seed=1)}
prune = functools.partial(
    sf.gmp, init="dense", where="*", pattern=BLOCKS, pruned="keep", regrow=True
)


def update(algorithm, state, step=0):
    return algorithm.update(
        state, optree.tree_map(torch.zeros_like, state.params), step
    )


def once(algorithm, params):
    return update(algorithm, algorithm.init(params))


# ---- names, and which leaves ---------------------------------------------------------


def test_embeddings_are_sparsified_on_demand():
    model = nn.ModuleDict({"embedding": nn.Embedding(6, 8), "head": nn.Linear(8, 2)})
    params = sf.modules.params_of(model)
    state = once(sf.one_shot(0.5), params)
    # the default leaves it dense by its name
    assert state.masks["embedding.weight"].ndim == 0
    state = once(sf.one_shot(0.5, where="embedding.*"), params)
    assert (
        sf.masks.sparsity(state.masks) == 0.5 and state.masks["head.weight"].ndim == 0
    )
    with pytest.warns(
        UserWarning, match="no leaf is sparsified: where selects none of the paths"
    ):
        sf.one_shot(0.5).init({"embedding": params["embedding.weight"]})


def test_names_may_have_dots():
    # The original refuses them, as its names are attributes.
    nested = {"table": {"left": DATA["table.left"]}, "emb": DATA["emb"]}
    flat, deep = (once(prune(0.5), tree) for tree in (DATA, nested))
    assert torch.equal(flat.masks["table.left"], deep.masks["table"]["left"])
    assert (
        sf.checkpoint.state_dict(flat).keys() == sf.checkpoint.state_dict(deep).keys()
    )


def test_two_leaves_of_one_dotted_path_are_refused():
    with pytest.raises(
        ValueError, match=re.escape("but two leaves are at 'a.b'; rename one")
    ):
        sf.static(0.5).init({"a.b": DATA["emb"], "a": {"b": DATA["emb"]}})


# ---- against torch.ao ----------------------------------------------------------------


def peer(data, **config):
    found = DataNormSparsifier(**config)
    for name, x in data.items():
        found.add_data(name=name.replace(".", "_"), data=x.clone())
    return found


def assert_masks(state, found):
    for name, mask in state.masks.items():
        assert torch.equal(mask, found.get_mask(name.replace(".", "_")) != 0)


def test_scores_are_of_the_original_data():
    # Not sticky: what was pruned comes back when its original grows, as it is kept.
    found = peer(DATA, sparsity_level=0.5)
    state = prune(0.5).init(DATA)
    grown = {name: normal(*x.shape, seed=7) for name, x in DATA.items()}
    for step, data in enumerate((DATA, grown, DATA)):
        old, state = state, update(prune(0.5), state._replace(params=data), step)
        for name, x in data.items():
            # replaces the data and keeps the mask
            with pytest.warns(UserWarning, match="Replacing existing data"):
                found.add_data(name=name.replace(".", "_"), data=x.clone())
        found.step()
        assert_masks(state, found)
        assert sf.checkpoint.tree_equal(state.params, data)
        if step:
            assert (state.masks["emb"] & ~old.masks["emb"]).any()
    assert torch.equal(
        sf.effective(state)["emb"], found.get_data("emb", return_original=False)
    )
    assert torch.equal(state.params["emb"], found.get_data("emb", return_original=True))


class Halving(BaseDataScheduler):
    """Every level halves with each epoch, from the level that the data came with."""

    def get_schedule_param(self):
        return {
            name: base * 0.5**self.last_epoch for name, base in self.base_param.items()
        }


LEVELS = {"emb": 0.9, "table.left": 0.6}


def test_any_setting_is_a_schedule_by_name():
    found = DataNormSparsifier()
    for name, x in DATA.items():
        found.add_data(
            name=name.replace(".", "_"), data=x.clone(), sparsity_level=LEVELS[name]
        )
    scheduler = Halving(found, "sparsity_level")

    def halving(base):
        return lambda step: base * 0.5**step

    algorithm = sf.partition(
        [(name, prune(halving(level))) for name, level in LEVELS.items()]
    )
    state = algorithm.init(DATA)
    for step in range(4):
        state = update(algorithm, state, step)
        found.step()
        assert_masks(state, found)
        assert scheduler.get_last_param() == {
            name.replace(".", "_"): halving(level)(step)
            for name, level in LEVELS.items()
        }
        scheduler.step()


def test_settings_by_name_take_the_first_match():
    rows = prune(0.5, pattern=sf.patterns.channel(0))
    state = once(sf.partition([("table.*", rows), ("*", prune(0.25))]), DATA)
    assert (
        state.masks["table.left"].all(1).tolist()
        == state.masks["table.left"].any(1).tolist()
    )
    assert sf.masks.n_kept({"emb": state.masks["emb"]}) == 48 - 4 * 3


# ---- data that comes and goes --------------------------------------------------------

EXTRA = normal(2, 8, seed=3)


def test_adding_data_to_a_state():
    algorithm, state = prune(0.5), once(prune(0.5), DATA)
    fresh = algorithm.init({**state.params, "extra": EXTRA})
    larger = sf.checkpoint.load_state_dict(
        fresh, sf.checkpoint.state_dict(state), strict=False
    )
    assert larger.masks["extra"].all() and torch.equal(larger.params["extra"], EXTRA)
    for name in DATA:
        assert torch.equal(larger.masks[name], state.masks[name])
    assert sf.checkpoint.tree_equal(
        update(algorithm, larger, 1), once(algorithm, larger.params)
    )


def test_adding_data_keeps_what_was_learned_of_the_rest():
    algorithm = sf.with_optimizer(
        sf.gmp(0.5, score=sf.scores.ema(sf.scores.magnitude, 0.9), where="*"),
        sf.optimizers.adam(0.1),
    )
    state = algorithm.init(DATA)
    for step in range(3):
        state = algorithm.update(state, DATA, step)
    fresh = algorithm.init({**state.params, "extra": EXTRA})
    larger = sf.checkpoint.load_state_dict(
        fresh, sf.checkpoint.state_dict(state), strict=False
    )
    for step in range(3, 5):
        state = algorithm.update(state, DATA, step)
        larger = algorithm.update(larger, {**DATA, "extra": EXTRA}, step)
    without = algorithm.init(DATA)
    without = sf.checkpoint.load_state_dict(
        without, sf.checkpoint.state_dict(larger), strict=False
    )
    assert sf.checkpoint.tree_equal(without, state)  # and taking data away again
    assert int(larger.masks["extra"].sum()) == 8


def test_replacing_data_with_its_mask_or_a_new_one():
    state, new = once(prune(0.5), DATA), normal(6, 8, seed=9)
    again = state._replace(params={**state.params, "emb": new})
    assert torch.equal(
        sf.effective(again)["emb"], torch.where(state.masks["emb"], new, 0.0)
    )
    over = again._replace(
        masks={**again.masks, "emb": torch.ones_like(new, dtype=torch.bool)}
    )
    assert torch.equal(sf.effective(over)["emb"], new)
    with pytest.raises(
        ValueError,
        match=re.escape("expected a mask of shape (3, 8) or () at 'emb', got (6, 8)"),
    ):
        sf.effective(state._replace(params={**state.params, "emb": new[:3]}))


def test_squashing_gives_new_tensors():
    state = once(prune(0.5), DATA)
    baked, bare = sf.effective(state), state.params  # leave_parametrized=True and False
    assert torch.equal(bare["emb"], normal(6, 8)) and torch.equal(
        DATA["emb"], normal(6, 8)
    )
    assert (baked["emb"] == 0).sum() == 24
    # names=["emb"]
    some = {name: baked[name] if name == "emb" else bare[name] for name in bare}
    assert torch.equal(some["table.left"], DATA["table.left"])


# ---- recipes -------------------------------------------------------------------------


def test_the_recipe_at_the_end_of_a_fit():
    model = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 4))
    state = once(prune(0.5, where="*.weight"), sf.modules.params_of(model))
    assert sf.report.summary(state).sparsified.sparsity == 0.5
    baked = sf.modules.bake(model, state)
    assert (baked[1].weight == 0).sum() == 16 and not (model[1].weight == 0).any()


def test_the_recipe_of_every_epoch():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = normal(32, 8, seed=4)
    y = x[:, :1] * 2 - x[:, 1:2]

    def loss(params):
        return (sf.modules.call(model, params, x) - y).square().mean()

    epochs, steps = 4, 10
    levels = sf.schedules.linear(0.2, 0.2)
    algorithm = sf.with_optimizer(
        sf.gmp(
            lambda step: levels(step // steps),
            init="dense",
            when=sf.every(steps, start=steps - 1),
        ),
        sf.optimizers.sgd(0.05),
    )
    state = algorithm.init(sf.modules.params_of(model))
    seen, losses = [], [float(loss(state.params))]
    for step in range(epochs * steps):
        state = algorithm.update(
            state, torch.func.grad(loss)(sf.effective(state)), step
        )
        if step % steps == steps - 1:
            seen.append(sf.report.summary(state).sparsified.sparsity)
            losses.append(float(loss(sf.effective(state))))
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8], abs=0.01)
    assert losses[1] < losses[0]


# ---- sparsify and quantize -----------------------------------------------------------


def per_row(w):
    """int8 rows and their scales: symmetric, so that 0 is 0."""
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (w / scale).round().to(torch.int8), scale


def test_sparsify_then_quantize_keeps_the_zeros():
    state = once(prune(0.5), DATA)
    for name, w in sf.effective(state).items():
        q, scale = per_row(w)
        assert not q[~state.masks[name]].any()
        assert torch.allclose(q * scale, w, atol=float(scale.max()) / 2)
        # The same in torch's own words, for floats that know only 255 values a row.
        points = torch.zeros(len(w), dtype=torch.int32)
        fake = torch.fake_quantize_per_channel_affine(
            w.float(), scale.flatten().float(), points, 0, -127, 127
        )
        assert (
            torch.allclose(fake.double(), q * scale, atol=1e-5)
            and not fake[~state.masks[name]].any()
        )


def test_quantize_then_sparsify_keeps_the_zeros():
    quantized = {name: per_row(w) for name, w in DATA.items()}
    state = once(
        prune(0.5), {name: q * scale for name, (q, scale) in quantized.items()}
    )
    for name, (q, scale) in quantized.items():
        sparse = torch.where(state.masks[name], q, 0)
        assert sparse.dtype == torch.int8 and torch.equal(
            sparse * scale, sf.effective(state)[name]
        )
        assert (sparse == 0).sum() >= q.numel() // 2


def test_the_original_loses_the_zeros():
    # It quantizes with float zero points, of which 0.0 is in general no multiple.
    model = nn.ModuleDict({"emb": nn.Embedding(6, 8, _weight=DATA["emb"].float())})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        post_training_sparse_quantize(model, DataNormSparsifier, sparsity_level=0.5)
        back = model["emb"].weight().dequantize()
    mask = once(prune(0.5), {"emb": DATA["emb"].float()}).masks["emb"]
    assert torch.allclose(back, torch.where(mask, DATA["emb"].float(), 0.0), atol=0.02)
    assert (back[~mask] != 0).any()
