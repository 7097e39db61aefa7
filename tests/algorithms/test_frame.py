"""What holds for every algorithm: purity, the same bits everywhere, `vmap`,
`torch.compile`.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import optree
import pytest
import torch
import torchopt
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import sparsefn as sf

MAKE = torch.Generator().manual_seed(0)
DRAWN = {
    path: torch.randn(shape, generator=MAKE)
    for path, shape in (("w", (6, 8)), ("v", (5, 4)), ("b", (5,)))
}
EVERY = sf.every(2, start=1)
CUBIC = sf.schedules.polynomial(0.2, 0.8, 0, 6)


def granet(s, key):
    prune = sf.gmp(s, when=EVERY, init="dense", distribution=sf.budgets.global_())
    return sf.sequence(
        prune, sf.rigl("current", drop_fraction=0.3, when=EVERY, key=key)
    )


# (sparsity, key) -> algorithm; the sparsity may be a 0-d tensor and the key batched.
ALGORITHMS = {
    "dense": lambda s, key: sf.dense(),
    "static": lambda s, key: sf.static(s, key=key),
    "one_shot": lambda s, key: sf.one_shot(
        s, score=sf.scores.sum(sf.scores.saliency), when=sf.at([2])
    ),
    "gmp": lambda s, key: sf.gmp(
        s, when=EVERY, init="dense", pruned="keep", regrow=True
    ),
    "gmp-global": lambda s, key: sf.gmp(
        s, when=EVERY, init="dense", distribution=sf.budgets.global_(floor=0.1)
    ),
    "iterative": lambda s, key: sf.iterative(s, when=EVERY),
    "set": lambda s, key: sf.set(s, drop_fraction=0.3, when=EVERY, key=key),
    "rigl": lambda s, key: sf.rigl(
        s, drop_fraction=sf.schedules.cosine_decay(0.5, 6), when=EVERY, key=key
    ),
    "rigl-erk": lambda s, key: sf.rigl(
        s, distribution=sf.budgets.erk(), when=EVERY, key=key
    ),
    "rigl-rows": lambda s, key: sf.rigl(
        s, pattern=sf.patterns.row_balanced(), when=EVERY, key=key
    ),
    "rigl-global": lambda s, key: sf.rigl(
        s, distribution=sf.budgets.global_(floor=0.1), when=EVERY, key=key
    ),
    "snfs": lambda s, key: sf.snfs(s, drop_fraction=0.3, when=EVERY, key=key),
    "drop-ema": lambda s, key: sf.drop_grow(
        s,
        drop=sf.scores.ema(sf.scores.magnitude, 0.5),
        grow=sf.scores.momentum(0.5),
        when=EVERY,
        key=key,
    ),
    "ste": lambda s, key: sf.ste(s),
    "ste-ema": lambda s, key: sf.ste(s, score=sf.scores.ema(sf.scores.magnitude, 0.5)),
    "soft_threshold": lambda s, key: sf.reparametrised(
        sf.reparam.soft_threshold(init=-1.0), sf.static(s, key=key)
    ),
    "power": lambda s, key: sf.reparametrised(
        sf.reparam.power(2.0), sf.rigl(s, when=EVERY, key=key)
    ),
    "sequence": granet,
    "phases": lambda s, key: sf.phases(
        [(0, sf.static(s, key=key)), (2, sf.rigl(s, when=EVERY, key=key))]
    ),
    "partition": lambda s, key: sf.partition(
        [("w", sf.rigl(s, when=EVERY, key=key)), ("v", sf.ste(s))]
    ),
    "chain": lambda s, key: sf.chain(
        sf.static(0.5, pattern=sf.patterns.channel(0), key=key),
        sf.rigl(s, when=EVERY, key=key),
    ),
    "terms": lambda s, key: sf.with_terms(
        sf.set(s, when=EVERY, key=key), sf.terms.l2(0.1), sf.terms.noise(0.1, key)
    ),
}
VMAPPED = [name for name in ALGORITHMS if name != "dense"]
COMPILED = [
    "gmp",
    "rigl",
    "snfs",
    "ste",
    "power",
    "sequence",
    "phases",
    "partition",
    "chain",
]
STEPS = 6


def start(dtype=torch.float32):
    return {path: leaf.to(dtype) for path, leaf in DRAWN.items()}


def slopes(params):
    """A dense gradient of exactly rounded operations alone, so that batches have the
    same bits.
    """
    return optree.tree_map(lambda p: 0.5 * p * (p - 1.0) * (p + 1.25) + 0.125, params)


def make(name, optimizer=None, sparsity=0.5, seed=3):
    algorithm = ALGORITHMS[name](sparsity, sf.random.key(seed))
    sgd = sf.optimizers.sgd(0.05, momentum=0.9, weight_decay=0.01)
    return sf.with_optimizer(algorithm, optimizer or sgd, skip=sf.never())


def walk(algorithm, steps=STEPS, params=None, as_step=int, update=None):
    """The states after each of some updates."""
    state, seen = algorithm.init(start() if params is None else params), []
    for step in range(steps):
        state = (update or algorithm.update)(
            state, slopes(sf.effective(state)), as_step(step)
        )
        seen.append(state)
    return seen


# ---- purity --------------------------------------------------------------------------


def fingerprint(tree):
    return [(leaf, leaf._version, leaf.clone()) for leaf in optree.tree_leaves(tree)]


def unchanged(prints):
    return all(
        leaf._version == version and torch.equal(leaf, copy)
        for leaf, version, copy in prints
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_argument_is_changed_and_no_global_generator_advanced(name):
    algorithm, params = make(name), start()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    state, watched = algorithm.init(params), fingerprint(params)
    for step in range(STEPS):
        grads = slopes(sf.effective(state))
        watched += fingerprint((state, grads))
        state = algorithm.update(state, grads, step)
        assert unchanged(watched), step
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


@pytest.mark.parametrize("name", ALGORITHMS)
def test_states_hold_tensors_alone_and_keep_their_structure(name):
    algorithm = make(name)
    first = algorithm.init(start())
    for state in [first, *walk(algorithm)]:
        leaves, treedef = optree.tree_flatten(state, none_is_leaf=True)
        assert all(
            type(leaf) is torch.Tensor and not leaf.requires_grad for leaf in leaves
        )
        assert treedef == optree.tree_structure(first, none_is_leaf=True)
        assert optree.tree_structure(state.masks) == optree.tree_structure(state.params)
        assert [leaf.shape for leaf in leaves] == [
            leaf.shape for leaf in optree.tree_leaves(first)
        ]
        assert [leaf.dtype for leaf in leaves] == [
            leaf.dtype for leaf in optree.tree_leaves(first)
        ]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_state_holds_no_memory_of_gradients_that_change_later(name):
    # Outputs may share memory with inputs, but never with those that a caller reuses
    # for the next batch.
    algorithm = make(name)
    state = algorithm.init(start())
    for step in range(STEPS):
        grads = slopes(sf.effective(state))
        kept = optree.tree_map(torch.clone, new := algorithm.update(state, grads, step))
        optree.tree_map_(lambda g: g.fill_(float("nan")), grads)
        assert sf.checkpoint.tree_equal(new, kept)
        state = new


# ---- the same bits everywhere --------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_int_and_tensor_steps_give_the_same_bits(name):
    ints, tensors = walk(make(name)), walk(make(name), as_step=torch.tensor)
    assert sf.checkpoint.tree_equal(ints, tensors)


def reordered(tree):
    return dict(reversed(tree.items()))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_order_in_which_a_dict_was_filled_does_not_matter(name):
    algorithm = make(name)
    state, other = algorithm.init(start()), algorithm.init(reordered(start()))
    for step in range(STEPS):
        state = algorithm.update(state, slopes(sf.effective(state)), step)
        other = algorithm.update(other, reordered(slopes(sf.effective(other))), step)
        assert sf.checkpoint.tree_equal(state, other)


@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if "global" not in name and name != "sequence"]
)
def test_a_leaf_does_not_depend_on_its_place_in_the_tree(name):
    # An OrderedDict keeps its order: leaves come in another one, and draws go by path
    # all the same.
    states = []
    for params in (start(), OrderedDict(reversed(start().items()))):
        algorithm = make(name)
        states.append(dict(walk(algorithm, params=params)[-1].params))
    assert sf.checkpoint.tree_equal(*states)


def digests(threads):
    """One hash of the bits of a whole run for each algorithm, on leaves large enough to
    be split over threads.
    """
    torch.set_num_threads(threads)
    wide = {
        "w": torch.linspace(-2, 2, 48_000).reshape(160, 300),
        "v": torch.linspace(-1, 2, 40_000).reshape(400, 100),
    }
    found = {}
    # The slope of a threshold is a sum over its leaf by autograd, which splits it over
    # threads.
    for name in sorted(ALGORITHMS.keys() - {"soft_threshold"}):
        leaves = optree.tree_leaves(walk(make(name), steps=3, params=wide)[-1])
        found[name] = hashlib.sha256(
            b"".join(leaf.numpy().tobytes() for leaf in leaves)
        ).hexdigest()
    return found


SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import test_frame
print(json.dumps([test_frame.digests(4), hash("w")]))
"""


