"""Several optimizers over one tree: each leaf as its own optimizer has it, the whole as
one would.
"""

import io
from collections import OrderedDict

import optree
import pytest
import torch
import torchopt
from torch._dynamo.testing import CompileCounter

import sparsefn as sf
import sparsefn.optim as O
from sparsefn.nn.checkpoint import tree_equal

DRAW = torch.Generator().manual_seed(0)
SHAPES = {"0.weight": (80, 70), "0.bias": (80,), "1.weight": (3, 80), "1.bias": (3,)}
PARAMS = {path: torch.randn(shape, generator=DRAW) for path, shape in SHAPES.items()}
ONES = {
    "sgd": lambda: O.sgd(0.05),
    "momentum": lambda: O.sgd(
        lambda count: 0.1 / (1 + count), momentum=0.9, weight_decay=0.1
    ),
    "adam": lambda: O.adam(0.01, weight_decay=0.1),
    "adamw": lambda: O.adamw(0.01, weight_decay=0.1),
}
TWO = O.by_path(
    [("*.bias", O.sgd(0.1, momentum=0.9)), ("*", O.adamw(0.01, weight_decay=0.1))]
)


def slopes(params):
    return optree.tree_map(lambda p: 0.5 * p + torch.sin(5 * p) + 0.1, params)


def rigl(optimizer, **options):
    return sf.with_optimizer(
        sf.rigl(0.6, when=sf.every(3), key=sf.random.key(1)), optimizer, **options
    )


def run(algorithm, steps, state=None, start=0):
    state = algorithm.init(PARAMS) if state is None else state
    for step in range(start, steps):
        state = algorithm.update(state, slopes(sf.effective(state)), step)
    return state


# ---- one mechanism -------------------------------------------------------------------


@pytest.mark.parametrize("name", ONES)
def test_parts_that_are_one_optimizer_give_its_bits(name):
    one = ONES[name]
    want = run(rigl(one()), 10)
    for optimizer in (
        O.by_path([("*.bias", one()), ("1.*", one()), ("*", one())]),
        O.by_path(
            [(lambda path, leaf: leaf.ndim < 2, one()), (["0.weight", "1.*"], one())]
        ),
        O.parts({path: one() for path in PARAMS}),
    ):
        got = run(rigl(optimizer), 10)
        assert tree_equal(got._replace(opt=()), want._replace(opt=()))
        moments = [leaf for leaf in optree.tree_leaves(got.opt) if leaf.ndim]
        expected = [leaf for leaf in optree.tree_leaves(want.opt) if leaf.ndim]
        assert len(moments) == len(expected)
        assert all(
            any(torch.equal(leaf, other) for other in expected) for leaf in moments
        )


def test_each_leaf_moves_as_under_its_own_optimizer():
    state, got = TWO.init(PARAMS), PARAMS
    sgd, adamw = O.sgd(0.1, momentum=0.9), O.adamw(0.01, weight_decay=0.1)
    biases, weights = (
        {p: x for p, x in PARAMS.items() if p.endswith(end)}
        for end in ("bias", "weight")
    )
    opts = sgd.init(biases), adamw.init(weights)
    for _ in range(4):
        updates, state = TWO.update(slopes(got), state, params=got)
        first, one = sgd.update(slopes(biases), opts[0], params=biases)
        second, other = adamw.update(slopes(weights), opts[1], params=weights)
        opts = one, other
        got, biases, weights = (
            optree.tree_map(torch.add, *pair)
            for pair in ((got, updates), (biases, first), (weights, second))
        )
        assert tree_equal(got, {**biases, **weights})
        assert tree_equal(state, opts)


def test_the_first_rule_wins():
    params = {
        "a.bias": torch.ones(1),
        "a.weight": torch.ones(1),
        "b.bias": torch.ones(1),
    }
    optimizer = O.by_path(
        [("b.*", O.sgd(1.0)), ("*.bias", O.sgd(2.0)), ("*", O.sgd(3.0))]
    )
    updates, _ = optimizer.update(params, optimizer.init(params))
    assert [-x.item() for x in updates.values()] == [2, 3, 1]


