"""Checkpoints: flat dicts of tensors that torch.save takes, and trees compared bit by
bit.
"""

import io
import re
import warnings
from collections import OrderedDict

import optree
import pytest
import torch

import sparsefn as sf
import sparsefn.optim as O
from sparsefn import ensemble, masks
from sparsefn.core.state import State
from sparsefn.nn.checkpoint import load_state_dict, state_dict, tree_equal


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = {
        "0": {
            "weight": torch.randn(3, 2, generator=generator),
            "bias": torch.randn(3, generator=generator),
        }
    }
    masks = {"0": {"weight": params["0"]["weight"] > 0, "bias": torch.tensor(True)}}
    optimizer = O.adam(0.1)
    _, opt = optimizer.update(params, optimizer.init(params), params=params)
    return State(params, masks, key=torch.tensor([seed, 2]), opt=opt)


def through_a_file(tensors):
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


PATHS = [
    "params.0.bias",
    "params.0.weight",
    "masks.0.bias",
    "masks.0.weight",
    "key",
    "opt.count",
    "opt.mu.0.bias",
    "opt.mu.0.weight",
    "opt.nu.0.bias",
    "opt.nu.0.weight",
    "opt.decay1",
    "opt.decay2",
]


def test_paths_are_dotted_names_in_optrees_order():
    state = make_state()
    assert list(state_dict(state)) == PATHS
    turned = state._replace(params={"0": dict(reversed(state.params["0"].items()))})
    assert list(state_dict(turned)) == PATHS
    assert state_dict(torch.ones(2)).keys() == {""}
    assert state_dict(()) == {}


def test_loading_what_is_there():
    template, saved = make_state(seed=1), state_dict(make_state())
    del saved["masks.0.weight"], saved["opt.count"]
    saved["params.1.weight"] = torch.ones(5)
    loaded = load_state_dict(template, saved, strict=False)
    own = {"masks.0.weight", "opt.count"}
    for path, leaf in state_dict(loaded).items():
        source = state_dict(template) if path in own else saved
        assert torch.equal(leaf, source[path])
        assert leaf.data_ptr() not in (
            source[path].data_ptr(),
            state_dict(template)[path].data_ptr(),
        )
    with pytest.raises(
        ValueError,
        match=r"expected a tensor of shape \(3,\) at 'params.0.bias', got \(2,\)",
    ):
        load_state_dict(
            template, saved | {"params.0.bias": torch.ones(2)}, strict=False
        )


def test_round_trip_through_a_weights_only_file():
    state = make_state()
    loaded = load_state_dict(make_state(seed=1), through_a_file(state_dict(state)))
    assert tree_equal(loaded, state)
    assert type(loaded) is State
    assert type(loaded.opt) is O.AdamState


@pytest.mark.parametrize(
    "make",
    [lambda: O.sgd(0.05, 0.9, True, 0.1), lambda: O.adam(0.05), lambda: O.adamw(0.05)],
)
def test_resume_equals_an_uninterrupted_run(make):
    def steps(params, opt, n):
        optimizer = make()
        for _ in range(n):
            updates, opt = optimizer.update(
                optree.tree_map(torch.sin, params), opt, params=params
            )
            params = optree.tree_map(torch.add, params, updates)
        return params, opt

    params = make_state().params
    want = steps(params, make().init(params), 7)
    half = steps(params, make().init(params), 3)
    template = (params, make().init(params))
    assert tree_equal(
        steps(*load_state_dict(template, through_a_file(state_dict(half))), 4), want
    )


def test_a_member_of_a_stack_and_an_expanded_leaf_are_saved_at_their_own_size():
    stacked = torch.randn(1000, 3)
    view, wide = {"w": stacked[5]}, {"m": torch.tensor(True).expand(8)}
    for tree in (view, wide):
        (saved,) = state_dict(tree).values()
        (leaf,) = tree.values()
        assert saved.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
        assert tree_equal(load_state_dict(tree, through_a_file(state_dict(tree))), tree)
    states = [make_state(seed) for seed in range(2)]
    stack = ensemble.stack(states)
    assert tree_equal(load_state_dict(stack, through_a_file(state_dict(stack))), stack)


def test_nothing_is_mutated_and_the_result_shares_no_memory():
    state, template = make_state(), make_state(seed=1)
    sd = state_dict(state)
    kept = {path: leaf.clone() for path, leaf in sd.items()}
    loaded = load_state_dict(template, sd)
    for leaf in optree.tree_leaves(loaded):
        leaf.zero_()
    assert list(sd) == PATHS
    assert tree_equal(sd, kept)
    assert tree_equal(state, make_state())
    assert tree_equal(template, make_state(seed=1))