@pytest.mark.deep
def test_threads_and_hash_seeds_do_not_matter():
    here = Path(__file__).parent
    paths = json.dumps([str(here), str(here.parents[1])])
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, paths],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    other, reseeded = json.loads(done.stdout)
    assert hash("w") != reseeded
    assert digests(1) == other


# Names that states, too, have for what they hold.
@pytest.mark.parametrize(
    "word", ["support", "latent", "masks", "scores", "0", "sum", "drop", "params"]
)
@pytest.mark.parametrize(
    "name", ["gmp", "gmp-global", "iterative", "one_shot", "ste", "power-2"]
)
def test_the_names_of_the_leaves_do_not_matter(name, word):
    algorithm = (
        make(name)
        if name != "power-2"
        else sf.reparametrised(sf.reparam.power(2.0), sf.ste(0.5))
    )
    expected = walk(algorithm, params={"w": start()["w"]})[-1]
    state = walk(algorithm, params={word: start()["w"]})[-1]
    assert torch.equal(state.params[word], expected.params["w"])
    assert torch.equal(state.masks[word], expected.masks["w"])
    optree.tree_map(
        lambda a, b: None, algorithm.view.get(state), algorithm.view.support(state)
    )


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 1.0])
# their floors forbid 1.0
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if "global" not in name])
def test_empty_leaves_and_those_of_one_element_are_leaves(name, sparsity):
    params = {
        "w": torch.randn(1, 1),
        "v": torch.zeros(0, 4),
        "e": torch.randn(3, 1, 2),
        "b": torch.randn(3),
    }
    state = walk(make(name, sparsity=sparsity), params=params)[-1]
    assert {path: mask.shape for path, mask in state.masks.items() if mask.ndim} == {
        path: params[path].shape for path in sparse_paths(name)
    }
    exact = {
        "static",
        "set",
        "rigl",
        "rigl-erk",
        "snfs",
        "drop-ema",
        "ste",
        "ste-ema",
        "sequence",
    }
    if name in exact:
        for path in ("w", "e") if sparsity != 0.5 else ():
            assert int(state.masks[path].sum()) == round(
                (1 - sparsity) * params[path].numel()
            )