def test_any_tree_and_any_insertion_order():
    params = OrderedDict(b=torch.ones(2), a=(torch.ones(()), [torch.zeros(0, 3)]))
    optimizer = O.by_path([("a.*", O.adam(0.1)), ("b", O.sgd(0.1))])
    updates, state = optimizer.update(params, optimizer.init(params), params=params)
    assert optree.tree_structure(updates) == optree.tree_structure(params)
    assert [part.count.item() for part in state] == [1, 1]
    a, b = (
        {"x": torch.ones(1), "y": torch.ones(2)},
        {"y": torch.ones(2), "x": torch.ones(1)},
    )
    for optimizer in (
        O.by_path([("x", O.adam(0.1)), ("y", O.sgd(0.1))]),
        O.parts({"y": O.adam(0.1), "x": O.sgd(1.0)}),
    ):
        assert tree_equal(
            optimizer.update(b, optimizer.init(a))[0],
            optimizer.update(a, optimizer.init(b))[0],
        )


def test_pure():
    grads, state = slopes(PARAMS), TWO.init(PARAMS)
    before = [leaf.clone() for leaf in optree.tree_leaves((PARAMS, grads, state))]
    first = TWO.update(grads, state, params=PARAMS)
    inputs = {leaf.data_ptr() for leaf in optree.tree_leaves((PARAMS, grads, state))}
    assert all(map(torch.equal, optree.tree_leaves((PARAMS, grads, state)), before))
    assert inputs.isdisjoint(leaf.data_ptr() for leaf in optree.tree_leaves(first))


# ---- under masks ---------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_the_pass_under_masks_has_the_bits_of_the_long_way(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        want = run(rigl(TWO._replace(under_masks=None)), 10)
        assert tree_equal(run(rigl(TWO), 10), want)
    finally:
        torch.set_num_threads(before)


def test_one_pass_is_taken_where_every_part_has_one(monkeypatch):
    seen = []

    def update(*args, **kwargs):
        seen.append(args)
        return O.sgd(0.1).update(*args, **kwargs)

    watched = O.sgd(0.1)._replace(update=update, under_masks=O.sgd(0.1).under_masks)
    algorithm = rigl(O.by_path([("*.bias", watched), ("*", O.adam(0.1))]))
    state = algorithm.init(PARAMS)
    seen.clear()  # with_optimizer calls every optimizer once on zeros
    algorithm.update(state, slopes(PARAMS), 0)
    assert not seen
    lacking = O.by_path(
        [("*.bias", watched._replace(under_masks=None)), ("*", O.adam(0.1))]
    )
    assert lacking.under_masks is None


def test_moments_of_pruned_weights_are_zero():
    algorithm = rigl(TWO)
    state = algorithm.init(PARAMS)
    for step in range(12):
        state = algorithm.update(state, slopes(sf.effective(state)), step)
        for path in ("0.weight", "1.weight"):
            for moment in (
                state.opt[1].mu[path],
                state.opt[1].nu[path],
                state.params[path],
            ):
                assert not moment[~state.masks[path]].any()
    assert list(state.opt[0].momentum) == ["0.bias", "1.bias"]


def test_an_optimizer_of_another_library_is_a_part_and_its_moments_are_found():
    theirs = torchopt.adam(0.01)
    algorithm = rigl(
        O.by_path(
            [("*.bias", O.sgd(0.1)), ("*", O.Optimizer(theirs.init, theirs.update))]
        )
    )
    state = run(algorithm, 7)
    moments = [
        leaf
        for leaf in optree.tree_leaves(state.opt)
        if leaf.shape == PARAMS["0.weight"].shape
    ]
    assert len(moments) == 2
    assert not any(moment[~state.masks["0.weight"]].any() for moment in moments)


def test_around_a_partition():
    # Its parts are numbered, too.
    one = O.sgd(0.05, momentum=0.9)
    parts = sf.partition(
        [("0.*", sf.rigl(0.5, when=sf.every(2))), ("1.*", sf.static(0.5))]
    )
    want = run(sf.with_optimizer(parts, one), 5)
    got = run(
        sf.with_optimizer(
            parts, O.by_path([("0.*", one), ("1.weight", one), ("*", one)])
        ),
        5,
    )
    assert tree_equal(got._replace(opt=()), want._replace(opt=()))
    views = sf.partition(
        [("0.*", sf.supermask(0.5, mode="joint")), ("1.*", sf.static(0.5))]
    )
    want = run(sf.with_optimizer(views, one), 5)
    got = run(sf.with_optimizer(views, O.parts({"0": one, "1": one})), 5)
    assert tree_equal(got._replace(opt=()), want._replace(opt=()))
    assert set(got.opt) == {"0", "1"}


# ---- transforms and checkpoints ------------------------------------------------------