def test_what_is_saved_carries_no_graph():
    weight = torch.nn.Parameter(torch.ones(2))
    sd = state_dict({"w": weight, "twice": weight * 2})
    assert not any(leaf.requires_grad for leaf in sd.values())
    assert type(sd["w"]) is torch.Tensor


def test_state_dict_refuses():
    with pytest.raises(
        TypeError, match="expected the state to hold tensors, got float at 'opt.0'"
    ):
        state_dict({"opt": [1.0]})
    with pytest.raises(
        ValueError, match=r"expected one leaf a path, but two leaves are at 'a.b'"
    ):
        state_dict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


def test_load_state_dict_refuses():
    template = {"w": torch.ones(2), "b": torch.ones(1)}
    with pytest.raises(
        ValueError,
        match=r"expected the paths of the template, but missing are \['b'\] and "
        r"unexpected \['c'\]",
    ):
        load_state_dict(template, {"w": torch.ones(2), "c": torch.ones(1)})
    with pytest.raises(
        ValueError, match=r"expected a tensor of shape \(2,\) at 'w', got \(3,\)"
    ):
        load_state_dict(template, {"w": torch.ones(3), "b": torch.ones(1)})
    with pytest.raises(
        TypeError,
        match=r"expected a tensor of dtype torch.float32 at 'w', got torch.float64",
    ):
        load_state_dict(template, {"w": torch.ones(2).double(), "b": torch.ones(1)})
    with pytest.raises(
        TypeError, match="expected the saved dict to hold tensors, got list at 'w'"
    ):
        load_state_dict(template, {"w": [1.0, 1.0], "b": torch.ones(1)})
    with pytest.raises(
        TypeError, match="expected the template to hold tensors, got int at 'w'"
    ):
        load_state_dict({"w": 1}, {"w": torch.ones(1)})
    with pytest.raises(TypeError, match="expected a dict of tensors by path, got list"):
        load_state_dict(template, [torch.ones(2)])


def test_tree_equal_compares_bits():
    nan = torch.tensor([float("nan"), 1.0])
    other_nan = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(
        torch.float32
    )
    assert tree_equal(nan, nan.clone())
    assert other_nan[0].isnan()
    assert not tree_equal(nan, other_nan)
    assert not tree_equal(torch.tensor([0.0]), torch.tensor([-0.0]))


NUMBERS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, *NUMBERS])
def test_tree_equal_of_every_dtype(dtype):
    a = torch.tensor([0, 1, 1]).to(dtype)
    assert tree_equal([a, a[0]], [a.clone(), a[0].clone()])
    assert not tree_equal([a, a[0]], [a, a[1]])
    strided = torch.stack([a, a], 1)[:, 0]
    assert tree_equal(strided, a)
    assert not tree_equal(a, torch.tensor([0, 1, 1], dtype=torch.int32))
    assert not tree_equal(a, a[None])
    assert tree_equal(a[:0], a[:0].clone())


def test_tree_equal_compares_structures():
    one = torch.ones(1)
    assert tree_equal({"a": one, "b": one}, {"b": one, "a": one})
    assert not tree_equal({"a": one}, {"b": one})
    assert not tree_equal([one], (one,))
    assert not tree_equal({"a": one}, OrderedDict(a=one))
    assert not tree_equal(State(one, one), State(one, one, one))
    assert tree_equal((), ())
    with pytest.raises(TypeError, match="expected b to hold tensors, got float at '0'"):
        tree_equal([one], [1.0])
    with pytest.raises(TypeError, match="expected a to hold tensors, got float at '0'"):
        tree_equal([1.0], [one])


# Packed masks


