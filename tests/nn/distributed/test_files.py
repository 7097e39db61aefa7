"""Checkpoints of torch.distributed in one process without a process group;
test_edges.py has several.
"""

import re

import pytest
import torch

import sparsefn as sf
from sparsefn.nn.checkpoint import tree_equal


def made(seed=0):
    draws = torch.Generator().manual_seed(seed)
    params = {
        "a": torch.randn(7, 5, generator=draws),
        "b": {"c": torch.randn(3, generator=draws).bfloat16()},
    }
    rigl = sf.rigl(0.5, when=sf.every(1), key=sf.random.key(seed))
    algorithm = sf.with_optimizer(rigl, sf.optimizers.adam(0.1))
    state = algorithm.init(params)
    for step in range(2):
        state = algorithm.update(
            state, {"a": params["a"].sin(), "b": {"c": params["b"]["c"].cos()}}, step
        )
    return algorithm, state


def test_a_run_goes_on_bit_for_bit(tmp_path):
    algorithm, state = made()
    sf.distributed.save(state, tmp_path / "saved")
    template = made(1)[1]
    before = sf.tree.copied(template)
    found = sf.distributed.load(template, str(tmp_path / "saved"))
    assert tree_equal(found, state)
    assert tree_equal(template, before), "the template is not changed"
    assert list(found.params) == list(template.params)
    grads = sf.tree.copied(state.params)
    assert tree_equal(
        algorithm.update(found, grads, 2), algorithm.update(state, grads, 2)
    )


def test_any_tree_and_strange_numbers(tmp_path):
    tree = (
        [torch.tensor([float("nan"), -0.0, float("inf")])],
        (torch.tensor(3), torch.ones(0, 4)),
        torch.tensor(True),
    )
    sf.distributed.save(tree, tmp_path)
    assert tree_equal(sf.distributed.load(tree, tmp_path), tree)


def test_a_view_is_read_and_written_as_what_it_shows(tmp_path):
    x = torch.arange(12.0).view(3, 4)
    sf.distributed.save({"x": x.T}, tmp_path)
    assert torch.equal(
        sf.distributed.load({"x": torch.zeros(4, 3)}, tmp_path)["x"], x.T
    )


REFUSED = {
    "another structure": (
        lambda state: state.params,
        ValueError,
        "expected the paths of the template, but missing are ['a', 'b.c'] and "
        "unexpected ['key', 'masks.a'",
    ),
    "another shape": (
        lambda state: state._replace(params={**state.params, "a": torch.ones(5, 7)}),
        ValueError,
        "expected a tensor of shape (5, 7) at 'params.a', got (7, 5)",
    ),
    "another dtype": (
        lambda state: state._replace(
            params={**state.params, "a": torch.ones(7, 5).double()}
        ),
        TypeError,
        "expected a tensor of dtype torch.float64 at 'params.a', got torch.float32",
    ),
    "no tensor": (
        lambda state: state._replace(key=3),
        TypeError,
        "expected the template to hold tensors, got int at 'key'",
    ),
    "the meta device": (
        lambda state: state._replace(key=state.key.to("meta")),
        ValueError,
        "expected the template to hold values, got a tensor of the meta device at "
        "'key'",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    sf.distributed.save(made()[1], folder)
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_do_not_fit(name, saved):
    change, error, text = REFUSED[name]
    with pytest.raises(error, match=re.escape(text)):
        sf.distributed.load(change(made()[1]), saved)


def test_what_is_not_saved(saved, tmp_path):
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"save: expected a new folder, but {str(saved)!r} holds a checkp"
        ),
    ):
        sf.distributed.save(made()[1], saved)
    with pytest.raises(
        TypeError, match="expected the state to hold tensors, got int at 'w'"
    ):
        sf.distributed.save({"w": 3}, tmp_path)
    with pytest.raises(
        ValueError,
        match="expected the state to hold values, got a tensor of the meta device at "
        "'w'",
    ):
        sf.distributed.save({"w": torch.ones(2, device="meta")}, tmp_path)
    with pytest.raises(FileNotFoundError):
        sf.distributed.load(made()[1], tmp_path)


def test_masks_and_objects_that_do_not_fit(tmp_path):
    state = sf.dense().init({"w": torch.ones(2)})
    sf.distributed.save(
        state._replace(masks={"w": torch.tensor(False)}), tmp_path / "mask"
    )
    with pytest.raises(
        ValueError,
        match="expected a mask of full shape or 0-d True at 'masks.w', got 0-d False",
    ):
        sf.distributed.load(state, tmp_path / "mask")
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.save(
            {"w": {1, 2}}, checkpoint_id=tmp_path / "object"
        )
    with pytest.raises(
        TypeError,
        match="expected a tensor at 'w' in the checkpoint, got an object of another "
        "kind",
    ):
        sf.distributed.load({"w": torch.ones(2)}, tmp_path / "object")
