"""Configs of plain data: the whole grammar, and a sentence for whatever is outside of
it.
"""

import json

import pytest
import torch

import sparsefn as sf
from sparsefn.config import configs

KEY = sf.random.key(3)
W = torch.linspace(-1.0, 1.0, 96).reshape(8, 12).roll(5)


def same(a: sf.Algorithm, b: sf.Algorithm, steps=range(1, 7), params=None) -> None:
    """Both algorithms go through the same states."""
    params = {"w": W, "b": W[0]} if params is None else params
    left, right = a.init(params), b.init(params)
    assert sf.checkpoint.tree_equal(left, right)
    for step in steps:
        grads = {
            path: torch.cos((step + 1) * torch.arange(p.numel()).reshape(p.shape))
            for path, p in params.items()
        }
        left, right = a.update(left, grads, step), b.update(right, grads, step)
        assert sf.checkpoint.tree_equal(left, right)


def kept(config, params=None):
    masks = (
        sf.config.from_config(config).init({"w": W} if params is None else params).masks
    )
    return {path: int(mask.sum()) for path, mask in masks.items() if mask.ndim}


# ---- algorithms ----------------------------------------------------------------------


def mine(sparsity, *, decay=0.9, drop_fraction=0.3, **options):
    grow = sf.scores.momentum(decay)
    return sf.snfs(sparsity, grow=grow, drop_fraction=drop_fraction, **options)


def test_an_algorithm_of_ones_own_has_its_name_and_its_keys():
    config = {
        "algorithm": "Mine",
        "sparsity": 0.75,
        "decay": 0.5,
        "update": {"freq": 2},
        "drop_fraction": [0.5, 0.1],
    }
    when = sf.every(2)
    fraction = sf.schedules.cycling([0.5, 0.1], when)
    ours = sf.config.from_config(config, key=KEY, algorithms={"mine": mine})
    same(
        ours,
        sf.snfs(
            0.75,
            grow=sf.scores.momentum(0.5),
            drop_fraction=fraction,
            when=when,
            key=KEY,
            init="random",
        ),
    )
    message = (
        "config: expected an entry of algorithm 'mine' to have keys among "
        "'algorithm', 'sparsity', 'init_method', 'update', 'decay', 'drop_fraction', "
        "'param_filter', got 'rate'"
    )
    with pytest.raises(ValueError) as raised:
        sf.config.from_config(
            {"algorithm": "mine", "sparsity": 0.5, "rate": 1}, algorithms={"mine": mine}
        )
    assert str(raised.value) == message
    with pytest.raises(
        ValueError, match="'static', 'gmp', 'set', 'rigl', 'mine', got 'yours'"
    ):
        sf.config.from_config(
            {"algorithm": "yours", "sparsity": 0.5}, algorithms={"mine": mine}
        )


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (sf.set, {"by_sign": True}, {"drop": sf.scores.ranked(sf.scores.magnitude)}),
        (sf.snfs, {"decay": 0.5}, {"grow": sf.scores.momentum(0.5)}),
    ],
)
def test_keys_of_the_last_release_warn_and_do_what_they_did(make, old, new):
    config = {"algorithm": "mine", "sparsity": 0.5, **old}
    with pytest.warns(DeprecationWarning, match=rf"{make.__name__}\({min(old)}=\)"):
        ours = sf.config.from_config(config, key=KEY, algorithms={"mine": make})
    same(ours, make(0.5, key=KEY, **new))


@pytest.mark.parametrize(
    ("config", "sparsity"),
    [
        (0.75, 0.75),
        (0, 0.0),
        (1, 1.0),
        ({"sparsity": 0.75}, 0.75),
        ({"schedule": 0.5}, 0.5),
    ],
)
def test_a_number_is_a_random_static_mask(config, sparsity):
    same(sf.config.from_config(config, key=KEY), sf.static(sparsity, key=KEY))
    assert kept(config) == {"w": sf.budgets.n_kept(96, sparsity)}


@pytest.mark.parametrize("name", ["rigl", "RigL", "RIGL"])
@pytest.mark.parametrize("word", ["algorithm", "type"])
def test_rigl(name, word):
    config = {
        word: name,
        "sparsity": 0.75,
        "init_method": "topk",
        "drop_fraction": {"type": "Cosine", "init": 0.3, "half_period": 10},
        "update": {"freq": 2, "stop": 6},
    }
    expected = sf.rigl(
        0.75,
        init="magnitude",
        drop_fraction=sf.schedules.cosine(0.3, 10),
        when=sf.every(2, stop=6),
        key=KEY,
    )
    same(sf.config.from_config(config, key=KEY), expected)