def random_mask(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.3


@pytest.mark.parametrize(
    "shape",
    [(1,), (7,), (8,), (9,), (3, 5), (2, 3, 4), (300, 7), (0,), (0, 3), (1, 1, 1)],
)
def test_packed_masks_take_a_bit_an_element_and_come_back(shape):
    state = State({"w": torch.randn(shape)}, {"w": random_mask(*shape)})
    saved = state_dict(state, pack=True)
    assert list(saved) == list(state_dict(state))
    assert saved["masks.w"].dtype == torch.uint8
    assert saved["masks.w"].shape == (
        1 + 8 * len(shape) + -(-state.masks["w"].numel() // 8),
    )
    assert torch.equal(saved["params.w"], state.params["w"])
    template = State(
        {"w": torch.zeros(shape)}, {"w": torch.ones(shape, dtype=torch.bool)}
    )
    assert tree_equal(load_state_dict(template, through_a_file(saved)), state)


def test_a_packed_mask_tells_its_shape_and_then_its_bits():
    mask = random_mask(5, 300)
    saved = state_dict({"m": mask}, pack=True)["m"].tolist()
    assert saved[:17] == [2, 5, 0, 0, 0, 0, 0, 0, 0, 300 % 256, 1, 0, 0, 0, 0, 0, 0]
    assert saved[17:] == masks.pack([mask])[0].tolist()


def test_dense_masks_and_everything_else_stay_as_they_are():
    state = make_state()
    saved, plain = state_dict(state, pack=True), state_dict(state)
    assert list(saved) == PATHS
    assert saved["masks.0.bias"].dtype == torch.bool and saved["masks.0.bias"].ndim == 0
    assert {path for path in PATHS if not tree_equal(saved[path], plain[path])} == {
        "masks.0.weight"
    }
    assert tree_equal(load_state_dict(make_state(seed=1), saved), state)


def test_a_stack_of_states_and_views_pack():
    states = [make_state(seed) for seed in range(9)]
    stack = ensemble.stack(states)
    saved = state_dict(stack, pack=True)
    assert saved["masks.0.weight"].shape == (1 + 3 * 8 + 7,)  # 9 times 3 times 2 bits
    assert tree_equal(load_state_dict(stack, through_a_file(saved)), stack)
    turned = {"m": random_mask(6, 5).T}
    assert tree_equal(load_state_dict(turned, state_dict(turned, pack=True)), turned)


def test_packed_masks_take_part_in_what_strict_says():
    template = {"a": torch.ones(3, dtype=torch.bool), "b": random_mask(4)}
    saved = state_dict({"a": random_mask(3), "c": random_mask(2)}, pack=True)
    with pytest.raises(ValueError, match=r"missing are \['b'\] and unexpected \['c'\]"):
        load_state_dict(template, saved)
    loaded = load_state_dict(template, saved, strict=False)
    assert torch.equal(loaded["a"], random_mask(3)) and torch.equal(
        loaded["b"], template["b"]
    )
    assert loaded["b"].data_ptr() != template["b"].data_ptr()


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [((3, 5), (4, 4)), ((15,), (3, 5)), ((64,), (0, 64)), ((16,), (15,))],
)
def test_a_packed_mask_of_another_shape_is_refused(stored, wanted):
    saved = state_dict({"m": torch.zeros(stored, dtype=torch.bool)}, pack=True)
    text = re.escape(
        f"expected a mask of shape {wanted} at 'm', got a packed one of {stored}"
    )
    with pytest.raises(ValueError, match=text):
        load_state_dict({"m": torch.zeros(wanted, dtype=torch.bool)}, saved)
    with pytest.raises(ValueError, match=text):
        load_state_dict(
            {"m": torch.zeros(wanted, dtype=torch.bool)}, saved, strict=False
        )


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 4, dtype=torch.uint8),
        torch.ones(12, dtype=torch.uint8),
        torch.zeros(12, dtype=torch.uint8),
        torch.zeros(0, dtype=torch.uint8),
        torch.tensor(1, dtype=torch.uint8),
        state_dict({"m": random_mask(3, 4)}, pack=True)["m"][:-1],
        torch.tensor([255, 1], dtype=torch.uint8),
    ],
)
def test_other_uint8_tensors_are_no_masks(value):
    got = re.escape(f"got a uint8 tensor of shape {tuple(value.shape)}")
    with pytest.raises(
        TypeError,
        match="expected a mask at 'm', bool or packed by state_dict.pack=True., " + got,
    ):
        load_state_dict({"m": random_mask(3, 4)}, {"m": value})


def test_packed_masks_fit_no_leaf_of_numbers():
    saved = state_dict({"m": random_mask(3, 4)}, pack=True)
    with pytest.raises(
        TypeError,
        match=r"expected a tensor of dtype torch.int64 at 'm', got torch.uint8",
    ):
        load_state_dict({"m": torch.zeros(19, dtype=torch.int64)}, saved)
    own = {"m": torch.arange(30, dtype=torch.uint8)}
    assert tree_equal(load_state_dict(own, state_dict(own, pack=True)), own)


def test_a_0d_false_is_no_mask_and_may_be_another_leaf():
    state = make_state()
    flags = {"fresh": torch.tensor(True)}
    member = state._replace(scores=flags, opt={"inner": state})
    for template, path in (
        (state, "masks.0.bias"),
        ([member], "0.masks.0.bias"),
        ((1 * torch.ones(1), member), "1.opt.inner.masks.0.bias"),
    ):
        sd = {**state_dict(template), path: torch.tensor(False)}
        with pytest.raises(
            ValueError,
            match=re.escape(
                f"expected a mask of full shape or 0-d True at {path!r}, got 0-d False"
            ),
        ):
            load_state_dict(template, sd)
    loaded = load_state_dict(
        member, {**state_dict(member), "scores.fresh": torch.tensor(False)}
    )
    assert not loaded.scores["fresh"]
    assert not load_state_dict(
        {"masks": torch.tensor(True)}, {"masks": torch.tensor(False)}
    )["masks"]
    named = {
        "masks": State(
            {"w": torch.ones(2)},
            {"w": torch.tensor(True)},
            scores={"masks": torch.tensor(True)},
        )
    }
    sd = {**state_dict(named), "masks.scores.masks": torch.tensor(False)}
    assert not load_state_dict(named, sd)["masks"].scores["masks"]


