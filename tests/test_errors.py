"""Bad input: one clear error each, that names the value, what was expected and the
path; nothing is changed.
"""

import math
import re

import optree
import pytest
import torch

import sparsefn as sf

W = torch.tensor([[4.0, 3.0, 2.0, 1.0], [0.5, 0.6, 0.7, 0.8]])
PARAMS = {"w": W, "b": torch.ones(2)}
NAN = math.nan
NET = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).eval()
GRAMS = {"w": {"count": torch.tensor(9), "gram": torch.eye(4)}}
LEFT_OUT = (
    "; leave it out with where=lambda path, leaf: sf.default_where(path, leaf) and "
    "path not in ['w']"
)


def groups_of(net):
    return sf.shrinking.groups(net, torch.ones(1, 8))


def init(algorithm, params=PARAMS):
    return algorithm.init(params)


def update(algorithm, params=PARAMS, grads=None, step=0):
    return algorithm.update(
        algorithm.init(params), params if grads is None else grads, step
    )


def opt(algorithm):
    return sf.with_optimizer(algorithm, sf.optimizers.sgd(0.1, momentum=0.9))


SPARSITY = [
    (1.5, ValueError, "expected {} in [0, 1], got 1.5"),
    (-0.1, ValueError, "expected {} in [0, 1], got -0.1"),
    (NAN, ValueError, "expected {} in [0, 1], got nan"),
    (
        1,
        TypeError,
        "expected {} to be a float in [0, 1], got the int 1; a fraction is written 1.0",
    ),
    (True, TypeError, "expected {} to be a float in [0, 1], got the bool True"),
    ("half", TypeError, "expected {} to be a float in [0, 1], got 'half'"),
    ([0.5], TypeError, "expected {} to be a float in [0, 1], got [0.5]"),
    (
        torch.tensor(1),
        TypeError,
        "expected {} to be a 0-d floating-point tensor, got torch.int64 of shape ()",
    ),
    (
        torch.ones(2),
        TypeError,
        "expected {} to be a 0-d floating-point tensor, got torch.float32 of shape "
        "(2,)",
    ),
]
TAKES_SPARSITY = {
    "static": sf.static,
    "one_shot": sf.one_shot,
    "gmp": sf.gmp,
    "ste": sf.ste,
    "set": sf.set,
    "rigl": sf.rigl,
    "snfs": sf.snfs,
}
TAKES_FRACTION = {
    "fraction": lambda value: sf.iterative(value, when=sf.always()),
    "drop_fraction": lambda value: sf.rigl(0.5, drop_fraction=value),
}


@pytest.mark.parametrize(
    ("value", "error", "message"), SPARSITY, ids=[str(row[0]) for row in SPARSITY]
)
@pytest.mark.parametrize("name", [*TAKES_SPARSITY, *TAKES_FRACTION])
def test_sparsities_and_fractions(name, value, error, message):
    make = TAKES_SPARSITY.get(name) or TAKES_FRACTION[name]
    message = message.format(name if name in TAKES_FRACTION else "sparsity")
    if isinstance(value, str) and name in ("set", "rigl", "snfs"):
        error, message = (
            ValueError,
            "expected sparsity to be a float, a schedule, a 0-d tensor or 'current', "
            "got 'half'",
        )
    with pytest.raises(error, match=re.escape(message)):
        make(value)