def test_set():
    config = {"algorithm": "SET", "sparsity": 0.75, "drop_fraction": 0.2}
    same(
        sf.config.from_config(config, key=KEY),
        sf.set(0.75, drop_fraction=0.2, init="random", key=KEY),
    )
    same(sf.config.from_config({"algorithm": "set", "sparsity": 0.75}), sf.set(0.75))


def test_gmp():
    config = {
        "algorithm": "gmp",
        "schedule": {"type": "linear", "init": 0, "slope": 0.1},
        "update": {"steps": [0, 4]},
    }
    expected = sf.gmp(
        sf.schedules.linear(0.0, 0.1), when=sf.at([0, 4]), init="random", key=KEY
    )
    same(sf.config.from_config(config, key=KEY), expected)


COSINE = sf.schedules.cosine(init=0.3, half_period=50)


@pytest.mark.parametrize(
    ("config", "made"),
    [
        (0.75, sf.static(0.75)),
        ({"sparsity": 1, "init_method": "topk"}, sf.static(1.0, init="magnitude")),
        ({"sparsity": 0.5, "param_filter": "w"}, sf.static(0.5, where="w")),
        ({"algorithm": "rigl", "sparsity": 0.75}, sf.rigl(0.75)),
        ({"algorithm": "set", "sparsity": 0.75}, sf.set(0.75)),
        (
            {"algorithm": "set", "sparsity": 0.75, "update": None},
            sf.set(0.75, when=sf.always()),
        ),
        (
            {"algorithm": "set", "sparsity": 0.75, "drop_fraction": 0.1},
            sf.set(0.75, drop_fraction=0.1),
        ),
        (
            {"algorithm": "rigl", "sparsity": 0.75, "update": {"freq": 9, "stop": 99}},
            sf.rigl(0.75, when=sf.every(9, 0, 99)),
        ),
        (
            {"algorithm": "rigl", "sparsity": 0.75, "update": {"freq": 9, "start": 9}},
            sf.rigl(0.75, when=sf.every(9, 9), init="dense"),
        ),
        (
            {
                "algorithm": "rigl",
                "sparsity": 0.75,
                "drop_fraction": {"type": "cosine", "init": 0.3, "half_period": 50},
                "balance_in_groups": 3,
            },
            sf.rigl(
                0.75, drop_fraction=COSINE, pattern=sf.patterns.in_groups(groups=3)
            ),
        ),
        (
            {
                "algorithm": "gmp",
                "sparsity": {"type": "linear", "init": 0.0, "slope": 0.1},
            },
            sf.gmp(sf.schedules.linear(init=0.0, slope=0.1)),
        ),
        (
            [{"param_filter": "w", "sparsity": 0.5}],
            sf.static(0.5, where="w"),
        ),
    ],
)
def test_a_config_says_no_more_than_a_call_by_hand(config, made):
    """What an entry does not say has the default of the function."""
    assert repr(sf.config.from_config(config)) == repr(made)
    state = sf.config.from_config(config, key=KEY).init({"w": W})
    assert torch.equal(state.key, KEY)