def test_vmap_gives_the_bits_of_the_loop():
    def train(rate):
        optimizer = O.by_path(
            [("*.bias", O.sgd(rate, momentum=0.9)), ("*", O.adam(rate))]
        )
        return run(rigl(optimizer), 4)

    rates = torch.tensor([0.1, 0.01, 0.3])
    loop = [train(rate) for rate in rates]
    assert tree_equal(
        torch.vmap(train)(rates),
        optree.tree_map(lambda *leaves: torch.stack(leaves), *loop),
    )


@pytest.mark.deep
def test_compile_gives_the_bits_of_eager_in_one_graph():
    torch._dynamo.reset()
    counter = CompileCounter()
    algorithm = sf.with_optimizer(sf.static(0.5), TWO)
    compiled = torch.compile(algorithm.update, fullgraph=True, backend=counter)
    state = algorithm.init(PARAMS)
    for step in range(5):
        grads = slopes(sf.effective(state))
        want = algorithm.update(state, grads, torch.tensor(step))
        state = compiled(state, grads, torch.tensor(step))
        assert tree_equal(state, want)
    assert counter.frame_count == 1


def test_resume_from_a_checkpoint_is_bit_exact():
    joint = sf.supermask(0.5, mode="joint", init="magnitude")
    for make in (
        lambda: rigl(TWO),
        lambda: sf.with_optimizer(
            joint, O.parts({"scores": O.adam(0.1), "params": O.sgd(0.1, momentum=0.5)})
        ),
    ):
        algorithm, file = make(), io.BytesIO()
        torch.save(sf.checkpoint.state_dict(run(algorithm, 4)), file)
        file.seek(0)
        again = sf.checkpoint.load_state_dict(
            make().init(PARAMS), torch.load(file, weights_only=True)
        )
        assert tree_equal(run(make(), 9, again, 4), run(algorithm, 9))


# ---- parts ---------------------------------------------------------------------------


def test_movement_pruning_with_two_learning_rates():
    def steps(optimizer, count):
        algorithm = sf.with_optimizer(
            sf.supermask(0.5, mode="joint", init="zeros", where="*.weight"), optimizer
        )
        return run(algorithm, count)

    both = steps(
        O.parts({"params": O.sgd(0.01, momentum=0.9), "scores": O.sgd(0.5)}), 1
    )
    assert set(both.opt) == {"params", "scores"}
    slow, fast = steps(O.sgd(0.01), 1), steps(O.sgd(0.5), 1)
    assert tree_equal(both.params, slow.params)
    assert tree_equal(both.scores, fast.scores)
    assert tree_equal(both.masks, fast.masks)
    still = steps(O.parts({"params": O.sgd(0.0), "scores": O.sgd(0.5)}), 5)
    assert tree_equal(still.params, PARAMS)
    assert still.scores["learned"]["0.weight"].any()


def test_latents_and_the_rest():
    optimizer = O.parts({"latent": O.sgd(0.0), "rest": O.sgd(0.1)})
    algorithm = sf.with_optimizer(sf.reparametrised(sf.reparam.power(2.0)), optimizer)
    state = run(algorithm, 2)
    torch.testing.assert_close(state.params["0.weight"], PARAMS["0.weight"])
    assert not torch.equal(state.params["0.bias"], PARAMS["0.bias"])


@pytest.mark.deep(but=["names0"])
@pytest.mark.parametrize("names", [["scores"], ["scores", "params"]])
def test_a_part_without_leaves_may_have_an_optimizer_and_need_not(names):
    # Every leaf has scores: no param trains.
    params = {"w": torch.ones(4, 4)}
    algorithm = sf.with_optimizer(
        sf.supermask(0.5), O.parts({name: O.adam(0.1) for name in names})
    )
    state = algorithm.update(algorithm.init(params), params, 0)
    assert set(state.opt) == set(names)
    assert state.opt["scores"].mu["scores.w"].any()
    if len(names) == 2:
        compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")
        assert tree_equal(
            compiled(state, params, 1), algorithm.update(state, params, 1)
        )


# ---- errors --------------------------------------------------------------------------

SGD = O.sgd(0.1, momentum=0.9)


def small(path, leaf):
    return leaf.numel() < 300


