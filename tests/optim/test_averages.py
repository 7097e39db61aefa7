"""The average of the effective weights: exact, sparse, and the same batched and
compiled.
"""

import math

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.nn.checkpoint import tree_equal

DRAW = torch.Generator().manual_seed(0)
PARAMS = {"w": torch.randn(80, 70, generator=DRAW), "b": torch.randn(5, generator=DRAW)}
ALGORITHM = sf.with_optimizer(
    sf.rigl(0.6, when=sf.every(3), key=sf.random.key(1)),
    sf.optimizers.sgd(0.1, momentum=0.9),
)


def states(count):
    state = ALGORITHM.init(PARAMS)
    for step in range(count):
        grads = optree.tree_map(
            lambda p: 0.5 * p + torch.sin(5 * p), sf.effective(state)
        )
        state = ALGORITHM.update(state, grads, step)
        yield state


@pytest.mark.parametrize("decay", [0.9, torch.tensor(0.9, dtype=torch.float64)])
def test_it_follows_the_formula_and_the_masks(decay):
    average = want = None
    for state in states(10):
        average = sf.optimizers.ema(state, decay, average)
        now = sf.effective(state)
        want = (
            now
            if want is None
            else optree.tree_map(lambda a, w: 0.9 * a + (1 - 0.9) * w, want, now)
        )
        want = sf.apply_masks(want, state.masks)
        assert tree_equal(average, want)
        assert not average["w"][~state.masks["w"]].any()


def test_it_starts_with_a_copy_and_changes_nothing():
    (state,) = states(1)
    average = sf.optimizers.ema(state, 0.9)
    assert tree_equal(average, sf.effective(state))
    before = optree.tree_map(torch.clone, (state, average))
    following = sf.optimizers.ema(state, 0.5, average)
    assert tree_equal((state, average), before)
    memory = [
        {leaf.data_ptr() for leaf in optree.tree_leaves(tree)}
        for tree in (state, average, following)
    ]
    assert not memory[0] & memory[1] and not memory[2] & (memory[0] | memory[1])


def test_the_ends_of_decay():
    first, second = states(2)
    average = sf.optimizers.ema(first, 0.5)
    assert tree_equal(sf.optimizers.ema(second, 0.0, average), sf.effective(second))
    assert tree_equal(
        sf.optimizers.ema(second, 1.0, average), sf.apply_masks(average, second.masks)
    )


def test_vmap_and_compile_give_the_bits_of_the_loop():
    torch._dynamo.reset()
    old, *new = states(4)
    average, decays = (
        sf.optimizers.ema(old, 0.9),
        torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64),
    )
    loop = [
        sf.optimizers.ema(state, decay.item(), average)
        for state, decay in zip(new, decays, strict=True)
    ]
    stacked = optree.tree_map(lambda *leaves: torch.stack(leaves), *new)
    got = torch.vmap(lambda state, decay: sf.optimizers.ema(state, decay, average))(
        stacked, decays
    )
    assert tree_equal(got, optree.tree_map(lambda *leaves: torch.stack(leaves), *loop))
    compiled = torch.compile(sf.optimizers.ema, fullgraph=True, backend="eager")
    assert tree_equal(compiled(new[0], 0.5, average), loop[0])


def test_an_average_keeps_its_dtype():
    state = sf.State(
        {"w": torch.ones(2, dtype=torch.bfloat16)}, {"w": torch.tensor([True, False])}
    )
    narrow, wide = sf.optimizers.ema(state, 0.999), {"w": torch.zeros(2)}
    for _ in range(3):
        narrow, wide = (
            sf.optimizers.ema(state, 0.999, narrow),
            sf.optimizers.ema(state, 0.999, wide),
        )
    assert narrow["w"].dtype == torch.bfloat16
    torch.testing.assert_close(wide["w"], torch.tensor([1 - 0.999**3, 0.0]))
    number = sf.State({"n": torch.tensor(3.0)}, {"n": torch.tensor(True)})
    assert sf.optimizers.ema(number, 0.5, {"n": torch.tensor(1.0)})["n"] == 2


def test_pruned_entries_that_are_not_numbers_stay_out():
    state = sf.State(
        {"w": torch.tensor([1.0, math.nan])}, {"w": torch.tensor([True, False])}
    )
    assert sf.optimizers.ema(state, 0.5, {"w": torch.tensor([3.0, math.inf])})[
        "w"
    ].tolist() == [
        2.0,
        0.0,
    ]


def test_of_what_attach_returns():
    layer = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    sparse = sf.attach(sf.rigl(0.5, when=sf.always(), where="weight"), layer, optimizer)
    average = sf.optimizers.ema(sparse.state, 0.9)
    for step in range(3):
        optimizer.zero_grad()
        layer(torch.ones(2, 8)).square().sum().backward()
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
        average = sf.optimizers.ema(sparse.state, 0.9, average)
        assert not average["weight"][~sparse.state.masks["weight"]].any()
    assert not torch.equal(average["bias"], layer.bias)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda s: sf.optimizers.ema(s, 1.5),
            ValueError,
            "expected decay in [0, 1], got 1.5",
        ),
        (
            lambda s: sf.optimizers.ema(s, math.nan),
            ValueError,
            "expected decay to be finite, got nan",
        ),
        (
            lambda s: sf.optimizers.ema(s, "0.9"),
            TypeError,
            "expected decay to be a number or a 0-d float tensor, got str",
        ),
        (
            lambda s: sf.optimizers.ema(s, torch.ones(2)),
            ValueError,
            "expected decay to be a 0-d tensor, got shape (2,)",
        ),
        (lambda s: sf.optimizers.ema(s.params, 0.9), TypeError, "expected a State"),
        (
            lambda s: sf.optimizers.ema(s, 0.9, {"w": s.params["w"]}),
            ValueError,
            "expected average with the structure of params, but there is no leaf at "
            "'b'",
        ),
        (
            lambda s: sf.optimizers.ema(s, 0.9, {**s.params, "b": torch.ones(3)}),
            ValueError,
            "expected average of shape (5,) at 'b', got (3,)",
        ),
    ],
)
def test_bad_input(call, error, text):
    with pytest.raises(error) as caught:
        call(ALGORITHM.init(PARAMS))
    assert text in str(caught.value)
