"""Pattern, sparsity and gradient flag as one string, such as `BTOPK{2:4,-1}(U)`.

    spec    := "DENSE" letter? | "TOPK{" density "}" letter
             | "BTOPK{" kept ":" run "," axis "}" letter | "BERN" letter?
    density := digits? "." digits, at most 1      letter := "(U)" | "(M)"

A density is the fraction that is kept. `M` is `mask_gradient=True`. No spaces.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal
from typing import Literal, NamedTuple

from sparsefn.core.checks import check_sparsity
from sparsefn.masks.budgets.distributions import check_fixed
from sparsefn.masks.patterns.kinds import Pattern, nm, unstructured

__all__ = ["BTK8_2_FD", "BTK8_2_LD", "BTK8_4_FD", "BTK8_4_LD", "Shorthand"]
__dir__ = __all__.copy

_GRAMMAR = (
    "DENSE, TOPK{density}(U), BTOPK{kept:run,axis}(U) or BERN, with (M) for (U) where "
    "the mask gates the gradient"
)
_SPEC = re.compile(
    r"(?:(?P<bare>DENSE|BERN)(?:\((?P<flag>[UM])\))?"
    r"|(?:TOPK\{(?P<density>[0-9]*\.[0-9]+)\}|BTOPK\{(?P<kept>[0-9]+):(?P<run>[0-9]+),(?P<axis>-?[0-9]+)\})"
    r"\((?P<letter>[UM])\))"
)
_NM = re.compile(r"nm\((\d+), (\d+), axis=(-?\d+)\)")
_EXACT = Context(prec=800)  # enough digits for 1 - x of every float x


class Shorthand(NamedTuple):
    """The settings in a shorthand, named like the arguments of `supermask`.

    >>> sf.shorthand.Shorthand(
    ...     sf.patterns.nm(2, 4), 0.5, False
    ... ) == sf.config.from_shorthand("BTOPK{2:4,-1}(U)")
    True

    Attributes:
        pattern: `unstructured()`, or an `nm` pattern.
        sparsity: The fraction that is pruned, or "bernoulli".
        mask_gradient: Whether the mask gates the score's gradient.
    """

    pattern: Pattern
    sparsity: float | Literal["bernoulli"]
    mask_gradient: bool


class _Dense(Shorthand):
    # Equal to the settings of TOPK{1.0}; the type remembers how it was written.
    __slots__ = ()


def from_shorthand(text: str) -> Shorthand:
    """Read a pattern, a sparsity and `mask_gradient` from a shorthand.

    >>> sf.config.from_shorthand("TOPK{0.9}(M)")
    Shorthand(pattern=unstructured(), sparsity=0.1, mask_gradient=True)
    >>> sf.config.from_shorthand("BTOPK{4:8,-1}(U)")
    Shorthand(pattern=nm(4, 8, axis=-1), sparsity=0.5, mask_gradient=False)
    >>> algorithm = sf.supermask(**sf.config.from_shorthand("BERN")._asdict())

    Args:
        text: The shorthand, `DENSE`, `TOPK{density}(U)`, `BTOPK{kept:run,axis}(U)` or
            `BERN`. `(M)` for `(U)` is `mask_gradient=True`: the mask gates the score's
            gradient.

    Returns:
        The settings. `DENSE` has sparsity 0.0, whatever its letter, and `BERN` the
        sparsity "bernoulli". The sparsity is 1 - density in decimal, so that no
        rounding of 1 - 0.9 moves a count.

    Raises:
        TypeError: `text` is not a string.
        ValueError: `text` has spaces, other letters, a density above 1, or a run that
            keeps none or more than it has.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"expected a shorthand to be a string, got {type(text).__name__}"
        )
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a shorthand {_GRAMMAR}, got {text!r}")
    flag = "M" in (match["flag"], match["letter"])
    if match["bare"] == "DENSE":
        # nothing is off the mask: (M) means (U)
        return _Dense(unstructured(), 0.0, False)
    if match["bare"] == "BERN":
        return Shorthand(unstructured(), "bernoulli", flag)
    if match["density"] is not None:
        density = Decimal(match["density"])
        if density > 1:
            raise ValueError(
                f"expected a shorthand {_GRAMMAR} with density <= 1, got {text!r}"
            )
        return Shorthand(unstructured(), float(_EXACT.subtract(1, density)), flag)
    kept = int(match["kept"])
    run = int(match["run"])
    if not 0 < kept <= run:
        raise ValueError(
            f"expected a shorthand {_GRAMMAR} with 0 < kept <= run, got {text!r}"
        )
    return Shorthand(nm(kept, run, axis=int(match["axis"])), 1 - kept / run, flag)


def to_shorthand(spec: Shorthand | Pattern) -> str:
    """The canonical string of a shorthand, or of an `nm` pattern alone.

    >>> (
    ...     sf.config.to_shorthand(sf.config.from_shorthand("TOPK{.5}(M)")),
    ...     sf.config.to_shorthand(sf.patterns.nm(2, 4, axis=0)),
    ... )
    ('TOPK{0.5}(M)', 'BTOPK{2:4,0}(U)')

    Args:
        spec: The settings, or the pattern.

    Returns:
        The string. Reading it back gives an equal Shorthand.

    Raises:
        TypeError: `spec` or its sparsity is of another type.
        ValueError: The grammar cannot express it: another pattern, `nm(0, m)`, or a
            sparsity that is not the pattern's.
    """
    if isinstance(spec, Pattern):
        found = _NM.fullmatch(spec.name)
        if found is None:
            raise ValueError(
                f"expected a Shorthand or an nm pattern: {spec} does not say how much "
                "is kept"
            )
        return to_shorthand(Shorthand(spec, 1 - int(found[1]) / int(found[2]), False))
    if not isinstance(spec, Shorthand):
        raise TypeError(f"expected a Shorthand or a pattern, got {type(spec).__name__}")
    pattern, sparsity, flag = spec
    runs = _NM.fullmatch(pattern.name)
    letter = "(M)" if flag else "(U)"
    if runs is None and pattern != unstructured():
        raise ValueError(
            f"no shorthand for {pattern}: expected unstructured() or nm(n, m, axis)"
        )
    if sparsity == "bernoulli" and runs is None:
        return "BERN" + letter * flag
    level = check_sparsity(sparsity)  # type: ignore[arg-type]  # another string is refused
    if not isinstance(level, float):
        raise TypeError(
            "expected the sparsity of a Shorthand to be a float, got "
            f"{type(level).__name__}"
        )
    if isinstance(spec, _Dense) and level == 0.0 and not flag:
        return "DENSE"
    if runs is None:
        return f"TOPK{{{_EXACT.subtract(1, Decimal(repr(float(level)))):f}}}{letter}"
    kept = int(runs[1])
    run = int(runs[2])
    if not kept:
        raise ValueError(f"no shorthand for {pattern}: a run keeps one element or more")
    check_fixed(level, kept / run, pattern.name)
    return f"BTOPK{{{kept}:{run},{runs[3]}}}{letter}"


# Half and a quarter of every 8, along the last dimension (LD) or dimension 1 (FD).
BTK8_4_LD = from_shorthand("BTOPK{4:8,-1}(U)")
BTK8_4_FD = from_shorthand("BTOPK{4:8,1}(U)")
BTK8_2_LD = from_shorthand("BTOPK{2:8,-1}(U)")
BTK8_2_FD = from_shorthand("BTOPK{2:8,1}(U)")
