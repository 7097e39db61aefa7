"""`partition` over leaves, `chain` at one time, `with_terms` in the gradient."""

import optree
import pytest
import torch

import sparsefn as sf

MAKE = torch.Generator().manual_seed(0)
RANDOM = {path: torch.randn(shape, generator=MAKE) for path, shape in (("a", (6, 8)), ("b", (8, 4)), ("c", (5,)))}


def slopes(params):
    return optree.tree_map(lambda w: torch.sin(3 * w) + 0.1, params)


def run(algorithm, steps=6, params=RANDOM):
    state = algorithm.init(params)
    for step in range(steps):
        state = algorithm.update(state, slopes(sf.effective(state)), step)
    return state


def kept(state, path="w"):
    return set(state.masks[path].flatten().nonzero().flatten().tolist())


# ---- partition ----------------------------------------------------------------------------------

# One for every kind of memory: keys, moving averages, latents off the mask.
PARTS = {
    "rigl": lambda: sf.rigl(0.5, when=sf.every(2), key=sf.random.key(3)),
    "set": lambda: sf.set(0.5, when=sf.every(2), key=sf.random.key(3)),
    "gmp": lambda: sf.gmp(sf.schedules.polynomial(0.0, 0.7, 0, 5)),
    "grow-ema": lambda: sf.rigl(0.5, grow=sf.scores.momentum(0.5), when=sf.every(2)),
    "ste": lambda: sf.ste(0.5),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_draws_and_trains_as_it_would_alone(name):
    optimizer = sf.optimizers.sgd(0.1, momentum=0.9)
    alone = run(sf.with_optimizer(PARTS[name](), optimizer), params={"a": RANDOM["a"]})
    parts = sf.partition([("b", sf.static(0.5)), ("a", PARTS[name]())])
    state = run(sf.with_optimizer(parts, optimizer))
    assert torch.equal(state.masks["a"], alone.masks["a"])
    assert torch.equal(state.params["a"], alone.params["a"])
    assert torch.equal(state.opt.momentum["a"], alone.opt.momentum["a"])
    assert state.masks["c"].ndim == 0


@pytest.mark.parametrize("name", PARTS)
def test_optimizers_inside_the_parts_equal_one_around_them(name):
    optimizer = sf.optimizers.adam(0.05, weight_decay=0.01)
    around = run(sf.with_optimizer(sf.partition([("a", PARTS[name]()), ("*", sf.static(0.5))]), optimizer))
    parts = [("a", sf.with_optimizer(PARTS[name](), optimizer)), ("*", sf.with_optimizer(sf.static(0.5), optimizer))]
    inside = run(sf.partition(parts))
    assert sf.checkpoint.tree_equal(inside.params, around.params)
    assert sf.checkpoint.tree_equal(inside.masks, around.masks)
    assert torch.equal(inside.opt["0"].mu["a"], around.opt.mu["a"])
    assert torch.equal(inside.opt["1"].nu["b"], around.opt.nu["b"])


def test_parts_may_have_optimizers_of_their_own_and_some_none():
    fast, slow = (sf.with_optimizer(sf.dense(), sf.optimizers.sgd(lr)) for lr in (0.5, 0.25))
    algorithm = sf.partition([("a", fast), ("b", slow)])
    params = {"a": torch.zeros(1, 2), "b": torch.zeros(1, 2), "c": torch.zeros(2)}
    state = algorithm.update(algorithm.init(params), optree.tree_map(torch.ones_like, params), 0)
    assert {path: leaf.flatten()[0].item() for path, leaf in state.params.items()} == {"a": -0.5, "b": -0.25, "c": 0.0}


def test_the_first_match_wins_and_the_rest_stays_dense():
    params = {"head": {"w": torch.ones(2, 2)}, "body": {"w": torch.ones(2, 2)}, "neck": torch.ones(2, 2)}
    parts = [
        ("head.*", sf.static(1.0)),
        (["*.w"], sf.static(0.5)),
        (lambda path, leaf: path != "tail", sf.static(0.25)),
    ]
    state = sf.partition(parts).init({**params, "tail": torch.ones(2, 2)})
    assert int(state.masks["head"]["w"].sum()) == 0
    assert int(state.masks["body"]["w"].sum()) == 2
    assert int(state.masks["neck"].sum()) == 3
    assert state.masks["tail"].ndim == 0


def test_a_part_applies_its_own_where_to_its_leaves():
    params = {"a": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, "b": torch.ones(4)}
    state = sf.partition([("a.*", sf.static(0.5)), ("b", sf.static(0.5, where="b"))]).init(params)
    assert state.masks["a"]["bias"].ndim == 0
    assert int(state.masks["b"].sum()) == 2


def test_a_global_budget_inside_a_part_sees_its_leaves_alone():
    params = {"a": torch.tensor([[9.0, 8.0]]), "b": torch.tensor([[1.0, 2.0]]), "c": torch.tensor([[3.0, 4.0]])}
    algorithm = sf.partition([(["b", "c"], sf.gmp(0.5, distribution=sf.budgets.global_()))])
    state = algorithm.init(params)
    assert (state.masks["a"].ndim, kept(state, "b"), kept(state, "c")) == (0, set(), {0, 1})


def test_latents_train_in_one_part_and_weights_in_another():
    optimizer = sf.optimizers.sgd(0.1, momentum=0.9, weight_decay=0.05)
    power = sf.reparametrised(sf.reparam.power(2.0))
    state = run(sf.with_optimizer(sf.partition([("a", power), ("b", sf.rigl(0.5, when=sf.always()))]), optimizer))
    for path, algorithm in (("a", power), ("b", sf.rigl(0.5, when=sf.always()))):
        alone = run(sf.with_optimizer(algorithm, optimizer), params={path: RANDOM[path]})
        assert torch.equal(state.params[path], alone.params[path])
        assert torch.equal(state.masks[path], alone.masks[path])


def test_terms_may_be_given_to_one_part():
    terms = sf.partition([("a", sf.with_terms(sf.dense(), sf.terms.l1(1.0)))])
    algorithm = sf.with_optimizer(terms, sf.optimizers.sgd(0.5))
    params = {"a": torch.tensor([2.0]), "b": torch.tensor([2.0])}
    state = algorithm.update(algorithm.init(params), optree.tree_map(torch.zeros_like, params), 0)
    assert (state.params["a"].item(), state.params["b"].item()) == (1.5, 2.0)


def test_grow_and_prune_lets_one_part_be_dense_at_a_time():
    # Ma et al. 2022: three parts; in every round one is dense, after three rounds each was once.
    def part(i):
        level = sf.schedules.cycling([0.0 if j == i else 0.5 for j in range(3)], sf.always())
        return sf.gmp(level, regrow=True)

    algorithm = sf.partition([(f"{i}", part(i)) for i in range(3)])
    params = [torch.randn(4, 4) for _ in range(3)]
    state, dense = algorithm.init(params), []
    for step in range(6):
        state = algorithm.update(state, params, step)
        dense.append([bool(mask.all()) for mask in state.masks])
    assert dense == [[i == step % 3 for i in range(3)] for step in range(6)]


# ---- chain --------------------------------------------------------------------------------------


def test_a_later_part_selects_among_what_the_earlier_kept():
    # Rows first: the second row has the larger sum. Then 2 of 8 elements, both inside it.
    params = {"w": torch.tensor([[9.0, 1.0, 1.0, 1.0], [4.0, 5.0, 6.0, 7.0]])}
    algorithm = sf.chain(sf.one_shot(0.5, pattern=sf.patterns.channel(0)), sf.one_shot(0.75))
    state = algorithm.update(algorithm.init(params), params, 0)
    assert kept(state) == {6, 7}
    assert kept(sf.one_shot(0.75).update(algorithm.init(params), params, 0)) == {0, 7}


def test_where_fewer_are_left_than_asked_for_all_of_them_stay():
    params = {"w": torch.tensor([[9.0, 1.0], [4.0, 5.0]])}
    algorithm = sf.chain(sf.gmp(0.75), sf.gmp(0.25))
    assert kept(algorithm.init(params)) == {0}


def test_random_growth_in_a_chain_stays_inside_the_first_mask():
    rows = sf.static(0.5, pattern=sf.patterns.channel(0), key=sf.random.key(1))
    algorithm = sf.chain(rows, sf.set(0.75, drop_fraction=0.5, key=sf.random.key(2), when=sf.always()))
    params = {"w": torch.randn(8, 8)}
    state = algorithm.init(params)
    allowed, seen = rows.init(params).masks["w"], set()
    for step in range(5):
        state = algorithm.update(state, params, step)
        assert int(state.masks["w"].sum()) == 16
        assert not (state.masks["w"] & ~allowed).any()
        assert not state.params["w"][~state.masks["w"]].any()
        seen.add(frozenset(kept(state)))
    assert len(seen) == 5


def test_the_mask_of_an_earlier_part_moves_on():
    level = sf.schedules.piecewise({0: 0.0, 1: 0.5})
    algorithm = sf.chain(sf.gmp(level, pattern=sf.patterns.channel(0)), sf.ste(0.5))
    params = {"w": torch.tensor([[4.0, 3.0], [1.0, 5.0]])}
    state = algorithm.init(params)
    assert kept(state) == {0, 3}
    state = algorithm.update(state, params, 1)
    assert kept(state) == {0, 1}


def test_a_chain_of_one_is_the_algorithm():
    optimizer = sf.optimizers.adam(0.05)
    for name, make in PARTS.items():
        chained, alone = (run(sf.with_optimizer(a, optimizer)) for a in (sf.chain(make()), make()))
        assert sf.checkpoint.tree_equal((chained.params, chained.masks), (alone.params, alone.masks)), name


def test_dense_in_a_chain_changes_nothing():
    optimizer = sf.optimizers.sgd(0.1, momentum=0.9)
    alone = run(sf.with_optimizer(PARTS["rigl"](), optimizer))
    every = sf.from_masks(
        optree.tree_map(lambda p: torch.ones_like(p, dtype=torch.bool) if p.ndim > 1 else p[0] == p[0], RANDOM)
    )
    for parts in ((sf.dense(), PARTS["rigl"]()), (PARTS["rigl"](), sf.dense()), (PARTS["rigl"](), every)):
        state = run(sf.with_optimizer(sf.chain(*parts), optimizer))
        assert sf.checkpoint.tree_equal((state.params, state.masks), (alone.params, alone.masks))


def test_given_masks_hold_while_the_part_before_moves():
    given = {path: torch.ones((), dtype=torch.bool) for path in RANDOM} | {"a": RANDOM["b"].reshape(4, 8) > 0}
    given["a"] = torch.cat([given["a"], given["a"][:2]])
    algorithm = sf.chain(PARTS["rigl"](), sf.from_masks(given))
    state, rigl = algorithm.init(RANDOM), PARTS["rigl"]().init(RANDOM)
    masks = set()
    for step in range(6):
        rigl = PARTS["rigl"]().update(sf.with_params(rigl, state.params), slopes(RANDOM), step)
        state = algorithm.update(state, slopes(RANDOM), step)
        assert torch.equal(state.masks["a"], rigl.masks["a"] & given["a"])
        masks.add(frozenset(kept(state, "a")))
    assert len(masks) > 1


def test_algorithms_that_cannot_be_narrowed_are_intersected():
    # `phases` and `sequence` choose among all weights; the chain then intersects.
    params = {"w": torch.tensor([[9.0, 1.0, 8.0, 7.0], [4.0, 5.0, 6.0, 0.5]])}
    rows = sf.static(0.5, pattern=sf.patterns.channel(0), init="magnitude", pruned="keep")
    for second in (sf.phases([(0, sf.gmp(0.5))]), sf.sequence(sf.gmp(0.5))):
        state = sf.chain(rows, second).init(params)
        assert kept(state) == {0, 2, 3}


def test_chains_nest():
    params = {"w": torch.randn(4, 4)}
    parts = [sf.gmp(0.25, pattern=sf.patterns.channel(0)), sf.gmp(0.5, pattern=sf.patterns.channel(1)), sf.gmp(0.75)]
    flat = sf.chain(*parts).init(params)
    assert int(flat.masks["w"].sum()) == 4
    assert torch.equal(sf.chain(parts[0], sf.chain(*parts[1:])).init(params).masks["w"].sum(), torch.tensor(4))
    assert torch.equal(sf.chain(sf.chain(*parts[:2]), parts[2]).init(params).masks["w"], flat.masks["w"])


# ---- terms --------------------------------------------------------------------------------------


def test_terms_go_with_an_algorithm_into_a_chain_of_one_kind():
    inner = sf.chain(sf.static(0.5, init="magnitude"), sf.static(0.75, init="magnitude"))
    algorithm = sf.with_optimizer(sf.with_terms(inner, sf.terms.l1(1.0)), sf.optimizers.sgd(0.5))
    params = {"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])}
    state = algorithm.update(algorithm.init(params), {"w": torch.zeros(1, 4)}, 0)
    assert state.params["w"].tolist() == [[3.5, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "second,want",
    [
        (sf.dense(), [2, 1, 4]),
        (sf.from_masks({"w": torch.tensor([[True, True, True, False]])}), [2, 1, 3]),
        (sf.static(0.0, init="dense"), [2, 1, 2]),  # chosen in init, among what was kept then
    ],
)
def test_a_chain_shows_again_what_a_part_hid(second, want):
    # The first part keeps 2, then 1, then all of 4.
    level = sf.schedules.piecewise({0: 0.5, 1: 0.75, 2: 0.0})
    algorithm = sf.chain(sf.gmp(level, regrow=True, pruned="keep"), second)
    state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    counts = []
    for step in range(3):
        state = algorithm.update(state, {"w": torch.zeros(1, 4)}, step)
        counts.append(int(state.masks["w"].sum()))
    assert counts == want


def test_only_the_last_part_of_a_chain_may_train_pruned_weights():
    sf.chain(sf.dense(), sf.ste(0.5)).init({"w": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="chain: pruned weights of the algorithm at position 0 train on; put it last"):
        sf.chain(sf.ste(0.5), sf.dense()).init({"w": torch.ones(2, 2)})


NESTED = {"a": {}, "l": [(), {"v": torch.arange(12.0).reshape(3, 4)}], "w": torch.arange(1.0, 13.0).reshape(4, 3)}
SGD = sf.optimizers.sgd(0.5, momentum=0.5)
COVERED = {
    "plain": lambda: sf.partition([("*", sf.gmp(0.5))]),
    "no leaf": lambda: sf.partition([(lambda path, leaf: False, sf.ste(0.5)), ("*", sf.static(0.5))]),
    "optimizer around": lambda: sf.with_optimizer(sf.partition([("*", sf.gmp(0.5))]), SGD),
    "latents": lambda: sf.with_optimizer(
        sf.partition([("*", sf.reparametrised(sf.reparam.power(2.0), sf.static(0.5)))]), SGD
    ),
    "scores": lambda: sf.with_optimizer(sf.supermask(0.5), SGD),
    "chain": lambda: sf.chain(sf.static(0.5, pattern=sf.patterns.channel(0)), sf.gmp(0.75)),
    "sequence": lambda: sf.sequence(sf.gmp(0.5), sf.static(0.5)),
    "phases": lambda: sf.phases([(0, sf.ste(0.5)), (1, sf.static(0.5, init="magnitude"))]),
}


@pytest.mark.filterwarnings("ignore:no leaf is sparsified")  # a part without leaves says so
@pytest.mark.parametrize("name", COVERED)
def test_parts_without_leaves_and_empty_trees_compile(name):
    torch._dynamo.reset()
    algorithm = COVERED[name]()
    state, grads = algorithm.init(NESTED), optree.tree_map(lambda leaf: leaf * 0.25 - 1, NESTED)
    compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")
    got, want = compiled(state, grads, torch.tensor(1)), algorithm.update(state, grads, 1)
    assert optree.tree_structure(got) == optree.tree_structure(want)
    assert sf.checkpoint.tree_equal(got, want)