JOINT = {"params": {"w": torch.ones(1)}, "scores": {"w": torch.ones(1)}, "empty": ()}
BAD = {
    "no rules": (
        lambda: O.by_path([]),
        ValueError,
        "by_path: expected at least one (where, optimizer) pair, got none",
    ),
    "an optimizer alone": (
        lambda: O.by_path([SGD]),
        TypeError,
        "by_path: expected a list of pairs, got Optimizer at position 0",
    ),
    "a glob alone": (
        lambda: O.by_path(["*"]),
        TypeError,
        "by_path: expected a list of pairs, got str at position 0",
    ),
    "a torch optimizer": (
        lambda: O.by_path([("*", torch.optim.SGD)]),
        TypeError,
        "by_path: expected an optimizer such as sf.optimizers.sgd(0.1), got type at "
        "position 0; a pair init, update of another library is "
        "sf.optimizers.Optimizer(init, update)",
    ),
    "a leaf too many": (
        lambda: O.by_path([("*.weight", SGD)]).init(PARAMS),
        ValueError,
        "by_path: no rule matches '0.bias', '1.bias'; add ('*', an optimizer) as the "
        "last",
    ),
    "a glob too many": (
        lambda: O.by_path([("*.wieght", SGD), ("*", SGD)]).init(PARAMS),
        ValueError,
        "by_path: no path matches '*.wieght'; the paths are '0.bias', '0.weight', "
        "'1.bias', '1.weight'",
    ),
    "a rule in the shade": (
        lambda: O.by_path([("*", SGD), ("*.bias", SGD)]).init(PARAMS),
        ValueError,
        "by_path: no leaf is left for rule 1, '*.bias'",
    ),
    "another where": (
        lambda: O.by_path([(3, SGD)]).init(PARAMS),
        TypeError,
        "expected where to be a function, a glob or a sequence of globs, got int",
    ),
    "parts in a list": (
        lambda: O.parts([SGD]),
        TypeError,
        "parts: expected a dict of optimizers by part, got list",
    ),
    "no parts": (
        lambda: O.parts({}),
        ValueError,
        "parts: expected at least one part with its optimizer, got none",
    ),
    "a part of another kind": (
        lambda: O.parts({"params": "adam"}),
        TypeError,
        "parts: expected an optimizer such as sf.optimizers.sgd(0.1), got str for "
        "'params'",
    ),
    "a missing part": (
        lambda: O.parts({"params": SGD}).init(JOINT),
        ValueError,
        "parts: expected one optimizer for each of the parts 'empty', 'params', "
        "'scores' of the trained tree, got optimizers for 'params'",
    ),
    "an unknown part": (
        lambda: sf.with_optimizer(
            sf.supermask(0.5, mode="joint"), O.parts({"param": SGD, "scores": SGD})
        ).init(PARAMS),
        ValueError,
        "parts: expected one optimizer for each of the parts 'params', 'scores' of "
        "the trained tree, got optimizers for 'param', 'scores'",
    ),
    "an unknown part beside all": (
        lambda: O.parts({"params": SGD, "scores": SGD, "latent": SGD}).init(JOINT),
        ValueError,
        "got optimizers for 'params', 'scores', 'latent'",
    ),
    "a bare tensor": (
        lambda: O.parts({"params": SGD}).init(torch.ones(1)),
        ValueError,
        "parts: expected one optimizer for each of the parts '' of the trained tree, "
        "got optimizers for 'params'",
    ),
    "other grads": (
        lambda: TWO.update(
            {**PARAMS, "0.bias": torch.ones(2)}, TWO.init(PARAMS), params=PARAMS
        ),
        ValueError,
        "expected grads of shape (80,) at '0.bias', got (2,)",
    ),
    "grads that lack a leaf": (
        lambda: TWO.update(
            {"0.bias": PARAMS["0.bias"]}, TWO.init(PARAMS), params=PARAMS
        ),
        ValueError,
        "expected grads with the structure of params, but there is no leaf at "
        "'0.weight'",
    ),
    "no params for the decay": (
        lambda: TWO.update(PARAMS, TWO.init(PARAMS)),
        ValueError,
        "expected params in update for weight_decay=0.1, got None",
    ),
    "in place": (
        lambda: TWO.update(PARAMS, TWO.init(PARAMS), params=PARAMS, inplace=True),
        ValueError,
        "expected inplace=False: this optimizer never changes its arguments",
    ),
    "a function of sizes": (
        lambda: rigl(O.by_path([(small, SGD), ("*", SGD)])).init(PARAMS),
        ValueError,
        "its init fails on tensors of the meta device (ValueError: by_path: no leaf "
        "is left for rule 0, small)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    make, error, text = BAD[name]
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)
