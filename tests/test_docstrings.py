"""Docstrings have Google's sections: what each argument is, what comes back, and which
error says what.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from test_public import CALLED, is_code, words

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
SCORE = ["state", "grads", "step"]  # a score says what it computes, and no more
ERROR = re.compile(r"\b\w+Error\b")


def sections(doc: str) -> dict[str, str]:
    """The text of each section of a docstring, and under "" the prose outside of
    sections and examples.
    """
    found = {"": ""}
    here = ""
    is_example = False
    for line in doc.splitlines():
        is_example = line.startswith(">>>") or (is_example and bool(line.strip()))
        if line[:-1] in SECTIONS and line.endswith(":"):
            here = line[:-1]
            found[here] = ""
        elif here and (line.startswith("    ") or not line):
            found[here] += f"{line[4:]}\n"
        else:
            here = ""
            if not is_example:
                found[""] += f"{line}\n"
    return found


def items(section: str) -> list[str]:
    """The names before the colons of a section."""
    return re.findall(r"^(\*{0,2}[\w.]+): \S", section, re.M)


def parameters(value: Any) -> list[str]:
    """The names of a function's parameters, as a section has them."""
    stars = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    return [
        stars.get(parameter.kind, "") + name
        for name, parameter in inspect.signature(value).parameters.items()
        if name != "self" and not name.startswith("_")
    ]


def fields(value: type) -> list[str] | None:
    """The public fields of a dataclass or a named tuple; None for another class."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif issubclass(value, tuple) and hasattr(value, "_fields"):
        names = [*value._fields]
    else:
        return None
    return [name for name in names if not name.startswith("_")]


def lacks(value: Any) -> list[str]:
    """What the sections of the docstring of a public function or class lack."""
    found = []
    have = sections(words(value))
    prose = ERROR.findall(have[""])
    if prose:
        found.append(f"a section Raises for {prose[0]}, which the prose speaks of")
    if "Raises" in have and not items(have["Raises"]):
        found.append("errors in its section Raises, as `ValueError: When ...`")
    first = re.sub("`.*?`", "", have.get("Returns", "").split("\n")[0])
    if ":" in first:  # what is before it would be shown as a type
        found.append("a section Returns without a colon in its first line")
    if inspect.isclass(value):
        section, names = "Attributes", fields(value)
        if names is None:
            own = "__init__" in vars(value)
            section, names = "Args", parameters(value) if own else []
    else:
        section, names = "Args", parameters(value)
        if names == SCORE or hasattr(value, "renamed_keywords"):  # as for presets
            return found
        returns = inspect.signature(value).return_annotation
        has_result = returns not in (None, "None", inspect.Signature.empty)
        if has_result and not {"Returns", "Yields"} & {*have}:
            found.append("a section Returns")
    if names != (said := items(have.get(section, ""))):
        found.append(f"a section {section} for {names}, not {said}")
    return found


def methods(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A public object, and the public methods that its class defines."""
    yield name, value
    if inspect.isclass(value):
        for key, member in vars(value).items():
            if inspect.isfunction(member) and not key.startswith("_"):
                yield f"{name}.{key}", member


def named_in(hint: Any) -> Iterator[type]:
    """The classes of this library that a type names."""
    if inspect.isclass(hint) and hint.__module__.startswith("sparsefn."):
        yield hint
    for part in typing.get_args(hint):
        yield from named_in(part)


def result_types(value: Any) -> list[Any]:
    """The type that a function returns, or the types of a class's fields."""
    try:
        hints = typing.get_type_hints(value)
    except NameError:  # of a library that is imported for type checkers alone
        return []
    return [*hints.values()] if inspect.isclass(value) else [hints.get("return")]


def results() -> dict[str, type]:
    """The named tuples that functions return, and those in their fields, which no
    public name lists.
    """
    found: dict[str, type] = {}
    seen = {*map(id, CALLED.values())}
    waiting = [value for value in CALLED.values() if inspect.isfunction(value)]
    for value in waiting:
        for hint in result_types(value):
            for kind in named_in(hint):
                if id(kind) not in seen and not kind.__name__.startswith("_"):
                    seen.add(id(kind))
                    if issubclass(kind, tuple):
                        waiting.append(kind)
                        found[f"{kind.__module__}.{kind.__name__}"] = kind
    return found


RESULTS = results()
DOCUMENTED = {
    key: member
    for name, value in CALLED.items()
    if is_code(value)
    for key, member in methods(name, value)
} | RESULTS


def test_results_are_held_to_it_without_a_public_name() -> None:
    assert {
        "sparsefn.report.summary.Summary",
        "sparsefn.report.summary.Row",  # a field of it
    } <= {*RESULTS}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_sections_say_what_arguments_and_results_are(name: str) -> None:
    assert lacks(DOCUMENTED[name]) == []
