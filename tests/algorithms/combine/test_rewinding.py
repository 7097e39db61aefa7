"""`rewinding`: weights go back, masks stay, moments restart."""

import itertools

import optree
import pytest
import torch

import sparsefn as sf

WEIGHTS = ("a.weight", "b.weight")
ROUND = sf.every(5, start=5)


def start(dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    return {
        "a.bias": torch.randn(6, generator=make, dtype=dtype),
        "a.weight": torch.randn(6, 8, generator=make, dtype=dtype),
        "b.weight": torch.randn(4, 6, generator=make, dtype=dtype),
    }


def slope(state):
    return optree.tree_map(lambda w: torch.cos(3 * w), sf.effective(state))


def lottery(**options):
    pruned = sf.iterative(0.2, when=ROUND, distribution=sf.budgets.global_(), **options)
    return sf.rewinding(pruned, to=sf.at([2]), when=ROUND)


def test_lottery_tickets_are_nested_and_their_weights_those_of_step_k():
    algorithm = sf.with_optimizer(lottery(), sf.optimizers.adam(0.05), reset=ROUND)
    state, kept, masks, counts = algorithm.init(start()), None, [], []
    for step in range(16):
        state = algorithm.update(state, slope(state), step)
        if step == 2:
            kept = optree.tree_map(torch.clone, state.params)
        if step in (5, 10, 15):
            for path, mask in state.masks.items():
                assert torch.equal(
                    state.params[path], torch.where(mask, kept[path], 0.0)
                )
            assert not any(
                x.any() for x in optree.tree_leaves((state.opt.mu, state.opt.nu))
            )
            assert int(state.opt.count) == 0
            masks.append(state.masks)
            counts.append(int(sum(state.masks[path].sum() for path in WEIGHTS)))
    assert counts == [58, 46, 37]
    for old, new in itertools.pairwise(masks):
        assert not any((new[path] & ~old[path]).any() for path in WEIGHTS)


def test_it_is_the_loop_by_hand_bit_for_bit():
    optimizer = sf.optimizers.sgd(0.1, momentum=0.9)
    plain = sf.with_optimizer(
        sf.iterative(0.2, when=ROUND, distribution=sf.budgets.global_()), optimizer
    )
    algorithm = sf.with_optimizer(lottery(), optimizer, reset=ROUND)
    one, two, kept = algorithm.init(start()), plain.init(start()), None
    for step in range(12):
        one, two = (
            algorithm.update(one, slope(one), step),
            plain.update(two, slope(two), step),
        )
        if step == 2:
            kept = two.params
        if step in (5, 10):
            two = sf.with_params(two, kept)
            two = two._replace(opt=optimizer.init(two.params))
        assert sf.checkpoint.tree_equal(
            (one.params, one.masks, one.opt), (two.params, two.masks, two.opt)
        )


def test_without_a_step_to_go_back_to_it_is_the_start():
    algorithm = sf.rewinding(
        sf.one_shot(0.5, when=sf.at([3])), to=sf.never(), when=sf.at([3])
    )
    algorithm = sf.with_optimizer(algorithm, sf.optimizers.sgd(0.1))
    params = start()
    state = algorithm.init(params)
    for step in range(4):
        state = algorithm.update(state, slope(state), step)
    for path, mask in state.masks.items():
        assert torch.equal(state.params[path], torch.where(mask, params[path], 0.0))


@pytest.mark.parametrize("pruned", ["keep", "train"])
def test_weights_off_the_mask(pruned):
    algorithm = sf.rewinding(
        sf.one_shot(0.5, when=sf.at([1]), pruned=pruned), to=sf.never(), when=sf.at([1])
    )
    algorithm = sf.with_optimizer(algorithm, sf.optimizers.sgd(1.0))
    state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    for step in range(2):
        state = algorithm.update(state, {"w": torch.ones(1, 4)}, step)
    off = [2.0, 1.0] if pruned == "train" else [0.0, -1.0]
    assert state.params["w"].tolist() == [[4.0, 3.0, *off]]


def test_where_both_triggers_fire_nothing_goes_back():
    algorithm = sf.with_optimizer(
        sf.rewinding(sf.dense(), to=sf.at([1]), when=sf.at([1])), sf.optimizers.sgd(1.0)
    )
    state = algorithm.init({"w": torch.zeros(2)})
    for step in range(2):
        state = algorithm.update(state, {"w": torch.ones(2)}, step)
    assert (
        state.params["w"].tolist()
        == [-2.0, -2.0]
        == state.scores["rewind"]["w"].tolist()
    )


def test_no_two_leaves_of_a_state_share_memory():
    algorithm = sf.with_optimizer(lottery(), sf.optimizers.sgd(0.1), reset=ROUND)
    state = algorithm.init(start())
    for step in range(6):
        state = algorithm.update(state, slope(state), step)
        places = [
            x.data_ptr()
            for x in optree.tree_leaves((state.params, state.scores["rewind"]))
        ]
        assert len(set(places)) == len(places)


@pytest.mark.deep
def test_tensor_steps_vmap_and_compiled_code_have_the_same_bits():
    algorithm = sf.with_optimizer(
        lottery(), sf.optimizers.sgd(0.1, momentum=0.9), reset=ROUND
    )

    def run(update, steps):
        state = algorithm.init(start())
        for step in steps:
            state = update(state, optree.tree_map(torch.sin, state.params), step)
        return state

    expected = run(algorithm.update, range(7))
    assert sf.checkpoint.tree_equal(
        run(algorithm.update, map(torch.tensor, range(7))), expected
    )
    compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")
    assert sf.checkpoint.tree_equal(run(compiled, range(7)), expected)
    many = torch.vmap(algorithm.init)(
        optree.tree_map(lambda w: torch.stack([w, 2 * w]), start())
    )
    for step in range(7):
        many = torch.vmap(
            lambda s, step=step: algorithm.update(
                s, optree.tree_map(torch.sin, s.params), step
            )
        )(many)
    assert sf.checkpoint.tree_equal(sf.ensemble.member(many, 0), expected)


def test_attach_rewinds_a_module():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = model.weight.detach().clone()
    algorithm = sf.rewinding(
        sf.one_shot(0.5, when=sf.at([2])), to=sf.never(), when=sf.at([2])
    )
    sparse = sf.attach(algorithm, model, optimizer)
    for step in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        sparse.before_step()
        optimizer.step()
        optimizer.zero_grad()
        sparse.after_step(step)
    mask = sparse.state.masks["weight"]
    assert int(mask.sum()) == 6 and torch.equal(
        model.weight, torch.where(mask, first, 0.0)
    )


def test_inside_a_chain_and_donated():
    inner = sf.rewinding(
        sf.one_shot(0.5, when=sf.at([1])), to=sf.never(), when=sf.at([1])
    )
    algorithm = sf.chain(
        sf.static(0.5, init="magnitude", pattern=sf.patterns.channel(0)), inner
    )
    params = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    state = algorithm.init(params)
    for step in range(2):
        state = algorithm.update(state, params, step)
    assert state.params["w"].tolist() == [[0.0, 0.0], [3.0, 4.0]]
    whole = sf.with_optimizer(
        lottery(), sf.optimizers.sgd(0.1, momentum=0.9), reset=ROUND
    )
    one, two = whole.init(start()), sf.donated(whole).init(start())
    for step in range(7):
        one = whole.update(one, slope(one), step)
        two = sf.donated(whole).update(two, slope(two), step)
    assert sf.checkpoint.tree_equal(one, two)


def test_bad_arguments():
    with pytest.raises(
        ValueError,
        match=r"rewinding: the algorithm at position 0 has a view of its own",
    ):
        sf.rewinding(sf.supermask(0.5), to=sf.never(), when=sf.never())
    with pytest.raises(
        TypeError, match="rewinding: expected an Algorithm at position 0, got float"
    ):
        sf.rewinding(0.5, to=sf.never(), when=sf.never())
    with pytest.raises(TypeError, match="expected to to be a trigger"):
        sf.rewinding(sf.dense(), to=3, when=sf.never())
    owner = sf.with_optimizer(sf.dense(), sf.optimizers.sgd(0.1))
    with pytest.raises(
        ValueError,
        match="rewinding: the algorithm has an optimizer; put with_optimizer outermost",
    ):
        sf.rewinding(owner, to=sf.never(), when=sf.never()).init({"w": torch.ones(2)})