@pytest.mark.parametrize("stacks", [1, 2])
def test_a_0d_false_in_a_stack_is_no_mask(stacks):
    params = {
        "bias": torch.ones(2),
        "weight": torch.ones(2, 4),
        "scale": torch.tensor(1.0),
        "both": torch.ones(2, 2),
    }
    where = ["weight", "both"]
    plain = sf.static(0.5, where=where).init(params)
    trained = sf.static(0.5, where=where, pruned="train").init(params)
    for state in (plain, trained, plain._replace(key=())):
        for _ in range(stacks):
            state = sf.ensemble.stack([state, state])
        template = {"of": [state]}
        sd = state_dict(template)
        assert tree_equal(load_state_dict(template, sd), template)
        dense = {
            "masks": ["bias", "scale"],
            "support": [*params] if state.support != () else [],
        }
        for field, leaves in dense.items():
            for leaf in leaves:
                path = f"of.0.{field}.{leaf}"
                hidden = sd[path].clone()
                hidden.view(-1)[-1] = False
                with pytest.raises(
                    ValueError,
                    match=re.escape(
                        f"at {path!r}, got 0-d False in a stack of shape (2,"
                    ),
                ):
                    load_state_dict(template, {**sd, path: hidden})
        # A mask of full shape may prune a member whole.
        for leaf in where:
            path = f"of.0.masks.{leaf}"
            nothing = {**sd, path: torch.zeros_like(sd[path])}
            assert not load_state_dict(template, nothing)["of"][0].masks[leaf].any()


def test_a_packed_mask_with_damaged_bits_is_refused():
    saved = state_dict({"m": torch.ones(3, 4, dtype=torch.bool)}, pack=True)
    saved["m"][-1] |= 0x80
    with pytest.raises(
        ValueError,
        match="the packed mask at 'm' to end in 4 zero bits: its bytes are dam",
    ):
        load_state_dict({"m": torch.ones(3, 4, dtype=torch.bool)}, saved)


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove them
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


STRANGE = {
    "a torch.sparse_coo": lambda: torch.ones(2).to_sparse(),
    "a quantised": quantised,
    "a nested": lambda: torch.nested.nested_tensor(
        [torch.ones(2)], layout=torch.jagged
    ),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_of_another_layout_are_refused_by_their_path(kind):
    strange, dense = {"a": [STRANGE[kind]()]}, {"a": [torch.ones(2)]}
    for what, run in (
        ("the state", lambda: state_dict(strange)),
        ("the saved dict", lambda: load_state_dict(dense, {"a.0": strange["a"][0]})),
        ("the template", lambda: load_state_dict(strange, state_dict(dense))),
        ("a", lambda: tree_equal(strange, dense)),
        ("b", lambda: tree_equal(dense, strange)),
    ):
        with pytest.raises(
            TypeError,
            match=f"expected {what} to hold dense tensors, got {kind} one at 'a.0'",
        ):
            run()


def test_the_meta_device_holds_no_values():
    dense, empty = {"w": torch.ones(2)}, {"w": torch.ones(2, device="meta")}
    text = "expected the {} to hold values, got a tensor of the meta device at 'w'"
    with pytest.raises(ValueError, match=text.format("saved dict")):
        load_state_dict(dense, empty)
    with pytest.raises(ValueError, match=text.format("template")):
        load_state_dict(empty, dense)
    with pytest.raises(ValueError, match=text.format("saved dict")):
        load_state_dict(
            {"w": torch.ones(9) > 0},
            {"w": torch.zeros(11, dtype=torch.uint8, device="meta")},
        )


def test_equality_of_lazy_views():
    a = torch.tensor([1 + 2j, 3 - 4j])
    assert a.conj().is_conj() and a.conj().imag.is_neg()
    assert tree_equal(a.conj(), a.conj().resolve_conj())
    assert not tree_equal(a.conj(), a)
    assert tree_equal(a.conj().imag, torch.tensor([-2.0, 4.0]))
    assert not tree_equal(a.conj().imag, a.imag)
    assert tree_equal(torch._neg_view(a), -a)
    loaded = load_state_dict(
        {"w": a, "i": a.imag}, state_dict({"w": a.conj(), "i": a.conj().imag})
    )
    assert tree_equal(
        loaded, {"w": torch.tensor([1 - 2j, 3 + 4j]), "i": torch.tensor([-2.0, 4.0])}
    )