def sparse_paths(name):
    """The leaves that an algorithm sparsifies among those of the test above."""
    return {"dense": set(), "partition": {"w", "v"}}.get(name, {"w", "v", "e"})


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_float_dtype_works_and_is_kept(name, dtype):
    states = walk(make(name), params=start(dtype))
    assert {leaf.dtype for leaf in states[-1].params.values()} == {dtype}
    assert all(leaf.isfinite().all() for leaf in states[-1].params.values())
    counts, expected = (
        [sf.masks.n_kept(state.masks) for state in run]
        for run in (states, walk(make(name), params=start()))
    )
    # whose counts follow the values
    assert counts == expected or name in ("soft_threshold", "chain")


# ---- what the masks mean -------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_effective_weights_are_zero_off_the_masks_and_dense_leaves_are_never_masked(
    name,
):
    for state in walk(make(name)):
        assert state.masks["b"].ndim == 0
        for path, weights in sf.effective(state).items():
            assert not weights[~state.masks[path].expand_as(weights)].any()
        view = make(name).view
        assert optree.tree_structure(view.support(state)) == optree.tree_structure(
            view.get(state)
        )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ALGORITHMS
        if name not in ("ste", "ste-ema", "gmp", "partition", "power")
    ],
)
def test_hard_masks_keep_zeros_in_the_params_themselves(name):
    for state in walk(make(name)):
        assert sf.checkpoint.tree_equal(state.params, sf.effective(state))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masks_are_made_the_same_with_outside_optimizers(name):
    # `with_params` puts weights in: the same run, with the optimizer's loop outside.
    algorithm, optimizer = (
        ALGORITHMS[name](0.5, sf.random.key(3)),
        sf.optimizers.sgd(0.05),
    )
    if name in ("soft_threshold", "power"):
        with pytest.raises(
            ValueError, match="this state trains latents, which follow from no params"
        ):
            sf.with_params(algorithm.init(start()), start())
        return
    inside = walk(make(name, optimizer))
    state = algorithm.init(start())
    opt = optimizer.init(state.params)
    for step, expected in enumerate(inside):
        grads = slopes(sf.effective(state))
        masked = algorithm.view.grads(state, grads, step)
        updates, opt = optimizer.update(masked, opt, params=state.params)
        state = sf.with_params(state, optree.tree_map(torch.add, state.params, updates))
        state = algorithm.update(state, grads, step)
        assert sf.checkpoint.tree_equal(state, expected._replace(opt=()))


