"""What drawn cases hold: the shares of cases with ties, NaN, empty leaves and other
hard things, and the least share of each.

A law that held on easy cases alone says little: a run over trees of drawn structure
fails where a share is below `LEAST`. With trees like given ones (`params=`), shapes and
dtypes are the user's, and shares are only shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import Tensor

from sparsefn.core.tree import flatten
from sparsefn.core.tree.where import default_where
from sparsefn.testing.byte_trees import Case

__all__ = ["ENOUGH", "LEAST", "missing", "of_cases", "trait_shares", "traits"]
__dir__ = __all__.copy

CASES = "cases"  # how many there were, in a count of traits
ENOUGH = 100  # cases that can be judged
LEAST: Mapping[str, float] = {
    "ties": 0.8,
    "nan": 0.25,
    "empty leaf": 0.3,
    "half of a unit": 0.25,
    "0-d leaf": 0.9,
    "three leaves of several dtypes": 0.45,
}


def traits(case: Case) -> set[str]:
    """The hard things of `LEAST` that a case holds.

    >>> params = {"w": torch.tensor([[1.0, -1.0]]), "scale": torch.tensor(float("nan"))}
    >>> sorted(
    ...     sf.testing.coverage.traits(
    ...         sf.testing.Case(params, (params,), sparsity=0.25, seed=0)
    ...     )
    ... )
    ['0-d leaf', 'half of a unit', 'ties']

    Args:
        case: The case.

    Returns:
        Names of traits. "ties" means that two weights of one leaf that the laws
        sparsify (`sf.default_where`) have one magnitude, or two entries of one of its
        gradients. "nan": such a leaf or its gradient holds one. "half of a unit":
        sparsity times the entries of such a leaf, or of all of them, ends in one half,
        so that the count has to be rounded to even. "three leaves of several dtypes":
        so many are sparsified, and not all are of one dtype. "empty leaf" and "0-d
        leaf": any leaf is.
    """
    trees = [flatten(tree)[0] for tree in (case.params, *case.grads)]
    chosen = [path for path, leaf in trees[0].items() if default_where(path, leaf)]
    leaves = list(trees[0].values())
    values = [tree[path] for tree in trees for path in chosen]
    sizes = [trees[0][path].numel() for path in chosen]
    has = {
        "ties": any(map(_ties, values)),
        "nan": any(bool(x.isnan().any()) for x in values),
        "empty leaf": any(not x.numel() for x in leaves),
        "half of a unit": any(_is_half(case.sparsity, n) for n in (*sizes, sum(sizes))),
        "0-d leaf": any(not x.ndim for x in leaves),
        "three leaves of several dtypes": len(chosen) > 2
        and len({trees[0][path].dtype for path in chosen}) > 1,
    }
    return {name for name, found in has.items() if found}


def _ties(x: Tensor) -> bool:
    finite = x[x.isfinite()].abs().sort().values
    return bool((finite[1:] == finite[:-1]).any())


def _is_half(sparsity: float, n: int) -> bool:
    return math.isclose(sparsity * n % 1.0, 0.5, abs_tol=1e-9 * max(n, 1))


def trait_shares(counted: Counter[str]) -> dict[str, float]:
    """The share of cases with each trait, from a count that holds "cases", too.

    >>> from collections import Counter
    >>> sf.testing.coverage.trait_shares(Counter({"cases": 4, "ties": 3}))["ties"]
    0.75

    Args:
        counted: Counts of traits and "cases". Count with
            `counted.update([*traits(case), "cases"])`.

    Returns:
        Dict from each trait of `LEAST` to a share in [0, 1].
    """
    return {name: counted[name] / max(counted[CASES], 1) for name in LEAST}


def missing(counted: Counter[str], least: Mapping[str, float] = LEAST) -> list[str]:
    """A line for each trait that too few of the counted cases have.

    >>> from collections import Counter
    >>> sf.testing.coverage.missing(
    ...     Counter({"cases": 400, "ties": 300, "nan": 0}), {"ties": 0.5, "nan": 0.1}
    ... )
    ['nan in 0% of 400 cases, expected 10% or more']

    Args:
        counted: Counts of traits and "cases".
        least: The least share of cases with each trait.

    Returns:
        List of lines, empty for fewer than `ENOUGH` cases. Too few are three standard
        deviations less than so many draws have on average with the least share.
    """
    n = counted[CASES]
    found = trait_shares(counted)
    short = [
        s
        for s, p in least.items()
        if n >= ENOUGH and found[s] < p - 3 * math.sqrt(p * (1 - p) / n)
    ]
    return [
        f"{name} in {found[name]:.0%} of {n} cases, expected {least[name]:.0%} or more"
        for name in short
    ]


def of_cases(cases: Iterable[Case]) -> Counter[str]:
    """The count of the traits of some cases.

    >>> sf.testing.coverage.of_cases([])
    Counter()

    Args:
        cases: The cases.

    Returns:
        Counts of traits and "cases".
    """
    counted: Counter[str] = Counter()
    for case in cases:
        counted.update([*traits(case), CASES])
    return counted
