"""Which leaves form a tied set: those in whose paths wildcards match the same text."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence

from sparsefn.engine.surroundings import at_compile_time
from sparsefn.patterns.kinds import Pattern


def sets_of(
    globs: tuple[str, ...], paths: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """The paths of each tied set that has one for every glob, in their order.

    >>> sets_of(("*.a", "*.b"), ("0.a", "0.b", "1.a"))
    (('0.a', '0.b'),)
    """
    by_stem = [_matched(glob, paths) for glob in globs]
    sets = []
    for stem in by_stem[0]:
        if all(stem in found for found in by_stem):
            sets.append(tuple([found[stem] for found in by_stem]))
    return tuple(sets)


def checked_sets(pattern: Pattern, paths: Sequence[str]) -> list[tuple[str, ...]]:
    """The paths of each set; ValueError where a member matches no path, or no set has a
    leaf for each member.

    >>> checked_sets(sf.patterns.tied([["*.up.weight", 0]]), ["0.upp.weight", "1.bias"])
    Traceback (most recent call last):
        ...
    ValueError: tied: no path matches '*.up.weight'; the nearest are '0.upp.weight',
    '1.bias'
    """
    known = tuple(paths)
    sets: list[tuple[str, ...]] = []
    for family in pattern.members:
        globs = tuple([glob for glob, *_ in family])
        sets += _checked(globs, known)
    return sets


@at_compile_time
def _checked(
    globs: tuple[str, ...], paths: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    stems = []
    for glob in globs:
        hits = list(_matched(glob, paths))
        if not hits:
            near = difflib.get_close_matches(glob.replace("*", ""), paths, 3, 0.0)
            known = ", ".join(map(repr, near)) or "none"
            raise ValueError(f"tied: no path matches {glob!r}; the nearest are {known}")
        stems.append((glob, hits))
    if not (sets := sets_of(globs, paths)):
        known = "; ".join(
            f"{glob!r} has {', '.join(map(repr, map('|'.join, hits[:3])))}"
            for glob, hits in stems
        )
        raise ValueError(
            "tied: expected globs whose wildcards match the same text in every "
            f"member, but {known}"
        )
    return sets


def _stem(glob: str, path: str) -> tuple[str, ...] | None:
    # What the wildcards of a glob match; None where it does not match. Each part is
    # translated by fnmatch, whose regular expressions are `(?s:...)` and an end; a part
    # that is no wildcard is only escaped.
    parts = re.split(r"(\*|\?|\[!?\]?[^\]]*\])", glob)
    words = [(re.escape(part), fnmatch.translate(part)[4:-3]) for part in parts]
    hit = re.fullmatch(
        "".join(word if word == plain else f"({word})" for plain, word in words),
        path,
        re.DOTALL,
    )
    return None if hit is None else hit.groups()


def _matched(glob: str, paths: Sequence[str]) -> dict[tuple[str, ...], str]:
    # The paths that a glob matches, by what its wildcards match; a path that is spelt
    # alike alone.
    if glob in paths:
        return {(): glob}
    return {stem: path for path in paths if (stem := _stem(glob, path)) is not None}