# ---- vmap ----------------------------------------------------------------------------

SEEDS, LEVELS = (3, 11), (0.3, 0.6)


def member(name, key, level, params, steps, optimizer=None):
    adam = sf.optimizers.adam(0.05, weight_decay=0.01)
    algorithm = sf.with_optimizer(
        ALGORITHMS[name](level, key), optimizer or adam, skip=sf.never()
    )
    return walk(algorithm, steps=len(steps), params=params, as_step=lambda i: steps[i])


def assert_members(batch, loop):
    """Masks bit for bit, everything else to rounding."""
    for i, single in enumerate(loop):
        one = sf.ensemble.member(batch, i)
        assert sf.checkpoint.tree_equal(one.masks, single.masks), i
        torch.testing.assert_close(
            optree.tree_leaves(one), optree.tree_leaves(single), rtol=1e-5, atol=1e-6
        )


def test_an_algorithm_may_make_the_first_masks():
    # Rounds of pruning from a random start, and RigL from ERK masks made elsewhere.
    first = sf.static(0.5, distribution=sf.budgets.erk(), key=sf.random.key(3))
    masks = first.init(DRAWN).masks
    rounds = sf.iterative(0.25, init=first)
    state = rounds.init(DRAWN)
    assert sf.checkpoint.tree_equal(state.masks, masks)
    assert sf.checkpoint.tree_equal(state.params, sf.apply_masks(DRAWN, masks))
    n = int(masks["w"].sum())
    assert int(rounds.update(state, DRAWN, 0).masks["w"].sum()) == n - round(n / 4)
    for make in (sf.static, sf.gmp, sf.ste, sf.rigl, sf.set):
        assert sf.checkpoint.tree_equal(make(0.5, init=first).init(DRAWN).masks, masks)
    inside = sf.chain(
        sf.static(0.5, pattern=sf.patterns.channel(0)), sf.gmp(0.5, init=first)
    )
    both = inside.init(DRAWN)
    assert not (both.masks["w"] & ~masks["w"]).any()


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_over_seeds_and_sparsities_equals_the_loop(name):
    grid = [(seed, level) for seed in SEEDS for level in LEVELS]
    keys = torch.stack([sf.random.key(seed) for seed, _ in grid])
    levels = torch.tensor([level for _, level in grid], dtype=torch.float64)
    run = lambda key, level: member(name, key, level, start(), range(4))  # noqa: E731
    batch = torch.func.vmap(run)(keys, levels)
    singles = [
        member(name, sf.random.key(seed), level, start(), range(4))
        for seed, level in grid
    ]
    for step in range(4):
        assert_members(batch[step], [single[step] for single in singles])
    sizes = {int(sf.masks.n_kept(single[-1].masks)) for single in singles}
    assert len(sizes) > 1 or name == "soft_threshold"