TABLE = {
    # sparsity that is no number
    "gmp None": (
        lambda: sf.gmp(None),
        TypeError,
        "expected sparsity to be a float in [0, 1], a schedule or a 0-d tensor, got "
        "None",
    ),
    "rigl None": (
        lambda: sf.rigl(None),
        TypeError,
        "expected sparsity to be a float, a schedule, a 0-d tensor or 'current', got "
        "None",
    ),
    "per cent": (
        lambda: sf.rigl(90),
        TypeError,
        "expected sparsity to be a float in [0, 1], got the int 90; 90 per cent is "
        "written 0.9",
    ),
    "per cent as a float": (
        lambda: sf.set(0.5, drop_fraction=30.0),
        ValueError,
        "expected drop_fraction in [0, 1], got 30.0; 30.0 per cent is written 0.3",
    ),
    "an int beyond all": (
        lambda: sf.static(1000),
        TypeError,
        "expected sparsity to be a float in [0, 1], got the int 1000",
    ),
    "a schedule of schedules": (
        lambda: init(sf.gmp(lambda step: sf.schedules.constant(step))),
        TypeError,
        "expected a sparsity schedule to give numbers, got function at step 0",
    ),
    "steps of 0": (
        lambda: sf.rigl(0.5, steps=0),
        ValueError,
        "drop_grow: expected steps >= 1, got 0",
    ),
    "steps of a float": (
        lambda: sf.set(0.5, steps=1e4),
        TypeError,
        "drop_grow: expected steps to be an int, got float",
    ),
    "steps of nothing": (
        lambda: sf.snfs(0.5, steps=1000, when=sf.every(10), drop_fraction=0.3),
        ValueError,
        "expected steps, or both when and drop_fraction, got all three: steps would "
        "say nothing",
    ),
    "static None": (
        lambda: init(sf.static(None)),
        ValueError,
        "init='random' needs a sparsity, got None; init may be an algorithm that has "
        "one",
    ),
    "iterative at random": (
        lambda: init(sf.iterative(0.2, init="random")),
        ValueError,
        "init='random' needs a sparsity, got None; init may be an algorithm that has "
        "one",
    ),
    "a sparsity for latents": (
        lambda: sf.reparametrised(0.8),
        TypeError,
        "reparametrised: expected a Reparametrisation such as sf.reparam.power(2.0), "
        "got 0.8; a sparsity belongs to inner, as in "
        "reparametrised(sf.reparam.power(2.0), sf.static(0.9))",
    ),
    "a sparsity for inner": (
        lambda: sf.reparametrised(sf.reparam.power(2.0), 0.8),
        TypeError,
        "reparametrised: expected an inner Algorithm, got float",
    ),
    "dense gradients of an optimizer": (
        lambda: sf.with_dense_gradients(sf.optimizers.sgd(0.1)),
        TypeError,
        "with_dense_gradients: expected an Algorithm, got Optimizer",
    ),
    "a number as a term": (
        lambda: sf.with_terms(sf.dense(), 0.1),
        TypeError,
        "expected the term at position 0 to be a function of (state, step), got 0.1",
    ),
    "effective weights of a dict": (
        lambda: sf.effective(PARAMS),
        TypeError,
        "effective: expected a State, as algorithm.init(params) gives it, got dict",
    ),
    "absolute of a name": (
        lambda: sf.scores.absolute("magnitude"),
        TypeError,
        "expected a score function of (state, grads, step), got str",
    ),
    "schedule of nan": (
        lambda: init(sf.gmp(lambda step: NAN)),
        ValueError,
        "expected a sparsity schedule to give numbers, got nan at step 0",
    ),
    "schedule of words": (
        lambda: init(sf.gmp(lambda step: "x")),
        TypeError,
        "expected a sparsity schedule to give numbers, got str at step 0",
    ),
    # patterns
    "n > m": (
        lambda: sf.patterns.nm(5, 4),
        ValueError,
        "nm: expected n <= m, got n=5, m=4",
    ),
    "axis not divisible": (
        lambda: init(sf.gmp(1 / 3, pattern=sf.patterns.nm(2, 3))),
        ValueError,
        "nm(2, 3, axis=-1): expected axis -1 divisible by 3, got shape (2, 4) at 'w'"
        + LEFT_OUT,
    ),
    "no such axis": (
        lambda: init(sf.gmp(0.5, pattern=sf.patterns.nm(2, 4, axis=2))),
        ValueError,
        "nm(2, 4, axis=2): no axis 2 in shape (2, 4) at 'w'; write axis=1, along "
        "which the inputs of convolutions lie",
    ),
    "n:m of another sparsity": (
        lambda: init(sf.gmp(0.9, pattern=sf.patterns.nm(2, 4))),
        ValueError,
        "nm(2, 4, axis=-1) fixes the sparsity at 0.5, got 0.9 at 'w'; give None in "
        "the place of the sparsity",
    ),
    "block of more dimensions": (
        lambda: init(sf.rigl(0.5, pattern=sf.patterns.block((1, 2, 2)))),
        ValueError,
        "block((1, 2, 2), reduce='mean'): expected 3 dimensions or more, got shape "
        "(2, 4) at 'w'" + LEFT_OUT,
    ),
    "unknown reduce": (
        lambda: sf.patterns.block((2, 2), reduce="median"),
        ValueError,
        "expected reduce to be one of 'mean', 'sum', 'max', 'min', 'l2' or a "
        "callable, got 'median'",
    ),
    "no pattern": (
        lambda: sf.gmp(0.5, pattern="2:4"),
        TypeError,
        "expected pattern to be one such as sf.patterns.nm(2, 4), got '2:4'",
    ),
    # distributions
    "no distribution": (
        lambda: sf.static(0.5, distribution="erk"),
        TypeError,
        "expected distribution to be one such as sf.budgets.erk(), got 'erk'",
    ),
    "1-D erdos_renyi": (
        lambda: init(sf.rigl(0.5, where="*", distribution=sf.budgets.erdos_renyi())),
        ValueError,
        "Erdos-Renyi budgets need leaves of 2 dimensions or more, got shape (2,) at "
        "'b': leave them out of `where`",
    ),
    "1-D erk": (
        lambda: init(sf.static(0.5, where="*", distribution=sf.budgets.erk())),
        ValueError,
        "Erdos-Renyi budgets need leaves of 2 dimensions or more, got shape (2,) at "
        "'b': leave them out of `where`",
    ),
    "floor too high": (
        lambda: init(sf.gmp(0.9, distribution=sf.budgets.global_(floor=0.5))),
        ValueError,
        "global_(floor=0.5, ceiling=1.0) keeps between 4 and 8 units, but the "
        "sparsity asks for 1 over 'w'",
    ),
    "ceiling too low": (
        lambda: update(sf.one_shot(0.1, distribution=sf.budgets.global_(ceiling=0.5))),
        ValueError,
        "global_(floor=0.0, ceiling=0.5) keeps between 0 and 4 units, but the "
        "sparsity asks for 7 over 'w'",
    ),
    "floor above ceiling": (
        lambda: sf.budgets.global_(0.5, 0.25),
        ValueError,
        "global_: expected floor <= ceiling, got 0.5 > 0.25",
    ),
    "global_ over groups": (
        lambda: init(
            sf.gmp(0.5, pattern=sf.patterns.nm(2, 4), distribution=sf.budgets.global_())
        ),
        ValueError,
        "global_ needs a pattern with one competing group a leaf, got nm(2, 4, "
        "axis=-1)",
    ),
    "by_path unknown": (
        lambda: init(sf.gmp(0.5, distribution=sf.budgets.by_path({"v": 0.5}))),
        ValueError,
        "by_path: no path matches 'v'; the paths are 'w'",
    ),
    # where
    "where unknown": (
        lambda: init(sf.gmp(0.5, where=["w", "*.weight"])),
        ValueError,
        "where: no path matches '*.weight'; the paths are 'b', 'w'",
    ),
    "where of another kind": (
        lambda: init(sf.gmp(0.5, where=3)),
        TypeError,
        "expected where to be a function, a glob or a sequence of globs, got int",
    ),
    # options
    "unknown init": (
        lambda: init(sf.static(0.5, init="ones")),
        ValueError,
        "expected init to be 'dense', 'random', 'bernoulli', 'magnitude', "
        "'from_zeros', 'checkerboard', an algorithm, a function of params or a masks "
        "tree, got 'ones'",
    ),
    "unknown pruned": (
        lambda: sf.rigl(0.5, pruned="freeze"),
        ValueError,
        "expected pruned to be 'zero', 'keep' or 'train', got 'freeze'",
    ),
    "when is a number": (
        lambda: sf.rigl(0.5, when=100),
        TypeError,
        "expected when to be a trigger such as every(100) or at([0]), got 100",
    ),
    "reset is a number": (
        lambda: sf.with_optimizer(sf.dense(), sf.optimizers.sgd(0.1), reset=5),
        TypeError,
        "expected reset to be a trigger such as every(100) or at([0]), got 5",
    ),
    "every(0)": (lambda: sf.every(0), ValueError, "every(n): expected n >= 1, got 0"),
    "key is a number": (
        lambda: init(sf.rigl(0.5, key=3)),
        TypeError,
        "expected a key from sf.random.key(seed), got int",
    ),
    "checkerboard of a tensor": (
        lambda: init(sf.static(torch.tensor(0.5), init="checkerboard")),
        TypeError,
        "init='checkerboard' needs a float sparsity, got a tensor",
    ),
    "iterative budgets": (
        lambda: sf.iterative(0.2, when=sf.always(), distribution=sf.budgets.erk()),
        ValueError,
        "iterative: expected distribution to be uniform() or global_(), which follow "
        "what remains",
    ),
    "iterative n:m": (
        lambda: sf.iterative(0.2, when=sf.always(), pattern=sf.patterns.nm(2, 4)),
        ValueError,
        "iterative: expected a pattern that leaves the count open, got nm(2, 4, "
        "axis=-1)",
    ),
    "iterative nothing": (
        lambda: sf.iterative(),
        TypeError,
        "iterative: expected a fraction of what remains, or a count of it, got neither",
    ),
    "iterative both": (
        lambda: sf.iterative(0.5, count=2),
        TypeError,
        "iterative: expected a fraction or a count, got both 0.5 and 2",
    ),
    "iterative count": (
        lambda: sf.iterative(count=2.0),
        TypeError,
        "iterative: expected count to be an int, a tensor or a function, got 2.0",
    ),
    "iterative count bool": (
        lambda: sf.iterative(count=True),
        TypeError,
        "iterative: expected count to be an int, a tensor or a function, got True",
    ),
    "iterative count negative": (
        lambda: sf.iterative(count=-1),
        ValueError,
        "iterative: expected count >= 0, got -1",
    ),
    "iterative count above": (
        lambda: update(sf.iterative(count=9)),
        ValueError,
        "iterative: expected 0 <= count <= 8, got 9 at 'w'",
    ),
    "iterative count dtype": (
        lambda: update(sf.iterative(count=torch.tensor(2.0))),
        TypeError,
        "expected count of an integer dtype, got torch.float32",
    ),
    "snfs with a pattern": (
        lambda: sf.snfs(0.5, pattern=sf.patterns.channel(0)),
        ValueError,
        "redistribute moves elements between leaves: it needs unstructured() and no "
        "global_()",
    ),
    # params
    "integer params": (
        lambda: init(sf.rigl(0.5), {"deep": [torch.ones(2, 2, dtype=torch.int32)]}),
        TypeError,
        "expected floating-point params, got torch.int32 at 'deep.0'",
    ),
    "integer dense params": (
        lambda: init(sf.dense(), {"b": torch.ones(2, dtype=torch.bool)}),
        TypeError,
        "expected floating-point params, got torch.bool at 'b'",
    ),
    "params that are no tensors": (
        lambda: init(sf.from_masks({"w": torch.tensor(True)}), {"w": 3.0}),
        TypeError,
        "expected floating-point params, got float at 'w'",
    ),
    "duplicate paths": (
        lambda: init(sf.dense(), {"a.b": W, "a": {"b": W}}),
        ValueError,
        "expected one leaf a path, but two leaves are at 'a.b'; rename one",
    ),
    # masks
    "mask of another shape": (
        lambda: init(
            sf.from_masks({"w": torch.ones(4, 2) > 0, "b": torch.tensor(True)})
        ),
        ValueError,
        "expected a mask of shape (2, 4) or () at 'w', got (4, 2)",
    ),
    "init of another shape": (
        lambda: init(
            sf.gmp(0.5, init={"w": torch.ones(2) > 0, "b": torch.tensor(True)})
        ),
        ValueError,
        "expected a mask of shape (2, 4) or () at 'w', got (2,)",
    ),
    "mask of numbers": (
        lambda: init(sf.from_masks({"w": torch.ones(2, 4), "b": torch.tensor(True)})),
        TypeError,
        "expected a bool mask at 'w', got torch.float32",
    ),
    "masks of another structure": (
        lambda: init(sf.static(None, init=lambda params: {"w": W > 0})),
        ValueError,
        "expected masks with the structure of params, but there is no leaf at 'b' in "
        "masks",
    ),
    "0-d False": (
        lambda: sf.from_masks({"w": torch.tensor(False)}),
        ValueError,
        "expected a mask of full shape or 0-d True, got 0-d False at 'w'",
    ),
    "init with 0-d False": (
        lambda: init(
            sf.static(None, init={"w": torch.tensor(False), "b": torch.tensor(True)})
        ),
        ValueError,
        "expected a mask of full shape or 0-d True, got 0-d False at 'w'",
    ),
    # scores
    "no score": (
        lambda: sf.rigl(0.5, grow="gradient"),
        TypeError,
        "expected grow to be a score such as sf.scores.magnitude, got 'gradient'",
    ),
    "score of another structure": (
        lambda: update(sf.gmp(0.5, score=lambda state, grads, step: {"w": W})),
        ValueError,
        "expected scores with the structure of params, but there is no leaf at 'b' in "
        "scores",
    ),
    "score of another shape": (
        lambda: update(
            sf.gmp(0.5, score=lambda state, grads, step: {"w": W.T, "b": W})
        ),
        ValueError,
        "expected scores of shape (2,) at 'b', got (2, 4)",
    ),
    "score of integers": (
        lambda: update(
            sf.gmp(
                0.5,
                score=lambda state, grads, step: {"w": W.long(), "b": torch.ones(2)},
            )
        ),
        TypeError,
        "expected floating-point scores, got torch.int64 at 'w'",
    ),
    "grown of another structure": (
        lambda: update(sf.rigl(0.5, grown=lambda state, grown, step: {"w": W})),
        ValueError,
        "expected grown values with the structure of params, but there is no leaf at "
        "'b' in grown values",
    ),
    "grown of another dtype": (
        lambda: update(
            sf.rigl(0.5, grown=lambda state, grown, step: {**PARAMS, "w": W.double()})
        ),
        TypeError,
        "expected grown values of dtype torch.float32 at 'w', got torch.float64",
    ),
    # states
    "no state": (
        lambda: sf.rigl(0.5).update(PARAMS, PARAMS, 0),
        TypeError,
        "expected state to be a State from init, got dict",
    ),
    "load another structure": (
        lambda: sf.checkpoint.load_state_dict(
            init(sf.gmp(0.5)), sf.checkpoint.state_dict(init(opt(sf.gmp(0.5))))
        ),
        ValueError,
        "expected the paths of the template, but missing are [] and unexpected "
        "['opt.count', 'opt.momentum.b', 'opt.momentum.w']",
    ),
    "load another shape": (
        lambda: sf.checkpoint.load_state_dict(
            init(sf.dense()),
            sf.checkpoint.state_dict(init(sf.dense(), {**PARAMS, "w": W.T})),
        ),
        ValueError,
        "expected a tensor of shape (2, 4) at 'params.w', got (4, 2)",
    ),
    "with_params of another dtype": (
        lambda: sf.with_params(init(sf.gmp(0.5)), {**PARAMS, "w": W.double()}),
        TypeError,
        "expected the new params of dtype torch.float32 at 'w', got torch.float64",
    ),
    # optimizers
    "a torch optimizer": (
        lambda: sf.with_optimizer(sf.dense(), torch.optim.SGD([W], lr=0.1)),
        TypeError,
        "with_optimizer: expected an optimizer with init(params) and update(grads, "
        "state, *, params, inplace), such as sf.optimizers.sgd(0.1), adam(1e-3) or "
        "adamw(1e-3), got SGD without init",
    ),
    "a class of torch's": (
        lambda: sf.with_optimizer(sf.dense(), torch.optim.Adam),
        TypeError,
        "with_optimizer: expected an optimizer with init(params) and update(grads, "
        "state, *, params, inplace), such as sf.optimizers.sgd(0.1), adam(1e-3) or "
        "adamw(1e-3), got Adam without init",
    ),
    "an optimizer that was not called": (
        lambda: sf.with_optimizer(sf.dense(), sf.optimizers.adam),
        TypeError,
        "with_optimizer: expected an optimizer with init(params) and update(grads, "
        "state, *, params, inplace), such as sf.optimizers.sgd(0.1), adam(1e-3) or "
        "adamw(1e-3), got adam itself; call it: adam(lr)",
    ),
    "an optimizer twice": (
        lambda: init(opt(opt(sf.dense()))),
        ValueError,
        "with_optimizer: the algorithm has an optimizer already",
    ),
    "an optimizer for nothing": (
        lambda: sf.with_optimizer("rigl", sf.optimizers.sgd(0.1)),
        TypeError,
        "with_optimizer: expected an Algorithm, got str",
    ),
    # composition
    "partition of nothing": (
        lambda: sf.partition([]),
        ValueError,
        "partition: expected at least one (where, algorithm) pair, got none",
    ),
    "partition without pairs": (
        lambda: sf.partition([sf.dense()]),
        TypeError,
        "partition: expected a list of pairs, got Algorithm at position 0",
    ),
    "partition of a dict": (
        lambda: sf.partition({"w": sf.dense()}),
        TypeError,
        "partition: expected a list of pairs, got str at position 0",
    ),
    "partition without algorithms": (
        lambda: sf.partition([("w", sf.dense()), ("b", sf.dense)]),
        TypeError,
        "partition: expected an Algorithm at position 1, got dense itself; call it: "
        "dense()",
    ),
    "partition unknown": (
        lambda: init(sf.partition([("v", sf.dense())])),
        ValueError,
        "partition: no path matches 'v'; the paths are 'b', 'w'",
    ),
    "partition by a number": (
        lambda: init(sf.partition([(3, sf.dense())])),
        TypeError,
        "expected where to be a function, a glob or a sequence of globs, got int",
    ),
    "chain of nothing": (
        lambda: sf.chain(),
        ValueError,
        "chain: expected at least one algorithm, got none",
    ),
    "chain of a list": (
        lambda: sf.chain([sf.dense(), sf.dense()]),
        TypeError,
        "chain: expected an Algorithm at position 0, got list",
    ),
    "sequence of optimizers": (
        lambda: init(sf.sequence(sf.dense(), opt(sf.dense()))),
        ValueError,
        "sequence: the algorithm at position 1 has an optimizer; put with_optimizer "
        "outermost",
    ),
    "chain of optimizers": (
        lambda: init(sf.chain(opt(sf.dense()))),
        ValueError,
        "chain: the algorithm at position 0 has an optimizer; put with_optimizer "
        "outermost",
    ),
    "chain of latents": (
        lambda: sf.chain(sf.dense(), sf.reparametrised(sf.reparam.power(2.0))),
        ValueError,
        "chain: the algorithm at position 1 has a view of its own (latents or terms); "
        "put that outermost: reparametrised(..., inner=chain(...)) or "
        "with_terms(chain(...), ...)",
    ),
    "phases of nothing": (
        lambda: sf.phases([]),
        ValueError,
        "phases: expected at least one algorithm, got none",
    ),
    "phases without pairs": (
        lambda: sf.phases([sf.dense()]),
        TypeError,
        "phases: expected a list of pairs, got Algorithm at position 0",
    ),
    "phases that begin late": (
        lambda: sf.phases([(1, sf.dense())]),
        ValueError,
        "phases: expected begins that start at 0 and grow, got [1]",
    ),
    "phases out of order": (
        lambda: sf.phases([(0, sf.dense()), (5, sf.dense()), (5, sf.dense())]),
        ValueError,
        "phases: expected begins that start at 0 and grow, got [0, 5, 5]",
    ),
    "phases with a float": (
        lambda: sf.phases([(0, sf.dense()), (5.0, sf.dense())]),
        TypeError,
        "phases: expected begins to be ints, got 5.0",
    ),
    "phases of optimizers": (
        lambda: init(sf.phases([(0, sf.dense()), (1, opt(sf.dense()))])),
        ValueError,
        "phases: the algorithm at position 1 has an optimizer; put with_optimizer "
        "outermost",
    ),
    "latents of latents": (
        lambda: sf.reparametrised(
            sf.reparam.power(2.0), sf.reparametrised(sf.reparam.power(2.0))
        ),
        ValueError,
        "reparametrised: expected an inner algorithm without a view of its own "
        "(latents or terms)",
    ),
    "latents of an optimizer": (
        lambda: init(sf.reparametrised(sf.reparam.power(2.0), opt(sf.dense()))),
        ValueError,
        "reparametrised: the inner algorithm has an optimizer; put with_optimizer "
        "outermost",
    ),
    "terms around an optimizer": (
        lambda: init(sf.with_terms(opt(sf.dense()), sf.terms.l1(0.1))),
        ValueError,
        "with_terms: the algorithm at position 0 has an optimizer; put with_optimizer "
        "outermost",
    ),
    "terms for nothing": (
        lambda: sf.with_terms(sf.terms.l1(0.1)),
        TypeError,
        "with_terms: expected an Algorithm, got function",
    ),
    "block of one int": (
        lambda: sf.patterns.block(2),
        TypeError,
        "block: expected shape to be a tuple of sizes such as (4, 4), got 2",
    ),
    "channel of another norm": (
        lambda: sf.patterns.channel(norm="x"),
        TypeError,
        "channel: expected norm to be a number, such as 1, 2 or math.inf, got 'x'",
    ),
    "channel of norm nan": (
        lambda: sf.patterns.channel(norm=NAN),
        TypeError,
        "channel: expected norm to be a number, such as 1, 2 or math.inf, got nan",
    ),
    "row_balanced of a word": (
        lambda: sf.patterns.row_balanced("x"),
        TypeError,
        "row_balanced: expected axis to be an int, got str",
    ),
    "row_balanced of a float": (
        lambda: sf.patterns.row_balanced(1.0),
        TypeError,
        "row_balanced: expected axis to be an int, got float",
    ),
    "row_balanced of floats": (
        lambda: sf.patterns.row_balanced((0, 1.0)),
        TypeError,
        "row_balanced: expected axis to be an int, got float",
    ),
    "transposable of one axis": (
        lambda: sf.patterns.transposable(1, 2, axes=3),
        TypeError,
        "transposable: expected axes to be two ints such as (0, 1), got 3",
    ),
    "by_path of a number": (
        lambda: sf.budgets.by_path(3),
        TypeError,
        "by_path: expected table to be a dict of a sparsity for each glob, got 3",
    ),
    "erk of a word": (
        lambda: sf.budgets.erk("x"),
        TypeError,
        "erk: expected power to be a number, got str",
    ),
    "owl of a list": (
        lambda: sf.budgets.owl([0.1]),
        TypeError,
        "owl: expected ratios to be a dict of a ratio for each glob, got [0.1]",
    ),
    "owl of words": (
        lambda: sf.budgets.owl({"a": "x"}),
        TypeError,
        "owl: expected the ratio of 'a' to be a number, got 'x'",
    ),
    "owl of another spread": (
        lambda: sf.budgets.owl({"a": 1.0}, spread="x"),
        TypeError,
        "owl: expected spread to be a number, got 'x'",
    ),
    "l1 of a word": (
        lambda: sf.terms.l1("x"),
        TypeError,
        "expected strength of l1 to be a number or a 0-d float tensor, got str",
    ),
    "l1 of nan": (
        lambda: sf.terms.l1(NAN),
        ValueError,
        "expected strength of l1 to be finite, got nan",
    ),
    "l2 of a word": (
        lambda: sf.terms.l2("x"),
        TypeError,
        "expected strength of l2 to be a number or a 0-d float tensor, got str",
    ),
    "l2 of nan": (
        lambda: sf.terms.l2(NAN),
        ValueError,
        "expected strength of l2 to be finite, got nan",
    ),
    "pruned_decay of a word": (
        lambda: sf.terms.pruned_decay("x"),
        TypeError,
        "expected strength of pruned_decay to be a number or a 0-d float tensor, "
        "got str",
    ),
    "pruned_decay of nan": (
        lambda: sf.terms.pruned_decay(NAN),
        ValueError,
        "expected strength of pruned_decay to be finite, got nan",
    ),
    "noise of a word": (
        lambda: sf.terms.noise("x", sf.random.key(0)),
        TypeError,
        "noise: expected std to be a number, got str",
    ),
    "penalty of a number": (
        lambda: sf.terms.penalty(3),
        TypeError,
        "expected penalty's fn to be a function of (params, step), got 3",
    ),
    "on without a term": (
        lambda: sf.terms.on("w", 3),
        TypeError,
        "expected on's term to be a function of (state, step), got 3",
    ),
    "str_ of a word": (
        lambda: sf.methods.str_(init="a"),
        TypeError,
        "expected init of soft_threshold to be a number or a 0-d float tensor, got str",
    ),
    "str_ of nan": (
        lambda: sf.methods.str_(NAN),
        ValueError,
        "expected init of soft_threshold to be finite, got nan",
    ),
    "powerprop of a word": (
        lambda: sf.methods.powerprop(alpha="a"),
        TypeError,
        "power: expected alpha to be a number, got str",
    ),
    "hard_concrete of a word": (
        lambda: sf.methods.hard_concrete("a"),
        TypeError,
        "expected strength of hard_concrete to be a number or a 0-d float tensor, "
        "got str",
    ),
    "hard_concrete of another decay": (
        lambda: sf.methods.hard_concrete(1.0, weight_decay="a"),
        TypeError,
        "expected weight_decay of hard_concrete to be a number or a 0-d float "
        "tensor, got str",
    ),
    "hard_concrete of another beta": (
        lambda: sf.methods.hard_concrete(1.0, beta="a"),
        TypeError,
        "expected beta of hard_concrete to be a number or a 0-d float tensor, got str",
    ),
    "hard_concrete of another gamma": (
        lambda: sf.methods.hard_concrete(1.0, gamma="a"),
        TypeError,
        "expected gamma of hard_concrete to be a number or a 0-d float tensor, got str",
    ),
    "hard_concrete of another zeta": (
        lambda: sf.methods.hard_concrete(1.0, zeta="a"),
        TypeError,
        "expected zeta of hard_concrete to be a number or a 0-d float tensor, got str",
    ),
    "hard_concrete of another droprate": (
        lambda: sf.methods.hard_concrete(1.0, droprate="a"),
        TypeError,
        "expected droprate of hard_concrete to be a number or a 0-d float tensor, "
        "got str",
    ),
    "hard_concrete without a pattern": (
        lambda: sf.methods.hard_concrete(1.0, pattern=3),
        TypeError,
        "hard_concrete: expected pattern to be one such as sf.patterns.channel(1), "
        "got int",
    ),
    "proximal of a word": (
        lambda: sf.methods.proximal("a", rate=0.1),
        TypeError,
        "expected strength of proximal to be a number or a 0-d float tensor, got str",
    ),
    "deep_rewiring of a word": (
        lambda: sf.methods.deep_rewiring(0.5, alpha="a"),
        TypeError,
        "expected alpha of deep_rewiring to be a number or a 0-d float tensor, got str",
    ),
    "granet that drops all and more": (
        lambda: sf.methods.granet(0.5, steps=10, drop_fraction=2.0),
        ValueError,
        "expected drop_fraction in [0, 1], got 2.0; 2.0 per cent is written 0.02",
    ),
    "movement to more than all": (
        lambda: sf.methods.movement(2.0, steps=10),
        ValueError,
        "expected sparsity in [0, 1], got 2.0; 2.0 per cent is written 0.02",
    ),
    "continuous_sparsification that ends below 0": (
        lambda: sf.methods.continuous_sparsification(steps=9, final=-1.0),
        ValueError,
        "expected final > 0, got -1.0",
    ),
    "continuous_sparsification of a word": (
        lambda: sf.methods.continuous_sparsification(steps=9, strength="a"),
        TypeError,
        "expected strength to be a number or a 0-d float tensor, got str",
    ),
    "woodfisher without gradients": (
        lambda: sf.methods.woodfisher(0.5, 3),
        TypeError,
        "expected gradients to be a tree of tensors, got int",
    ),
    "a picture of a number": (
        lambda: sf.report.braille(3),
        TypeError,
        "braille: expected mask to be a tensor, got int",
    ),
    "a picture of half a row": (
        lambda: sf.report.braille(W > 1, max_elems=0.5),
        TypeError,
        "expected max_elems to be an int, got float",
    ),
    "a config with a number for factories": (
        lambda: sf.config.from_config(0.5, algorithms=3),
        TypeError,
        "from_config: expected algorithms to be a dict of factories by lower-case "
        "name, got int",
    ),
    "within no such group": (
        lambda: sf.budgets.within(100, groups_of(NET), only=[5]),
        ValueError,
        "groups: expected numbers of the model's 1 groups, from 0, got 5",
    ),
    "within a group from the end": (
        lambda: sf.budgets.within(100, groups_of(NET), only=[-1]),
        ValueError,
        "groups: expected numbers of the model's 1 groups, from 0, got -1",
    ),
    "within one number": (
        lambda: sf.budgets.within(100, groups_of(NET), only=3),
        TypeError,
        "groups: expected only to be a sequence of numbers of groups, got 3",
    ),
    "within a group by name": (
        lambda: sf.budgets.within(100, groups_of(NET), only=["0"]),
        TypeError,
        "groups: expected the number of a group to be an int, got '0'",
    ),
    "within groups of single weights": (
        lambda: sf.budgets.within(
            100, sf.shrinking.weights(NET, torch.ones(1, 8)), only=[0]
        ),
        ValueError,
        "within: expected no only for sf.shrinking.weights, which have no groups, "
        "got only=[0]; choose leaves with where",
    ),
    "sparsegpt without squares": (
        lambda: update(sf.methods.sparsegpt(0.5, GRAMS, where="w"), {"w": W}),
        ValueError,
        "layerwise: expected 'square' in the statistics at 'w', got count, gram",
    ),
    "obs without squares": (
        lambda: update(sf.methods.obs(0.5, GRAMS, where="w"), {"w": W}),
        ValueError,
        "layerwise: expected 'square' in the statistics at 'w', got count, gram",
    ),
    "output_errors without squares": (
        lambda: sf.report.output_errors({"w": W}, {"w": W}, GRAMS),
        ValueError,
        "output_errors: expected 'square' in the statistics at 'w', got count, "
        "gram: collect it",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_message(name):
    act, error, message = TABLE[name]
    with pytest.raises(error) as caught:
        act()
    assert str(caught.value) == message
    assert type(caught.value) is error


# ---- every update checks its arguments first -----------------------------------------

ALGORITHMS = {
    "dense": sf.dense,
    "static": lambda: sf.static(0.5),
    "from_masks": lambda: sf.from_masks({"w": W > 1, "b": torch.tensor(True)}),
    "one_shot": lambda: sf.one_shot(0.5, score=sf.scores.sum(sf.scores.saliency)),
    "gmp": lambda: sf.gmp(0.5),
    "iterative": lambda: sf.iterative(0.5, when=sf.always()),
    "ste": lambda: sf.ste(0.5),
    "set": lambda: sf.set(0.5),
    "rigl": lambda: sf.rigl(0.5),
    "snfs": lambda: sf.snfs(0.5),
    "reparametrised": lambda: sf.reparametrised(
        sf.reparam.soft_threshold(init=0.0), sf.rigl(0.5)
    ),
    "partition": lambda: sf.partition([("w", sf.rigl(0.5))]),
    "chain": lambda: sf.chain(sf.static(0.25), sf.rigl(0.5)),
    "sequence": lambda: sf.sequence(sf.gmp(0.5), sf.rigl("current")),
    "phases": lambda: sf.phases([(0, sf.static(0.5)), (5, sf.dense())]),
    "with_terms": lambda: sf.with_terms(sf.gmp(0.5), sf.terms.l1(0.1)),
    "with_optimizer": lambda: opt(sf.rigl(0.5)),
}
BAD = {
    "no leaf": (
        {"b": PARAMS["b"]},
        0,
        ValueError,
        "expected grads with the structure of params, but there is no leaf at 'w' in "
        "grads",
    ),
    "unknown leaf": (
        {**PARAMS, "v": W},
        0,
        ValueError,
        "expected grads with the structure of params, but there is an unknown leaf at "
        "'v' in grads, which params lack",
    ),
    "a list": (
        [W, PARAMS["b"]],
        0,
        ValueError,
        "expected grads with the structure of params, but there is no leaf at 'b' in "
        "grads (and at 1 more); params lack the one at '0': a sequence has no names; "
        "write dict(zip(params, ...)) where the order is theirs",
    ),
    "shape": (
        {**PARAMS, "w": W.T},
        0,
        ValueError,
        "expected grads of shape (2, 4) at 'w', got (4, 2)",
    ),
    "dense shape": (
        {**PARAMS, "b": torch.ones(1)},
        0,
        ValueError,
        "expected grads of shape (2,) at 'b', got (1,)",
    ),
    "dtype": (
        {**PARAMS, "w": W.double()},
        0,
        TypeError,
        "expected grads of dtype torch.float32 at 'w', got torch.float64",
    ),
    "no tensor": (
        {**PARAMS, "b": 1.0},
        0,
        TypeError,
        "expected grads to be tensors, got float at 'b'",
    ),
    "negative step": (PARAMS, -1, ValueError, "expected step >= 0, got -1"),
    "bool step": (
        PARAMS,
        True,
        TypeError,
        "expected step to be an int or a 0-d int64 tensor, got bool",
    ),
    "float step": (
        PARAMS,
        1.0,
        TypeError,
        "expected step to be an int or a 0-d int64 tensor, got float",
    ),
    "float tensor step": (
        PARAMS,
        torch.tensor(1.0),
        TypeError,
        "expected step to be an int or a 0-d int64 tensor, got a tensor of "
        "torch.float32",
    ),
    "int32 step": (
        PARAMS,
        torch.tensor(1, dtype=torch.int32),
        TypeError,
        "expected step to be an int or a 0-d int64 tensor, got a tensor of torch.int32",
    ),
    "1-d step": (
        PARAMS,
        torch.tensor([1]),
        ValueError,
        "expected step to be a 0-d tensor, got shape (1,)",
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_refused_update_changes_nothing(name):
    algorithm = ALGORITHMS[name]()
    state = algorithm.init(PARAMS)
    for grads, step, error, message in BAD.values():
        inputs = [
            leaf
            for leaf in optree.tree_leaves((state, grads, step))
            if isinstance(leaf, torch.Tensor)
        ]
        copies, versions = (
            [leaf.clone() for leaf in inputs],
            [leaf._version for leaf in inputs],
        )
        with pytest.raises(error) as caught:
            algorithm.update(state, grads, step)
        assert str(caught.value) == message
        assert [leaf._version for leaf in inputs] == versions
        assert sf.checkpoint.tree_equal(inputs, copies)
    fresh = ALGORITHMS[name]()
    assert sf.checkpoint.tree_equal(
        algorithm.update(state, PARAMS, 0), fresh.update(fresh.init(PARAMS), PARAMS, 0)
    )
