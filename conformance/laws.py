"""The laws, in numpy. A subject is a namespace of functions of arrays; one that it
lacks makes a law not applicable.

    masks(weights, sparsity) -> masks          pruned once by magnitude; True is kept
    twice(weights, low, high) -> masks, masks  pruned, then pruned again
    inputs(weights, sparsity) -> arrays        the caller's own tensors after a call
    rng() -> bytes                             the framework's global generator
    train(weights, sparsity, optimizer, steps, save_at=None)
        -> [(masks, effective weights) of each step]
    vmapped(weights, sparsity), compiled(...), copied(...)
        -> arrays, arrays that must have their bits, or nearly
    keys(weights, sparsity) -> names, names    of what is saved, dense and sparse

`SCOPE` says what competes: "leaf", "global", "row", or (n, m) for n kept of each m.
`EXEMPT` names laws that do not apply, with the reason. `SHAPES` and `spoil` are in the
place of those here. A law returns a remark or raises.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

# whole counts at whole percents; the outputs of the first are the inputs of the second
SHAPES = (
    (10, 20),
    (10, 10),
)
# 0.29 * 100 and 0.57 * 100 fall short of 29 and 57 in floating point
SPARSITIES = (0.07, 0.29, 0.5, 0.57, 0.93)
STEPS = 5

Arrays = list[np.ndarray]


class Broken(Exception):
    """The law does not hold, and how."""


class NotApplicable(Exception):
    """The system has no such thing."""


def need(subject: Any, name: str, why: str) -> Callable[..., Any]:
    """A function of the subject."""
    found = getattr(subject, name, None)
    if found is None:
        raise NotApplicable(why)
    return found


def levels(subject: Any) -> tuple[float, ...]:
    """The sparsities that the subject takes; N:M has one."""
    scope = getattr(subject, "SCOPE", "leaf")
    return (1 - scope[0] / scope[1],) if isinstance(scope, tuple) else SPARSITIES


def weights_of(subject: Any, seed: int = 0) -> Arrays:
    """Normal weights, no two of the same magnitude."""
    draw = np.random.RandomState(seed)
    return [
        draw.standard_normal(shape).astype(np.float32)
        for shape in getattr(subject, "SHAPES", SHAPES)
    ]


def pools(subject: Any, arrays: Arrays) -> Iterator[np.ndarray]:
    """The entries that compete with each other, as 1-D arrays."""
    scope = getattr(subject, "SCOPE", "leaf")
    if scope == "global":
        yield np.concatenate([x.reshape(-1) for x in arrays])
        return
    for x in arrays:
        width = (
            {"leaf": x.size, "row": x.shape[-1]}.get(scope)
            if isinstance(scope, str)
            else scope[1]
        )
        yield from x.reshape(-1, width)


def kept(subject: Any, masks: Arrays) -> list[int]:
    """How many of each pool are kept."""
    return [int(mask.sum()) for mask in pools(subject, masks)]


def counted(subject: Any, masks: Arrays, sparsity: float, what: str) -> None:
    """As many are kept as of weights that do not tie and are numbers."""
    usual = kept(subject, subject.masks(weights_of(subject), sparsity))
    for mask, wanted in zip(pools(subject, masks), usual, strict=True):
        if mask.sum() != wanted:
            raise Broken(
                f"{mask.sum()} of {mask.size} kept at sparsity {sparsity:g} {what}, "
                f"else {wanted}"
            )


def count(subject: Any) -> None:
    """Exactly as many weights are kept as the sparsity says; where that is no whole
    number, one of its neighbours.
    """
    for sparsity in levels(subject):
        for mask in pools(subject, subject.masks(weights_of(subject), sparsity)):
            wanted = round(mask.size * (1 - sparsity), 6)
            if not np.floor(wanted) <= mask.sum() <= np.ceil(wanted):
                raise Broken(
                    f"{mask.sum()} of {mask.size} kept at sparsity {sparsity:g}, not "
                    f"{wanted:g}"
                )


def ties(subject: Any) -> str:
    """As many are kept where magnitudes tie as where they do not, and the same each
    time.
    """
    draw = np.random.RandomState(1)
    equal = [np.ones_like(x) for x in weights_of(subject)]
    few = [draw.choice([-1.0, 0.5, 1.0], x.shape).astype(np.float32) for x in equal]
    for weights, sparsity in ((w, s) for w in (equal, few) for s in levels(subject)):
        masks = subject.masks(weights, sparsity)
        counted(subject, masks, sparsity, "where weights tie")
        if any(
            (a != b).any()
            for a, b in zip(masks, subject.masks(weights, sparsity), strict=True)
        ):
            raise Broken("a second call on the same tied weights keeps others")
    first = all(
        (np.diff(p.astype(int)) <= 0).all()
        for p in pools(subject, subject.masks(equal, levels(subject)[0]))
    )
    return "lowest index" if first else "another order"


def spoil(weights: Arrays) -> None:
    """A quarter becomes NaN."""
    for x in weights:
        for i, row in enumerate(x):
            row[i % 4 :: 4] = np.nan


def nan(subject: Any) -> str:
    """NaN is never kept where a number could be, and counts hold; or it is refused."""
    for sparsity in levels(subject):
        weights = weights_of(subject)
        getattr(subject, "spoil", spoil)(weights)
        try:
            masks = subject.masks(weights, sparsity)
        except (ValueError, TypeError, RuntimeError, AssertionError) as error:
            if "nan" not in str(error).lower() and "finite" not in str(error).lower():
                raise
            return "refused"
        for scores, mask in zip(
            pools(subject, weights), pools(subject, masks), strict=True
        ):
            if (mask & np.isnan(scores)).any() and (~mask & ~np.isnan(scores)).any():
                raise Broken(
                    f"NaN is kept at sparsity {sparsity:g} while numbers are pruned"
                )
        counted(subject, masks, sparsity, "where a quarter is NaN")
    return "pruned first"


def monotone(subject: Any) -> None:
    """What a first pruning prunes stays pruned in a second one to a higher sparsity."""
    twice = need(subject, "twice", "prunes once")
    dead = weights_of(subject)
    for x in dead:
        x[:, ::2] = (
            0.0  # so that zeros are kept at first, which tie with what was pruned
        )
    for weights, low, high in ((weights_of(subject), 0.3, 0.8), (dead, 0.2, 0.4)):
        first, second = twice(weights, low, high)
        back = sum(int((~a & b).sum()) for a, b in zip(first, second, strict=True))
        if back:
            raise Broken(
                f"{back} pruned weights come back when the sparsity rises from "
                f"{low:g} to {high:g}"
            )
        if weights is not dead and not sum(b.sum() for b in second) < sum(
            a.sum() for a in first
        ):
            raise Broken(
                f"the second pruning, from {low:g} to {high:g}, prunes nothing"
            )


def inputs(subject: Any) -> None:
    """The tensors or modules that the caller hands over are as they were."""
    sparsity = levels(subject)[-1]
    after = need(subject, "inputs", "in place by design")(weights_of(subject), sparsity)
    if any((a != b).any() for a, b in zip(weights_of(subject), after, strict=True)):
        raise Broken("the caller's tensors are written to")


def rng(subject: Any) -> None:
    """Pruning by magnitude reads and moves no global generator."""
    draw = getattr(subject, "rng", lambda: b"")

    def now() -> tuple[Any, ...]:
        kind, words, *rest = np.random.get_state()  # type: ignore[misc]
        return random.getstate(), kind, words.tobytes(), *rest, draw()

    weights, sparsity = weights_of(subject), levels(subject)[-1]
    subject.masks(weights, sparsity)  # what is loaded at the first call may draw
    before = now()
    subject.masks(weights, sparsity)
    if now() != before:
        raise Broken("a global random state moves")


def resume(subject: Any) -> None:
    """A run that is saved and loaded by the system's own means goes on with the bits of
    one that was not stopped.
    """
    train = need(subject, "train", "has no training state")
    weights, sparsity = weights_of(subject), levels(subject)[-1]
    whole, halves = (
        train(weights, sparsity, "sgd", STEPS, save_at=at)[-1] for at in (None, 2)
    )
    for what, a, b in zip(("masks", "weights"), whole, halves, strict=True):
        if any((x != y).any() for x, y in zip(a, b, strict=True)):
            raise Broken(f"other {what} after a save and a load")


def zeros(subject: Any) -> None:
    """What is pruned is zero in the forward of every later step, with momentum or Adam,
    and weight decay.
    """
    train = need(subject, "train", "has no training loop")
    for optimizer in ("sgd", "adam"):
        (masks, _), *steps = train(
            weights_of(subject), levels(subject)[-1], optimizer, STEPS
        )
        if all(mask.all() for mask in masks):
            raise Broken("nothing is pruned while it trains")
        for step, (_, weights) in enumerate(steps, 1):
            alive = sum(
                int(((x != 0) & ~mask).sum())
                for x, mask in zip(weights, masks, strict=True)
            )
            if alive:
                raise Broken(
                    f"{alive} pruned weights are not zero after {step} steps of "
                    f"{optimizer}"
                )


def same(subject: Any, name: str, why: str, what: str) -> None:
    """Both lists of arrays that a function of the subject returns are close, and of
    whole numbers alike.
    """
    for a, b in zip(
        *need(subject, name, why)(weights_of(subject), levels(subject)[-1]), strict=True
    ):
        if not np.allclose(a, b, atol=1e-5):
            raise Broken(what)


def vmap(subject: Any) -> None:
    """Under `vmap` a stack gives what its members give one by one."""
    same(subject, "vmapped", "no vmap", "vmap gives another result than a loop")


def compiles(subject: Any) -> None:
    """Compiled whole, without a break, it gives what it gives eagerly."""
    same(
        subject,
        "compiled",
        "nothing to compile",
        "compiled gives another result than eager",
    )


def deepcopy(subject: Any) -> None:
    """A copy computes the same, and stays so when the original is pruned further."""
    same(subject, "copied", "nothing to copy", "the copy computes something else")


def keys(subject: Any) -> None:
    """The state dict of the pruned model has the keys of the dense one."""
    dense, sparse = need(subject, "keys", "no model")(
        weights_of(subject), levels(subject)[-1]
    )
    if set(dense) != set(sparse):
        changed = sorted(set(dense) ^ set(sparse))
        raise Broken(f"{len(changed)} keys differ, `{changed[0]}` is one")


LAWS: dict[str, Callable[[Any], str | None]] = {
    "count": count,
    "ties": ties,
    "nan": nan,
    "monotone": monotone,
    "inputs": inputs,
    "rng": rng,
    "resume": resume,
    "zeros": zeros,
    "vmap": vmap,
    "compile": compiles,
    "deepcopy": deepcopy,
    "keys": keys,
}


def check(subject: Any) -> dict[str, tuple[str, str]]:
    """The status of every law, `yes`, `no` or `not applicable`, and a remark."""
    cells = {}
    for name, law in LAWS.items():
        try:
            if name in getattr(subject, "EXEMPT", {}):
                raise NotApplicable(subject.EXEMPT[name])
            cells[name] = ("yes", law(subject) or "")
        except NotApplicable as why:
            cells[name] = ("not applicable", str(why))
        except Broken as how:
            cells[name] = ("no", str(how))
        except Exception as error:  # of a peer, in any way
            first = next(iter(str(error).strip().splitlines()), "")
            cells[name] = ("no", f"{type(error).__name__}: {first[:160]}")
    return cells