@pytest.mark.parametrize(
    "name", ["rigl", "snfs", "one_shot", "sequence", "phases", "chain"]
)
def test_members_may_stand_at_different_steps(name):
    # Some fire, some do not: what an int skips is computed and thrown away.
    algorithm = ALGORITHMS[name](0.5, sf.random.key(3))
    algorithm = sf.with_optimizer(
        algorithm,
        sf.optimizers.sgd(0.05, momentum=0.9),
        skip=sf.at([1]),
        reset=sf.at([3]),
    )
    ints = walk(algorithm)
    before = [algorithm.init(start()), *ints[:-1]]
    grads = [slopes(sf.effective(state)) for state in before]
    stacked = sf.ensemble.stack(before), sf.ensemble.stack(grads), torch.arange(STEPS)
    assert_members(torch.func.vmap(algorithm.update)(*stacked), ints)


def test_nested_vmap_over_levels_and_seeds():
    keys = torch.stack([sf.random.key(seed) for seed in SEEDS])
    levels = torch.tensor(LEVELS, dtype=torch.float64)

    def run(level, key):
        return member("rigl", key, level, start(), range(4))[-1]

    grid = torch.func.vmap(
        lambda level: torch.func.vmap(lambda key: run(level, key))(keys)
    )(levels)
    for i, level in enumerate(LEVELS):
        singles = [
            member("rigl", sf.random.key(seed), level, start(), range(4))[-1]
            for seed in SEEDS
        ]
        assert_members(sf.ensemble.member(grid, i), singles)


# torchopt's adam, in aten::addcmul_
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "optimizer",
    [lambda: torchopt.adam(0.05), lambda: torchopt.sgd(0.05, momentum=0.9)],
    ids=["adam", "sgd"],
)
def test_vmap_with_torchopt(optimizer):
    keys = torch.stack([sf.random.key(seed) for seed in SEEDS])
    batch = torch.func.vmap(
        lambda key: member("rigl", key, 0.5, start(), range(4), optimizer())[-1]
    )(keys)
    assert_members(
        batch,
        [
            member("rigl", sf.random.key(s), 0.5, start(), range(4), optimizer())[-1]
            for s in SEEDS
        ],
    )


def test_updates_are_differentiable():
    # The sum of the weights after two steps of SGD, by the learning rate.
    def after(lr):
        return sum(
            leaf.sum()
            for leaf in walk(make("rigl", sf.optimizers.sgd(lr)), steps=2)[
                -1
            ].params.values()
        )

    lr = torch.tensor(0.05, dtype=torch.float64)
    slope, h = torch.func.grad(after)(lr), 1e-3
    assert float(slope) == pytest.approx(
        float((after(lr + h) - after(lr - h)) / (2 * h)), rel=1e-2
    )


# ---- torch.compile -------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "as_step"), [*((name, torch.tensor) for name in COMPILED), ("rigl", int)]
)
def test_compiled_updates_equal_eager_ones_and_are_compiled_once(name, as_step):
    # An int is taken for a constant the first time and for a number from then on: two
    # graphs in all.
    params = {
        path: leaf
        for path, leaf in start().items()
        if path != "v" or name in ("snfs", "partition")
    }
    optimizer, counter = (
        sf.optimizers.sgd(0.05, momentum=0.9),
        CompileCounterWithBackend("eager"),
    )
    algorithm = ALGORITHMS[name](0.5, sf.random.key(3))
    algorithm = sf.with_optimizer(
        algorithm, optimizer, skip=sf.at([1]), reset=sf.at([3])
    )
    expected = walk(algorithm, steps=7, params=params)
    update = torch.compile(algorithm.update, fullgraph=True, backend=counter)
    states = walk(algorithm, steps=7, params=params, as_step=as_step, update=update)
    assert counter.frame_count == (2 if as_step is int else 1)
    for eager, compiled in zip(expected, states, strict=True):
        assert sf.checkpoint.tree_equal(eager, compiled)


