"""Pruning block after block, and the ratios of outliers."""

import collections
import importlib.util
import inspect

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn._engine.transforms import Onlooker

in_order, outlier_ratios = sf.calibration.in_order, sf.calibration.outlier_ratios


def net():
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)
    )


def prune(stats):
    return sf.one_shot(0.5, sf.scores.wanda(stats), pattern=sf.patterns.row_balanced())


def test_the_inputs_of_a_block_come_from_the_pruned_blocks_before_it():
    model, x = net(), torch.randn(32, 4)
    seen = {}

    def noted(stats):
        seen.update(stats)
        return prune(stats)

    state = in_order(model, None, ["0.*", "2.*", "4.*"], noted, x)
    pruned = sf.modules.bake(model, state)
    for place in (0, 2, 4):
        x_in = pruned[:place](x).detach().double()
        assert torch.allclose(
            seen[f"{place}.weight"]["square"], x_in.square().sum(0), rtol=1e-5
        )
    assert all(
        state.masks[f"{i}.weight"]
        .sum(1)
        .eq(state.masks[f"{i}.weight"].shape[1] // 2)
        .all()
        for i in (0, 2, 4)
    )
    assert all(state.masks[f"{i}.bias"].ndim == 0 for i in (0, 2, 4))
    dense = sf.calibration.inputs(model, None, x, paths="4.*")
    assert not torch.allclose(
        dense["4.weight"]["square"], seen["4.weight"]["square"], rtol=0.01
    )


def test_one_block_of_everything_is_the_algorithm_itself():
    model, x = net(), torch.randn(32, 4)
    state = in_order(model, None, [lambda path, leaf: True], prune, x)
    algorithm = prune(sf.calibration.inputs(model, None, x))
    start = algorithm.init(sf.modules.params_of(model))
    assert sf.checkpoint.tree_equal(
        state.masks, algorithm.update(start, start.params, 0).masks
    )


def test_it_goes_on_from_a_state_and_leaves_the_rest_as_it_is():
    model, x = net(), torch.randn(32, 4)
    rule = sf.static(0.75, where="0.weight", key=sf.random.key(1))
    start = rule.init(sf.modules.params_of(model))
    state = in_order(model, start, [["2.weight"]], prune, x, of="square")
    assert torch.equal(
        state.masks["0.weight"], start.masks["0.weight"]
    ) and torch.equal(state.key, start.key)
    assert all(
        torch.equal(state.params[p], start.params[p])
        for p in start.params
        if p != "2.weight"
    )
    assert start.masks["2.weight"].ndim == 0 and state.masks["2.weight"].sum() == 24


@pytest.mark.parametrize("size", [1, 5, 32])
def test_in_chunks_the_masks_are_the_same(size):
    model, x = net(), torch.randn(32, 4)
    whole = in_order(model, None, ["0.*", "2.*"], prune, x)
    assert sf.checkpoint.tree_equal(
        in_order(model, None, ["0.*", "2.*"], prune, x, chunk_size=size), whole
    )


def test_a_block_that_gets_no_data_and_other_bad_arguments():
    model, x = net(), torch.randn(32, 4)
    model.forward = lambda x: model[2](torch.relu(model[0](x)))
    with pytest.raises(
        ValueError,
        match=r"wanda: no data for the leaf '4\.weight': no input .* reached it: give "
        r"more",
    ):
        in_order(model, None, ["4.*"], prune, x)
    with pytest.raises(
        ValueError, match=r"no product was seen with a leaf of the block '0\.bias'"
    ):
        in_order(model, None, ["0.bias"], prune, x)
    with pytest.raises(ValueError, match="blocks"):
        in_order(model, None, ["9.*"], prune, x)
    with pytest.raises(
        TypeError,
        match=r"expected prune to be a function of \(stats\), got one_shot\(0.5\)",
    ):
        in_order(net(), None, ["0.*"], sf.one_shot(0.5), torch.randn(32, 4))
    with pytest.raises(
        TypeError, match="expected prune to give an Algorithm, got dict"
    ):
        in_order(model, None, ["0.*"], lambda stats: stats, x)
    with pytest.raises(ValueError, match="in_order: expected chunk_size >= 1, got 0"):
        in_order(model, None, ["0.*"], prune, x, chunk_size=0)
    with pytest.raises(
        ValueError, match=r"one number of examples to split, got shapes \(32, 4\), \(\)"
    ):
        in_order(model, None, ["0.*"], prune, (x, torch.tensor(1.0)), chunk_size=2)
    with pytest.raises(
        ValueError,
        match="expected more than one calibration input at '0.weight', got 1",
    ):
        in_order(model, None, ["0.*"], prune, x[:1])


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            {"blocks": "0.*"},
            TypeError,
            r"expected blocks to be a sequence, with an entry a block, got '0\.\*'",
        ),
        (
            {"blocks": lambda path, leaf: True},
            TypeError,
            "expected blocks to be a sequence",
        ),
        (
            {"inputs": [torch.randn(32, 4)]},
            TypeError,
            "a tuple of arguments or a dict of keyword arguments, got list",
        ),
        (
            {"inputs_from": "sparse"},
            ValueError,
            "expected inputs_from to be 'pruned' or 'dense', got 'sparse'",
        ),
        (
            {"offload": "gpu"},
            ValueError,
            "expected offload to be 'disk' or None, got 'gpu'",
        ),
        ({"of": "mean"}, ValueError, "expected of to name some of"),
        ({"of_all": "square"}, TypeError, "unexpected keyword argument 'of_all'"),
        (
            {"tokens": torch.ones(32)},
            TypeError,
            r"expected tokens to be a bool tensor, .*float32 of shape \(32,\)",
        ),
        (
            {"tokens": [True]},
            TypeError,
            "expected tokens to be a bool tensor, True for each token that counts, "
            "got list",
        ),
        (
            {"tokens": torch.ones(9, dtype=torch.bool)},
            ValueError,
            "an input of '0.weight' for all 9 tokens, got 32",
        ),
        (
            {"blocks": ["2.*", "0.*"]},
            ValueError,
            r"'0\.weight' is used before '2\.weight'; to prune in several rounds",
        ),
    ],
)
def test_bad_arguments_say_what_was_expected(change, kind, text):
    arguments = {
        "module": net(),
        "state": None,
        "blocks": ["0.*"],
        "prune": prune,
        "inputs": torch.randn(32, 4),
    }
    for call in (in_order, lambda **given: list(sf.calibration.by_block(**given))):
        with pytest.raises(kind, match=text):
            call(**arguments | change)


