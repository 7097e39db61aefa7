"""A structure that is remembered is never one of other leaves."""

from itertools import product

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch.utils.flop_counter import FlopCounterMode

import sparsefn as sf
from sparsefn._engine.leaves import lists
from sparsefn.core.tree import leaves_of
from sparsefn.masks.patterns.layouts import UnitLayouts

WAYS = ["eager", "vmap", "tracked", "donated", "mode"]
SHAPES = [(4, 4), (2, 8), (3, 3), (70, 70), (1, 4)]
MAKERS = {
    "rigl": lambda: sf.rigl(0.5, when=sf.every(2), drop_fraction=0.3),
    "gmp": lambda: sf.gmp(lambda step: 0.1 * step, when=sf.always()),
    "set": lambda: sf.set(0.5, when=sf.always(), key=sf.random.key(1)),
    "blocks": lambda: sf.gmp(0.5, when=sf.always(), pattern=sf.patterns.block((2,))),
    "adam": lambda: sf.with_optimizer(
        sf.rigl(0.5, when=sf.every(2)), sf.optimizers.adam(0.1)
    ),
}


class OneAlgorithm(RuleBasedStateMachine):
    """One object meets trees of other shapes, dtypes and strides, under transforms and
    modes, and does what one does that was made for each.
    """

    def __init__(self):
        super().__init__()
        # two leaves are a pack
        self.fewest = lists.FEWEST
        lists.FEWEST = 2
        self.algorithms = {name: make() for name, make in MAKERS.items()}
        self.draw = torch.Generator().manual_seed(0)
        self.params = {}

    @rule(
        shapes=st.lists(st.sampled_from(SHAPES), min_size=2, max_size=3),
        names=st.sampled_from(["abc", "xyz"]),
        dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        turned=st.booleans(),
    )
    def other_params(self, shapes, names, dtype, turned):
        self.params = {}
        for name, shape in zip(names, shapes, strict=False):
            leaf = torch.randn(shape, generator=self.draw).to(dtype)
            self.params[name] = leaf.mT if turned and leaf.ndim == 2 else leaf

    def teardown(self):
        lists.FEWEST = self.fewest

    @precondition(lambda self: self.params)
    @rule(
        step=st.integers(0, 4),
        ways=st.lists(st.sampled_from(WAYS), min_size=2, max_size=3, unique=True),
    )
    def update(self, step, ways):
        grads = {path: x.sin() for path, x in self.params.items()}
        for way, (name, algorithm) in product(ways, self.algorithms.items()):
            got = updated(algorithm, way, self.params, grads, step)
            want = updated(MAKERS[name](), way, self.params, grads, step)
            for x, y in zip(leaves_of(got), leaves_of(want), strict=True):
                assert x.dtype == y.dtype and x.stride() == y.stride()
                assert torch.equal(x.detach(), y.detach()), (name, way)


def updated(algorithm, way, params, grads, step):
    state = algorithm.init(params)
    if way == "donated":
        return sf.donated(algorithm).update(state, grads, step)
    if way == "tracked":
        grads = {path: x.requires_grad_() for path, x in grads.items()}
    if way == "mode":
        with FlopCounterMode(display=False):
            return algorithm.update(state, grads, step)
    if way == "vmap":
        members = torch.arange(2.0)

        def one(member):
            moved = {p: x + member.to(x.dtype) for p, x in grads.items()}
            return algorithm.update(state, moved, step)

        return torch.vmap(one)(members)
    return algorithm.update(state, grads, step)


TestOneAlgorithm = OneAlgorithm.TestCase
TestOneAlgorithm.settings = settings(
    max_examples=10, stateful_step_count=5, deadline=None
)


def test_the_table_is_bounded():
    layouts = UnitLayouts(sf.patterns.unstructured())
    for n in range(1, 10_000):
        assert layouts.of({"w": torch.empty(n, device="meta")}) is not None
        assert len(layouts.known) <= layouts.most


def test_counts_of_the_last_sparsity_are_kept_and_no_tensors():
    asked = []

    def counts(shapes, sparsity):
        asked.append(sparsity)
        return dict.fromkeys(shapes, int(16 * sparsity))

    levels = [0.5, 0.5, 0.25, 0.25, 0.5]
    algorithm = sf.gmp(lambda step: levels[step], distribution=counts)
    leaves = {"w": torch.randn(4, 4)}
    state = algorithm.init(leaves)
    asked.clear()
    for step in range(len(levels)):
        algorithm.update(state, leaves, step)
    assert asked == [0.5, 0.25, 0.5]


def test_leaves_that_something_hides_are_not_remembered():
    layouts = UnitLayouts(sf.patterns.unstructured())
    leaves = {path: torch.ones(2) for path in "ab"}
    seen = []

    def look(x):
        seen.append(layouts.of(leaves) is None)
        return x

    look(0)
    torch.vmap(look)(torch.ones(1))
    with FlopCounterMode(display=False):
        look(0)
    assert seen == [False, True, True]
    assert layouts.of({"a": torch.nn.Parameter(torch.ones(2))}) is None


def test_an_error_is_raised_each_time():
    layouts = UnitLayouts(sf.patterns.nm(2, 4))
    for _ in range(2):
        with pytest.raises(ValueError, match="divisible by 4"):
            layouts.of({"w": torch.ones(3)})