# when -> algorithm
CHANGING = {
    "gmp": lambda when: sf.gmp(CUBIC, when=when),
    "one_shot": lambda when: sf.one_shot(0.5, sf.scores.saliency, when=when),
    "iterative": lambda when: sf.iterative(0.2, when=when),
    "ste": lambda when: sf.ste(0.5, when=when),
    "supermask": lambda when: sf.supermask(0.5, when=when),
    "set": lambda when: sf.set(0.5, drop_fraction=0.3, when=when, key=sf.random.key(1)),
    "rigl": lambda when: sf.rigl(0.5, steps=8, when=when),
    "snfs": lambda when: sf.snfs(0.5, when=when),
    "power": lambda when: sf.reparametrised(
        sf.reparam.power(2.0), sf.rigl(0.5, when=when)
    ),
    "sequence": lambda when: sf.sequence(
        sf.gmp(CUBIC, when=when, init="dense"),
        sf.rigl("current", drop_fraction=0.3, when=when),
    ),
    "partition": lambda when: sf.partition(
        [("w", sf.rigl(0.5, when=when)), ("v", sf.ste(0.5, when=when))]
    ),
    "chain": lambda when: sf.chain(
        sf.static(0.5, pattern=sf.patterns.channel(0)), sf.rigl(0.5, when=when)
    ),
    "rewinding": lambda when: sf.rewinding(
        sf.iterative(0.2, when=when), to=sf.never(), when=when
    ),
}


def recording(graphs):
    """A backend that runs the operations of a graph as they are, and notes them."""

    def record(graph, inputs):
        graphs.append(
            [
                str(node.target)
                for node in graph.graph.nodes
                if node.op == "call_function"
            ]
        )
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=record)


def changing(name, when):
    """An algorithm with an optimizer, and few params, as compiling takes long."""
    params = {
        path: leaf
        for path, leaf in start().items()
        if path != "v" or name in ("snfs", "partition")
    }
    sgd = sf.optimizers.sgd(0.05, momentum=0.9)
    return sf.with_optimizer(CHANGING[name](when), sgd, skip=sf.never()), params


def targets_of(update, state, step):
    """The operations of a compiled update."""
    graphs = []
    compiled = torch.compile(update, fullgraph=True, backend=recording(graphs))
    compiled(state, slopes(sf.effective(state)), step)
    (targets,) = graphs
    return targets


@pytest.mark.deep
@pytest.mark.parametrize("name", CHANGING)
def test_a_quiet_update_holds_nothing_of_a_change(name):
    algorithm, params = changing(name, sf.never())
    state = algorithm.init(params)
    targets = targets_of(algorithm.update, state, torch.tensor(3))
    own = {target for target in targets if "sparsefn." in target}
    assert own <= {"sparsefn.mask_bytes.default"}
    assert not any(
        word in target for target in targets for word in ("sort", "topk", "kthvalue")
    )


@pytest.mark.deep
@pytest.mark.parametrize("name", ["rigl", "partition", "rewinding"])
def test_a_trigger_outside_chooses_between_two_graphs_with_the_eager_bits(name):
    algorithm, params = changing(name, EVERY)
    quiet, _ = changing(name, sf.never())
    graphs = {"changing": [], "quiet": []}
    compiled = {
        key: torch.compile(part.update, fullgraph=True, backend=recording(graphs[key]))
        for key, part in (("changing", algorithm), ("quiet", quiet))
    }

    def update(state, grads, step):
        return compiled["changing" if EVERY(int(step)) else "quiet"](state, grads, step)

    expected = walk(algorithm, steps=7, params=params)
    states = walk(
        algorithm, steps=7, params=params, as_step=torch.tensor, update=update
    )
    assert all(map(sf.checkpoint.tree_equal, expected, states))
    assert [len(graphs["changing"]), len(graphs["quiet"])] == [1, 1]
    assert "sparsefn.winners.default" in graphs["changing"][0]
    assert len(graphs["quiet"][0]) < len(graphs["changing"][0])


@pytest.mark.deep
def test_a_quiet_update_serves_ints_that_grow():
    counter = CompileCounterWithBackend("eager")
    quiet = sf.with_optimizer(
        sf.rigl(0.5, steps=8, when=sf.never()), sf.optimizers.adam(0.05)
    )
    states = walk(
        quiet,
        steps=7,
        update=torch.compile(quiet.update, fullgraph=True, backend=counter),
    )
    assert counter.frame_count <= 2  # an int is taken for a constant the first time
    assert all(map(sf.checkpoint.tree_equal, states, walk(quiet, steps=7)))