@pytest.mark.parametrize("name", sorted(configs._ALGORITHMS))
def test_a_key_is_the_only_other_argument(name):
    config = {
        "algorithm": name,
        "sparsity": {"type": "linear", "init": 0, "slope": 0.1}
        if name == "gmp"
        else 0.5,
    }
    call = sf.config.from_config(config, key=KEY).made_by
    assert call.make.__name__ == name and list(call.kwargs) == ["key"]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("balance_in_groups", sf.patterns.in_groups(3)),
        ("balance_out_groups", sf.patterns.out_groups(2)),
    ],
)
def test_balance_groups(name, pattern):
    other = ({"balance_in_groups", "balance_out_groups"} - {name}).pop()
    groups = 3 if "in" in name.split("_") else 2
    config = {
        "algorithm": "rigl",
        "sparsity": 0.75,
        "init_method": "topk",
        name: groups,
        other: None,
    }
    same(
        sf.config.from_config(config), sf.rigl(0.75, init="magnitude", pattern=pattern)
    )
    state = sf.config.from_config(config).init({"w": W})
    rows = state.masks["w"].unflatten(1 if groups == 3 else 0, (groups, -1))
    assert (
        rows.sum((0, 2) if groups == 3 else (1, 2)).tolist() == [24 // groups] * groups
    )


def test_training_starts_dense_where_step_0_is_no_update():
    config = {
        "algorithm": "rigl",
        "sparsity": 0.75,
        "init_method": "topk",
        "update": {"freq": 1, "start": 2},
    }
    same(
        sf.config.from_config(config),
        sf.rigl(0.75, init="dense", when=sf.every(1, start=2)),
    )
    config["update"] = {"freq": 1}
    assert kept(config) == {"w": 24}


@pytest.mark.parametrize(
    ("name", "ours"),
    [("random", "random"), ("topk", "magnitude"), ("checkerboard", "checkerboard")],
)
def test_init_methods(name, ours):
    same(
        sf.config.from_config({"sparsity": 0.75, "init_method": name}),
        sf.static(0.75, init=ours),
    )


def test_from_zeros_ignores_the_level():
    params = {"w": torch.tensor([[0.0, 1.0, 2.0]])}
    assert kept({"sparsity": 0.9, "init_method": "from_zeros"}, params) == {"w": 2}


def test_an_init_method_of_ones_own_sees_a_leaf_and_the_sparsity():
    def top(leaf, sparsity):
        return sf.masks.topk_mask(leaf, sf.budgets.n_kept(leaf.numel(), sparsity))

    params = {"w": W, "b": W[0], "head": W[:2]}
    algorithm = sf.config.from_config(
        [
            {"sparsity": 0.5, "param_filter": "head"},
            {"sparsity": 0.75, "init_method": top},
        ]
    )
    masks = algorithm.init(params).masks
    assert torch.equal(masks["w"], sf.masks.topk_mask(W, 24))
    assert masks["b"].ndim == 0
    assert int(masks["head"].sum()) == 12


def test_data_from_json():
    text = (
        '{"sparsity": [0, 0.5, 1], "algorithm": "gmp", "init_method": "topk", '
        '"update": {"freq": 2, "stop": null}}'
    )
    expected = sf.gmp(
        sf.schedules.cycling([0.0, 0.5, 1.0], sf.every(2)),
        when=sf.every(2),
        init="magnitude",
    )
    same(sf.config.from_config(json.loads(text)), expected)


def test_an_example_of_the_trainer():
    config = {
        "sparsity": 0.75,
        "init_method": "random",
        "algorithm": "rigl",
        "drop_fraction": {"type": "cosine", "init": 0.3, "half_period": 3584},
        "update": {"freq": 100, "stop": 3584},
        "param_filter": ["*proj_[qkv]_dense_layer.weight", "*linear_layer.weight"],
    }
    names = [
        "attn.proj_q_dense_layer",
        "attn.proj_output_dense_layer",
        "ffn.linear_layer",
    ]
    params = {
        f"{name}.{kind}": W if kind == "weight" else W[0]
        for name in names
        for kind in ("weight", "bias")
    }
    assert kept(config, params) == {
        "attn.proj_q_dense_layer.weight": 24,
        "ffn.linear_layer.weight": 24,
    }


def test_the_key_sets_the_draws():
    a, b = (
        sf.config.from_config(0.5, key=sf.random.key(i)).init({"w": W}).masks["w"]
        for i in (0, 1)
    )
    assert not torch.equal(a, b)
    assert torch.equal(a, sf.config.from_config(0.5).init({"w": W}).masks["w"])


def test_nothing_of_the_config_is_changed():
    config = {
        "groups": [
            {"type": "rigl", "params": {"schedule": [0.5, 0.6]}, "update": {"freq": 2}}
        ]
    }
    before = json.dumps(config)
    sf.config.from_config(config)
    assert json.dumps(config) == before


# ---- which leaves --------------------------------------------------------------------

TWO = {
    "fc1.weight": W,
    "fc1.bias": W[0],
    "fc2.weight": W,
    "fc2.bias": W[0],
    "norm.weight": W,
}


def test_without_a_filter_the_default_decides():
    assert kept(0.75, TWO) == {"fc1.weight": 24, "fc2.weight": 24}
    assert kept({"sparsity": 0.75, "param_filter": None}, TWO) == {
        "fc1.weight": 24,
        "fc2.weight": 24,
    }


def test_a_filter_takes_leaves_of_any_rank():
    assert kept({"sparsity": 0.75, "param_filter": "fc1.*"}, TWO) == {
        "fc1.weight": 24,
        "fc1.bias": 3,
    }
    assert kept({"sparsity": 0.75, "param_filter": ["*.bias", "norm.*"]}, TWO) == {
        "fc1.bias": 3,
        "fc2.bias": 3,
        "norm.weight": 24,
    }


def test_in_a_list_the_first_match_wins():
    config = [
        {"sparsity": 0.5, "param_filter": "fc1.weight"},
        {"sparsity": 0.75, "param_filter": "*.weight"},
    ]
    assert kept(config, TWO) == {"fc1.weight": 48, "fc2.weight": 24, "norm.weight": 24}
    assert kept([{"sparsity": 0.5, "param_filter": "fc1.weight"}, 0.75], TWO) == {
        "fc1.weight": 48,
        "fc2.weight": 24,
    }


def test_lists_in_a_list_are_laid_end_to_end():
    inner = [
        {"sparsity": 0.5, "param_filter": "fc1.weight"},
        {"sparsity": 0.25, "param_filter": "fc2.bias"},
    ]
    same(
        sf.config.from_config([inner, 0.75]),
        sf.config.from_config([*inner, 0.75]),
        params=TWO,
    )
    same(sf.config.from_config([[0.75]]), sf.config.from_config(0.75))


def test_an_entry_that_is_left_no_leaf_warns():
    with pytest.warns(UserWarning, match="no leaf is sparsified"):
        masks = (
            sf.config.from_config([{"sparsity": 0.5, "param_filter": "*"}, 0.75])
            .init({"w": W})
            .masks
        )
    assert int(masks["w"].sum()) == 48


def test_draws_are_the_same_inside_a_list():
    alone = sf.config.from_config(0.75, key=KEY).init(TWO).masks
    config = [{"sparsity": 0.75, "param_filter": "fc1.weight"}, 0.75]
    assert sf.checkpoint.tree_equal(
        sf.config.from_config(config, key=KEY).init(TWO).masks, alone
    )


def test_groups_and_params():
    groups = [
        {
            "algorithm": "static",
            "params": {"sparsity": 0.5, "param_filter": "fc1.weight"},
        },
        {"sparsity": 0.75},
    ]
    expected = {"fc1.weight": 48, "fc2.weight": 24}
    assert kept({"groups": groups}, TWO) == expected
    assert kept({"groups": groups, "add_summaries": True}, TWO) == expected
    assert kept({"groups": {"sparsity": 0.5, "params": {"sparsity": 0.75}}}, TWO) == {
        "fc1.weight": 24,
        "fc2.weight": 24,
    }


@pytest.mark.parametrize(
    "config",
    [{"sparsity": None}, {"schedule": None, "algorithm": "rigl"}, [{"sparsity": None}]],
)
def test_without_a_sparsity_nothing_is_sparsified(config):
    assert kept(config) == {}


def test_an_entry_without_a_sparsity_is_left_out():
    assert kept([{"sparsity": None, "param_filter": "*"}, 0.75]) == {"w": 24}


def test_a_config_works_with_an_optimizer_and_under_vmap():
    algorithm = sf.config.from_config(
        [{"algorithm": "rigl", "sparsity": 0.75, "param_filter": "w"}, 0.5]
    )
    algorithm = sf.with_optimizer(algorithm, sf.optimizers.sgd(0.1, momentum=0.9))
    states = torch.func.vmap(algorithm.init)(
        {"w": torch.stack([W, -W]), "v": torch.stack([W, W + 1])}
    )
    grads = {"w": torch.stack([W.cos(), W.sin()]), "v": torch.stack([W, W])}
    states = torch.func.vmap(algorithm.update, in_dims=(0, 0, None))(states, grads, 1)
    assert states.masks["w"].sum((1, 2)).tolist() == [24, 24]
    assert states.masks["v"].sum((1, 2)).tolist() == [48, 48]


# ---- levels and triggers -------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.3, sf.schedules.constant(0.3)),
        (1, sf.schedules.constant(1.0)),
        ([0.1, 0, 1], sf.schedules.cycling([0.1, 0.0, 1.0], sf.every(3))),
        ((0.1, 0.2), sf.schedules.cycling([0.1, 0.2], sf.every(3))),
        ({"type": "constant", "value": 0.2}, sf.schedules.constant(0.2)),
        ({"type": "linear", "init": 0, "slope": 0.01}, sf.schedules.linear(0.0, 0.01)),
        (
            {"type": "Exp", "init": 0.1, "gamma": -0.1},
            sf.schedules.exponential(0.1, -0.1),
        ),
        (
            {"type": "exp", "init": 0.1, "gamma": -0.1, "final": 0.8},
            sf.schedules.exponential(0.1, -0.1, 0.8),
        ),
        ({"type": "POWER", "init": 0.9, "beta": 0.5}, sf.schedules.power(0.9, 0.5)),
        (
            {"type": "cosine", "init": 0.9, "half_period": 5},
            sf.schedules.cosine(0.9, 5),
        ),
        (
            {"type": "cosine", "init": 0.9, "half_period": 5, "minimum": 0.2},
            sf.schedules.cosine(0.9, 5, 0.2),
        ),
        (
            {"type": "cycling", "values": [0.1, 0.2]},
            sf.schedules.cycling([0.1, 0.2], sf.every(3)),
        ),
        (lambda step: 0.1 * step, lambda step: 0.1 * step),
    ],
)
def test_levels(value, expected):
    schedule = sf.config.level(value, when=sf.every(3))
    for step in (0, 1, 3, 7, 12, torch.tensor(12)):
        assert schedule(step) == expected(step)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, sf.always()),
        ({"freq": 3}, sf.every(3)),
        ({"freq": 3, "start": 2}, sf.every(3, start=2)),
        ({"freq": 3, "start": 2, "stop": 9}, sf.every(3, start=2, stop=9)),
        ({"freq": 3, "stop": None}, sf.every(3)),
        ({"steps": [5, 1, 5]}, sf.at([1, 5])),
        (sf.every(7), sf.every(7)),
    ],
)
def test_triggers(value, expected):
    assert sf.config.trigger(value) == expected


