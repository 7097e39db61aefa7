"""States of several algorithms, of leaves and of containers without any."""

import optree
import pytest
import torch

import sparsefn as sf

MAKE = torch.Generator().manual_seed(0)

RANDOM = {
    path: torch.randn(shape, generator=MAKE)
    for path, shape in (("a", (6, 8)), ("b", (8, 4)), ("c", (5,)))
}

NESTED = {
    "a": {},
    "l": [(), {"v": torch.arange(12.0).reshape(3, 4)}],
    "w": torch.arange(1.0, 13.0).reshape(4, 3),
}

SGD = sf.optimizers.sgd(0.5, momentum=0.5)

COVERED = {
    "plain": lambda: sf.partition([("*", sf.gmp(0.5))]),
    "no leaf": lambda: sf.partition(
        [(lambda path, leaf: False, sf.ste(0.5)), ("*", sf.static(0.5))]
    ),
    "optimizer around": lambda: sf.with_optimizer(
        sf.partition([("*", sf.gmp(0.5))]), SGD
    ),
    "latents": lambda: sf.with_optimizer(
        sf.partition([("*", sf.reparametrised(sf.reparam.power(2.0), sf.static(0.5)))]),
        SGD,
    ),
    "scores": lambda: sf.with_optimizer(sf.supermask(0.5), SGD),
    "chain": lambda: sf.chain(
        sf.static(0.5, pattern=sf.patterns.channel(0)), sf.gmp(0.75)
    ),
    "sequence": lambda: sf.sequence(sf.gmp(0.5), sf.static(0.5)),
    "phases": lambda: sf.phases(
        [(0, sf.ste(0.5)), (1, sf.static(0.5, init="magnitude"))]
    ),
}


@pytest.mark.deep
# a part without leaves says so
@pytest.mark.filterwarnings("ignore:no leaf is sparsified")
@pytest.mark.parametrize("name", COVERED)
def test_parts_without_leaves_and_empty_trees_compile(name):
    torch._dynamo.reset()
    algorithm = COVERED[name]()
    state, grads = (
        algorithm.init(NESTED),
        optree.tree_map(lambda leaf: leaf * 0.25 - 1, NESTED),
    )
    compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")
    got, want = (
        compiled(state, grads, torch.tensor(1)),
        algorithm.update(state, grads, 1),
    )
    assert optree.tree_structure(got) == optree.tree_structure(want)
    assert sf.checkpoint.tree_equal(got, want)