@pytest.mark.deep
def test_masks_that_stay_are_handed_back_as_they_are():
    algorithm = sf.with_optimizer(
        sf.rigl(0.5, when=sf.never()), sf.optimizers.sgd(0.05)
    )
    state = algorithm.init(start())
    update = torch.compile(algorithm.update, fullgraph=True, backend="aot_eager")
    new = update(state, slopes(state.params), torch.tensor(1))
    assert all(new.masks[path] is mask for path, mask in state.masks.items())


@pytest.mark.deep
def test_a_compiled_ensemble_equals_the_loop():
    keys, params = (
        torch.stack([sf.random.key(seed) for seed in SEEDS]),
        {"w": start()["w"]},
    )

    def build(key):
        return sf.with_optimizer(ALGORITHMS["rigl"](0.5, key), sf.optimizers.sgd(0.05))

    def advance(key, state, step):
        return build(key).update(state, slopes(sf.effective(state)), step)

    update = torch.compile(
        lambda state, step: torch.func.vmap(advance, in_dims=(0, 0, None))(
            keys, state, step
        ),
        fullgraph=True,
        backend="eager",
    )
    state = torch.func.vmap(lambda key: build(key).init(params))(keys)
    for step in range(4):
        state = update(state, torch.tensor(step))
    assert_members(
        state,
        [
            walk(build(sf.random.key(seed)), steps=4, params=params)[-1]
            for seed in SEEDS
        ],
    )


@pytest.mark.deep
def test_inductor_code_gives_the_same_masks():
    params = {"w": start()["w"]}
    algorithm = make("rigl", sf.optimizers.sgd(0.05))
    update = torch.compile(algorithm.update, fullgraph=True)
    expected = walk(algorithm, params=params)
    states = walk(algorithm, params=params, as_step=torch.tensor, update=update)
    for eager, compiled in zip(expected, states, strict=True):
        assert sf.checkpoint.tree_equal(eager.masks, compiled.masks)
        torch.testing.assert_close(
            optree.tree_leaves(compiled), optree.tree_leaves(eager)
        )


# ---- gradients that are not there ----------------------------------------------------


def test_no_gradients_are_asked_for_where_none_is_read():
    params = start()
    algorithms = [
        sf.dense(),
        sf.gmp(0.5),
        sf.set(0.5, when=sf.always()),
        sf.iterative(0.2),
        sf.chain(sf.static(0.5), sf.one_shot(0.75)),
        sf.sequence(sf.one_shot(0.5), sf.set("current", when=sf.always())),
        sf.phases([(0, sf.static(0.5)), (1, sf.dense())]),
        sf.partition([("*", sf.gmp(0.5))]),
        sf.supermask(0.5),
        sf.reparametrised(sf.reparam.power(2.0), sf.gmp(0.5)),
    ]
    for algorithm in algorithms:
        without = given = algorithm.init(params)
        for step in range(3):
            given, without = (
                algorithm.update(given, slopes(params), step),
                algorithm.update(without, None, step),
            )
        assert sf.checkpoint.tree_equal(given, without)


def test_missing_gradients_are_named():
    params = {"w": torch.ones(4, 4), "b": torch.ones(4)}
    for algorithm, error in (
        (
            sf.rigl(0.5, when=sf.always()),
            "scores.gradient reads gradients, got grads=None",
        ),
        (sf.snfs(0.5), "scores.momentum reads gradients, got grads=None"),
        (
            sf.with_optimizer(sf.static(0.5), sf.optimizers.sgd(0.1)),
            "with_optimizer: the optimizer reads gradients, got grads=None",
        ),
    ):
        with pytest.raises(ValueError, match=error):
            algorithm.update(algorithm.init(params), None, 0)
    text = (
        "expected a gradient for every param, got None at 'b': a frozen param, or one "
        "that the loss does not use"
    )
    with pytest.raises(ValueError, match=text):
        sf.rigl(0.5).update(sf.rigl(0.5).init(params), {"w": params["w"], "b": None}, 0)
    skipped = sf.with_optimizer(sf.gmp(0.5), sf.optimizers.sgd(0.1), skip=sf.always())
    state = skipped.init(params)
    assert sf.checkpoint.tree_equal(skipped.update(state, None, 0).params, state.params)