def test_bad_arguments_are_told_before_the_loop():
    with pytest.raises(TypeError, match="expected blocks to be a sequence"):
        sf.calibration.by_block(net(), None, "0.*", prune, torch.randn(32, 4))


def test_the_module_gets_its_inputs_as_one_argument_in_any_form():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = net()

        def forward(self, x, of=1.0):
            return self.layers(x * of)

    model, x, two = Net(), torch.randn(32, 4), torch.full((32, 1), 2.0)
    states = [
        in_order(
            model,
            None,
            ["layers.0.*", "layers.2.*"],
            prune,
            inputs,
            of="square",
            chunk_size=8,
        )
        for inputs in ((x, two), {"x": x, "of": two}, x * 2, {"of": 2.0, "x": x})
    ]
    assert all(sf.checkpoint.tree_equal(state, states[0]) for state in states[1:])


def test_padding_is_refused_unless_tokens_say_what_counts():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(9, 4), net()

        def forward(self, ids, attention_mask=None):
            return self.layers(self.embed(ids) * 1.0)

    model, ids = Words(), torch.arange(12).reshape(2, 6) % 9
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    inputs, blocks = {"ids": ids, "attention_mask": mask}, ["layers.0.*", "layers.2.*"]
    for padded in (inputs, (ids, mask)):
        with pytest.raises(
            ValueError,
            match=r"'attention_mask' hides 3 of 12 tokens as padding: "
            r".*=attention_mask",
        ):
            in_order(model, None, blocks, prune, padded)
    with pytest.raises(ValueError, match=r"^inputs: .*'attention_mask' hides 3 of 12"):
        sf.calibration.inputs(model, None, **inputs)
    with pytest.raises(
        ValueError,
        match=r"in_order: expected tokens of shape \(2, 6\), as the call .*, got \(6, "
        r"2\)",
    ):
        in_order(model, None, blocks, prune, inputs, tokens=mask.bool().T)
    # who sees whom, and what is added
    for other in (torch.ones(6, 6).tril(), (mask - 1) * 9.0):
        in_order(
            model,
            None,
            blocks,
            prune,
            {"ids": ids, "attention_mask": other},
            of="square",
        )
    state = in_order(
        model,
        None,
        blocks,
        prune,
        inputs,
        tokens=mask.bool(),
        chunk_size=1,
        of="square",
    )
    flat = ids[mask.bool()][None]
    assert sf.checkpoint.tree_equal(
        state, in_order(model, None, blocks, prune, {"ids": flat}, of="square")
    )
    whole = in_order(
        model,
        None,
        blocks,
        prune,
        {"ids": ids, "attention_mask": torch.ones(2, 6)},
        of="square",
    )
    assert not sf.checkpoint.tree_equal(whole, state)
    model.config = type("Config", (), {"is_encoder_decoder": True})()
    with pytest.raises(
        ValueError, match="expected a model of one sequence with tokens"
    ):
        in_order(model, None, blocks, prune, inputs, tokens=mask.bool())
    with pytest.raises(
        ValueError,
        match="hides 3 of 12 tokens as padding: give examples of one length in one "
        "call",
    ):
        in_order(model, None, blocks, prune, inputs)