def test_a_drop_fraction_cycles_over_the_updates():
    config = {
        "algorithm": "rigl",
        "sparsity": 0.5,
        "drop_fraction": [0.5, 0],
        "update": {"freq": 2},
    }
    when = sf.every(2)
    same(
        sf.config.from_config(config),
        sf.rigl(0.5, drop_fraction=sf.schedules.cycling([0.5, 0.0], when), when=when),
    )


# ---- what is refused -----------------------------------------------------------------

NUMBER = (
    "expected a level to be a number, a list of numbers or a dict with a 'type', got "
)
TYPES = "'constant', 'linear', 'exp', 'power', 'cosine', 'cycling'"
NAMES = "'static', 'gmp', 'set', 'rigl'"
RIGL = {"algorithm": "rigl", "sparsity": 0.5}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config: expected a number, a dict or a list of them, got None"),
        (True, "config: expected a number, a dict or a list of them, got True"),
        ("rigl", "config: expected a number, a dict or a list of them, got 'rigl'"),
        (
            [0.5, None],
            "config[1]: expected a number, a dict or a list of them, got None",
        ),
        ([], "config: expected at least one entry, got none"),
        ({"groups": []}, "config.groups: expected at least one entry, got none"),
        (
            {"groups": [0.5, {"params": 3}]},
            "config.groups[1]: expected params to be a dict, got 3",
        ),
        (
            {},
            "config: expected an entry of algorithm 'static' to have the key "
            "'sparsity', got none",
        ),
        (
            {"algorithm": "rigl"},
            "config: expected an entry of algorithm 'rigl' to have the key "
            "'sparsity', got 'algorithm'",
        ),
        (
            {"sparsity": 0.5, "schedule": 0.5},
            "config: expected 'sparsity' or 'schedule', which mean the same, got both",
        ),
        (
            {"sparsity": 0.5, "algorithm": "gmp", "type": "gmp"},
            "config: expected 'algorithm' or 'type', which mean the same, got both",
        ),
        (
            {"algorithm": "prune", "sparsity": 0.5},
            f"config: expected algorithm to be one of {NAMES}, got 'prune'",
        ),
        (
            {"algorithm": "group", "sparsity": 0.5},
            f"config: expected algorithm to be one of {NAMES}, got 'group'",
        ),
        (
            {"algorithm": None, "sparsity": 0.5},
            f"config: expected algorithm to be one of {NAMES}, got None",
        ),
        (
            [0.5, {"type": "sets", "sparsity": None}],
            f"config[1]: expected algorithm to be one of {NAMES}, got 'sets'",
        ),
        (
            {"sparsity": 0.5, "params": {}},
            "config: expected an entry of algorithm 'static' to have keys among "
            "'algorithm', 'sparsity', 'init_method', 'param_filter', got 'params'",
        ),
        (
            {"algorithm": "gmp", "sparsity": [0, 1], "drop_fraction": 0.3},
            "config: expected an entry of algorithm 'gmp' to have keys among "
            "'algorithm', 'sparsity', 'init_method', 'update', 'param_filter', got "
            "'drop_fraction'",
        ),
        (
            {"algorithm": "SET", "sparsity": 0.5, "balance_in_groups": 2},
            "config: expected an entry of algorithm 'SET' to have keys among "
            "'algorithm', 'sparsity', 'init_method', 'update', 'drop_fraction', "
            "'param_filter', got 'balance_in_groups'",
        ),
        ({"sparsity": 1.5}, "config: expected a level in [0, 1], got 1.5"),
        (-1, "config: expected a level in [0, 1], got -1"),
        ({"sparsity": float("nan")}, "config: expected a level in [0, 1], got nan"),
        ({"sparsity": "0.5"}, f"config: {NUMBER}'0.5'"),
        ({"sparsity": True}, f"config: {NUMBER}True"),
        (RIGL | {"drop_fraction": None}, f"config: {NUMBER}None"),
        (RIGL | {"sparsity": [0.5, "x"]}, f"config: {NUMBER}'x'"),
        (RIGL | {"sparsity": []}, "config: expected at least one of values, got none"),
        (
            RIGL | {"sparsity": {"init": 0.5}},
            f"config: expected a level to have a 'type' among {TYPES}, got {{'init': "
            "0.5}",
        ),
        (
            RIGL | {"sparsity": {"type": "cubic"}},
            f"config: expected the type of a level to be one of {TYPES}, got 'cubic'",
        ),
        (
            RIGL | {"sparsity": {"type": 3}},
            f"config: expected the type of a level to be one of {TYPES}, got 3",
        ),
        (
            RIGL | {"sparsity": {"type": "Linear", "init": 0.5}},
            "config: expected a level of type 'Linear' to have the key 'slope', got "
            "'init'",
        ),
        (
            RIGL | {"sparsity": {"type": "power"}},
            "config: expected a level of type 'power' to have the key 'init', got none",
        ),
        (
            RIGL | {"sparsity": {"type": "linear", "init": 0.5, "slope": 0, "end": 9}},
            "config: expected a level of type 'linear' to have keys among 'init', "
            "'slope', got 'end'",
        ),
        (
            RIGL | {"sparsity": {"type": "cycling", "values": [0.5], "when": 1}},
            "config: expected a level of type 'cycling' to have keys among 'values', "
            "got 'when'",
        ),
        (
            RIGL | {"sparsity": {"type": "linear", "init": "a", "slope": 0}},
            "config: a level of type 'linear': expected init to be a number or a 0-d "
            "float tensor, got str",
        ),
        (
            RIGL | {"drop_fraction": {"type": "cosine", "init": 0.3, "half_period": 0}},
            "config: expected half_period > 0, got 0.0",
        ),
        (
            RIGL | {"drop_fraction": [0.1, 0.2]},
            "config: expected an update, which says when the drop_fraction moves on, "
            "got drop_fraction=[0.1, 0.2] alone",
        ),
        (
            {"algorithm": "gmp", "sparsity": {"type": "Cycling", "values": [0.5]}},
            "config: expected an update, which says when the sparsity moves on, got "
            "sparsity={'type': 'Cycling', 'values': [0.5]} alone",
        ),
        (
            {"sparsity": [0.1, 0.2]},
            "config: expected the sparsity of static to be a number, got [0.1, 0.2]",
        ),
        (
            {"sparsity": {"type": "constant", "value": 0.5}},
            "config: expected the sparsity of static to be a number, got {'type': "
            "'constant', 'value': 0.5}",
        ),
        (
            {"algorithm": "gmp", "sparsity": 0.5},
            "config: expected the sparsity of gmp to change, got 0.5; static is "
            "constant",
        ),
        (
            {"algorithm": "gmp", "sparsity": {"type": "Constant", "value": 0.5}},
            "config: expected the sparsity of gmp to change, got {'type': 'Constant', "
            "'value': 0.5}; static is constant",
        ),
        (
            {"sparsity": 0.5, "init_method": "TopK"},
            "config: expected init_method to be a function or one of 'random', "
            "'topk', 'from_zeros', 'checkerboard', got 'TopK'",
        ),
        (
            RIGL | {"update": {"start": 5}},
            "config: expected update to be null or to have the key 'freq' or 'steps', "
            "got {'start': 5}",
        ),
        (
            RIGL | {"update": 5},
            "config: expected update to be null or to have the key 'freq' or 'steps', "
            "got 5",
        ),
        (
            RIGL | {"update": {"freq": 5, "end": 9}},
            "config: expected update to have keys among 'freq', 'start', 'stop', got "
            "'end'",
        ),
        (
            RIGL | {"update": {"steps": [5], "freq": 9}},
            "config: expected update to have keys among 'steps', got 'freq'",
        ),
        (RIGL | {"update": {"freq": 0}}, "config: every(n): expected n >= 1, got 0"),
        (
            RIGL | {"update": {"freq": "9"}},
            "config: update: every(n): expected n to be an int, got str",
        ),
        (
            RIGL | {"update": {"steps": []}},
            "config: at(steps): expected at least one step, got none; never() fires "
            "at no step",
        ),
        (
            RIGL | {"balance_in_groups": 2, "balance_out_groups": 2},
            "config: expected balance_in_groups or balance_out_groups, got both",
        ),
        (RIGL | {"balance_in_groups": 0}, "config: expected groups >= 1, got 0"),
        (
            RIGL | {"balance_in_groups": "2"},
            "config: balance_in_groups: expected groups to be an int, got str",
        ),
    ],
)
def test_refused(config, message):
    with pytest.raises(ValueError) as raised:
        sf.config.from_config(config)
    assert str(raised.value) == message