class Polite(nn.Module):
    """A model that makes new tensors, and adds to an object that it is handed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x, cache=None):
        x = x * 3
        for layer in self.layers:
            if cache is not None:
                cache.append(x.mean(0, keepdim=True))
                x = x + sum(cache)
            x = layer(x) + 1
        return x


class Impolite(Polite):
    """One that writes into its argument."""

    def forward(self, x, cache=None):
        return super().forward(x.mul_(3).clone().div_(3), cache)


class Cache(collections.deque):
    """No tree: an object."""


@pytest.mark.parametrize("chunk_size", [None, 8])
@pytest.mark.parametrize("order", [["0", "1", "2"], ["0", "2"]])
def test_what_a_model_writes_into_stays(chunk_size, order):
    polite, impolite, x = Polite(), Impolite(), torch.randint(-9, 9, (32, 4)).float()
    impolite.load_state_dict(polite.state_dict())
    before, blocks, options = (
        x.clone(),
        [f"layers.{i}.*" for i in order],
        {"of": "square", "chunk_size": chunk_size},
    )
    state = in_order(polite, None, blocks, prune, x, **options)
    assert sf.checkpoint.tree_equal(
        in_order(impolite, None, blocks, prune, x, **options), state
    )
    stats = [
        sf.calibration.inputs(impolite, None, x)["layers.0.weight"]["gram"]
        for _ in range(2)
    ]
    assert torch.equal(*stats) and torch.equal(x, before)


def test_an_object_that_a_model_is_handed_stays():
    model, x, cache = Polite(), torch.randn(32, 4), Cache([torch.ones(1, 4)])
    blocks, states = [f"layers.{i}.*" for i in range(3)], []
    for _ in range(2):
        states.append(
            in_order(model, None, blocks, prune, {"x": x, "cache": cache}, of="square")
        )
        sf.calibration.inputs(model, None, x, cache=cache)
    assert len(cache) == 1 and sf.checkpoint.tree_equal(*states)


def test_an_algorithm_that_prunes_nothing_at_step_0_is_told():
    cubic = sf.schedules.polynomial(0.0, 0.5, begin=0, end=100)
    for algorithm in (
        sf.gmp(cubic, when=sf.always()),
        sf.one_shot(0.5, when=sf.at([5])),
    ):
        with pytest.warns(
            UserWarning,
            match=r"nothing was pruned of '0.weight': the algorithm runs once, at step "
            r"0",
        ):
            in_order(net(), None, ["0.*"], lambda stats: algorithm, torch.randn(8, 4))  # noqa: B023
    in_order(net(), None, ["0.*"], lambda stats: sf.dense(), torch.randn(8, 4))


def test_a_bar_is_shown_where_tqdm_is_installed_and_asked_for(capsys, monkeypatch):
    model, x = net(), torch.randn(32, 4)
    state = in_order(model, None, ["0.*", "2.*"], prune, x, progress=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "error=0." in shown
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert sf.checkpoint.tree_equal(
        in_order(model, None, ["0.*", "2.*"], prune, x, progress=True), state
    )
    assert sf.checkpoint.tree_equal(
        in_order(model, None, ["0.*", "2.*"], prune, x), state
    )
    assert not capsys.readouterr().err


def test_both_functions_have_one_signature_but_for_the_bar():
    one, other = (
        inspect.signature(f).parameters for f in (in_order, sf.calibration.by_block)
    )
    assert [*one][:-1] == [*other] and all(one[name] == other[name] for name in other)


def test_no_block_changes_nothing():
    model = net()
    state = in_order(model, None, [], prune, torch.randn(32, 4))
    assert sf.checkpoint.tree_equal(state.params, sf.modules.params_of(model))


def test_outliers_are_counted_over_a_block():
    state = sf.dense().init(
        {
            "0.a": torch.ones(1, 3),
            "0.b": torch.tensor([[9.0]]),
            "1.a": -torch.ones(2, 3),
        }
    )
    stats = {
        path: {
            "count": torch.tensor(4),
            "square": torch.tensor([4.0]).expand(x.shape[1]),
        }
        for path, x in state.params.items()
    }
    assert outlier_ratios(state, stats, ["0.*", "1.*"], multiple=2.0) == {
        "0.*": 0.25,
        "1.*": 0.0,
    }
    assert outlier_ratios(state, stats, ["0.*"], multiple=4.0) == {"0.*": 0.0}
    with pytest.raises(
        ValueError,
        match=r"expected statistics of a leaf of the block '1\.\*', got none",
    ):
        outlier_ratios(state, {"0.a": stats["0.a"]}, ["1.*"])
    with pytest.raises(ValueError, match="no data for the leaf '0.a'"):
        outlier_ratios(
            state,
            {"0.a": {"count": torch.tensor(0), "square": torch.zeros(())}},
            ["0.*"],
        )


class Reads(Onlooker):
    """How often Python asks for a number in a tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def reads(prune, of, blocks, layers, windows):
    parts = [
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]) for _ in range(blocks)
    ]
    names = [f"{i}.*" for i in range(blocks)]
    inputs = torch.randn(windows, 16, 8)
    with Reads() as found:
        for _ in sf.calibration.by_block(
            nn.Sequential(*parts), None, names, prune, inputs, of=of, chunk_size=1
        ):
            pass
    return found.count


def test_a_block_reads_one_number_whatever_it_has():
    # and twice some flags, all at once
    def wanda(stats):
        return sf.methods.wanda(0.5, stats)

    assert reads(wanda, "square", 1, 2, 2) == reads(wanda, "square", 1, 5, 7) == 1
    assert reads(wanda, "square", 3, 2, 2) == 3


def test_sparsegpt_reads_a_few_numbers_of_a_layer():
    def sparsegpt(stats):
        return sf.methods.sparsegpt(0.5, stats)

    # whether values are finite, inputs dead, all and any, and a factor exists
    assert reads(sparsegpt, "gram", 1, 3, 2) == 1 + 4 * 3