@pytest.mark.parametrize("globs", [3, [], ["a", 3], {"a": 1}])
def test_a_filter_that_is_no_glob_is_refused(globs):
    with pytest.raises(TypeError) as raised:
        sf.config.from_config([{"sparsity": 0.5, "param_filter": globs}])
    assert (
        str(raised.value)
        == "config[0]: expected param_filter to be a glob or a list of globs, got "
        f"{globs!r}"
    )


def test_a_filter_that_is_a_function_is_refused():
    with pytest.raises(
        TypeError,
        match=r"config: expected param_filter to be a glob or a list of globs, got "
        r"<function",
    ):
        sf.config.from_config(
            {"sparsity": 0.5, "param_filter": lambda name, leaf: True}
        )


def test_a_glob_that_matches_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"where: no path matches 'x\*'; the paths are 'w'"
    ):
        sf.config.from_config({"sparsity": 0.5, "param_filter": "x*"}).init({"w": W})
    with pytest.raises(
        ValueError, match=r"partition: no path matches 'x\*'; the paths are 'w'"
    ):
        sf.config.from_config([{"sparsity": 0.5, "param_filter": "x*"}, 0.5]).init(
            {"w": W}
        )


def test_groups_that_do_not_divide_are_refused_for_each_leaf():
    algorithm = sf.config.from_config(RIGL | {"balance_in_groups": 3})
    with pytest.raises(
        ValueError,
        match=r"in_groups\(3\): expected axis 1 divisible by 3, got shape \(6, 4\) at "
        r"'v'",
    ):
        algorithm.init({"v": torch.ones(6, 4), "w": W})


def test_lists_may_nest_as_deep_as_they_like():
    config = 0.5
    for _ in range(3000):
        config = [config]
    assert (
        int(
            sf.config.from_config(config).init({"w": torch.ones(4, 4)}).masks["w"].sum()
        )
        == 8
    )


def test_an_int_beyond_all_floats_is_refused_at_its_entry():
    level = {"type": "cosine", "init": 0.3, "half_period": 10**400}
    with pytest.raises(
        ValueError,
        match="config: expected half_period to fit a float, got an int of 1329 bits",
    ):
        sf.config.from_config({"algorithm": "gmp", "sparsity": level})
