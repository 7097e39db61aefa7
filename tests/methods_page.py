"""The cards of published methods: `python tests/methods_page.py` writes their part of
docs/methods.md.
"""

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import sparsefn.methods
from sparsefn import methods

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
BEGIN = "<!-- cards: made by `python tests/methods_page.py` -->"
END = "<!-- end of the cards -->"
PAPER = re.compile(
    r"[A-Z][\w-]+(?: (?:et al\.|(?:&|and) [\w-]+))? (?:19|20)\d\d, arXiv \d{4}\.\d{4,5}"
)
YEAR = re.compile(r"\b(?:19|20)\d\d\b")
LONGEST = 190  # characters of an expression; a longer one keeps some of its variables
# three or more
AUTHORS = re.compile(r"(\w[\w -]*)(?:, [\w -]+)+ and [\w -]+ ((?:19|20)\d\d)")
SAME = ("The authors' code does the same", "The paper published no code")


class Method(NamedTuple):
    """What the page says of a method."""

    name: str
    headline: str
    expression: str
    paper: str
    verified: str


def named() -> dict[str, Callable[..., Any]]:
    """The functions that `sparsefn.methods` hands on, by name."""
    given = {
        name: value for name, value in vars(methods).items() if not name.startswith("_")
    }
    return {
        name: given[name] for name in sorted(given) if inspect.isfunction(given[name])
    }


def paragraphs(doc: str) -> list[str]:
    """The paragraphs of a docstring, each in one line."""
    return [
        " ".join(part.split()) for part in re.split(r"\n\s*\n", inspect.cleandoc(doc))
    ]


def method(name: str, make: Callable[..., Any]) -> Method:
    """What the docstring and the source of a method say."""
    parts = paragraphs(make.__doc__ or "")
    headline = parts[0]
    verified = [part for part in parts if part.startswith("Verified by ")]
    differs = [
        part
        for part in parts
        if part.startswith("Differs from the authors' code: ") or part.startswith(SAME)
    ]
    # its docstring has another form, and tests/test_golden_*.py its recordings
    if is_handed_on(make):
        found = [paper for part in parts for paper in PAPER.findall(part)]
        return Method(
            name, headline, f"`sf.{name}`", "; ".join(found), "recordings, and laws"
        )
    if len(verified) != 1 or len(differs) != 1 or not YEAR.search(parts[-1]):
        raise ValueError(
            f"{name}: expected a paragraph 'Verified by ...', one on the authors' "
            f"code and the paper at the end of its docstring, got {len(verified)}, "
            f"{len(differs)} and {parts[-1]!r}"
        )
    told = verified[0].removeprefix("Verified by ").rstrip(".")
    paper = AUTHORS.sub(r"\1 et al. \2", parts[-1].rstrip("."))
    return Method(
        name, headline, f"`{expression(make)}`", paper, without_brackets(told)
    )


def is_handed_on(make: Callable[..., Any]) -> bool:
    """Whether a name is that of the top level."""
    return not make.__module__.startswith(methods.__name__)


def without_brackets(text: str) -> str:
    """The text without what stands in brackets."""
    while (shorter := re.sub(r"\s*\([^()]*\)", "", text)) != text:
        text = shorter
    return text


# ---- the expression ------------------------------------------------------------------


def expression(make: Callable[..., Any]) -> str:
    """What a method returns, with the values of its variables in their places and the
    public names of its parts.
    """
    function = inspect.unwrap(make)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    # the values of variables, without other variables in them
    deep: dict[str, ast.expr] = {}
    flat: dict[str, ast.expr] = {}  # the same as they stand
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=variable)], value=value) if (
                not has_private_name(value)
            ):
                deep[variable], flat[variable] = (
                    inlined(value, x, function.__globals__) for x in (deep, {})
                )
            case ast.Return(value=ast.expr() as value):
                texts = [
                    ast.unparse(inlined(value, x, function.__globals__))
                    for x in (deep, flat, {})
                ]
                return next((text for text in texts if len(text) <= LONGEST), texts[-1])
    raise ValueError(
        f"{function.__name__}: expected a return at the end of the function"
    )


def has_private_name(value: ast.expr) -> bool:
    """Whether an expression is made of parts that a reader has no name for: its
    variable then stands for it.
    """
    return any(
        isinstance(part, ast.Name) and part.id.startswith("_")
        for part in ast.walk(value)
    )


def inlined(
    value: ast.expr, values: dict[str, ast.expr], names: dict[str, Any]
) -> ast.expr:
    """An expression with values in the places of variables, and public names."""
    made: ast.expr = ast.fix_missing_locations(
        Inlined(values, names).visit(copy.deepcopy(value))
    )
    return made


class Inlined(ast.NodeTransformer):
    """Puts values in the places of variables, and leaves out the arguments that are
    only passed on.
    """

    def __init__(self, values: dict[str, ast.expr], names: dict[str, Any]) -> None:
        self.values, self.names = values, names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A variable's value, or the public name of a part."""
        if node.id in self.values:
            return copy.deepcopy(self.values[node.id])
        return ast.Name(public_name(node.id, self.names.get(node.id)), node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The call without keywords such as `when=when`."""
        plain = [
            key
            for key in node.keywords
            if not (isinstance(key.value, ast.Name) and key.value.id == key.arg)
        ]
        return self.generic_visit(ast.Call(node.func, node.args, plain))


def public_name(name: str, value: Any) -> str:
    """The name, with `sf.`, of what a module calls `name`, if it has one."""
    if isinstance(value, ModuleType) and getattr(sparsefn, name, None) is value:
        return f"sf.{name}"
    own = getattr(value, "__module__", "") or ""
    if not callable(value) or not own.startswith("sparsefn."):
        return name
    called, modules = getattr(value, "__name__", name), own.split(".")[1:]
    for path in ([], *([part] for part in modules)):
        place: Any = sparsefn
        for part in path:
            # a name that has moved is answered, with a warning, and not listed
            place = getattr(place, part) if part in dir(place) else None
        if getattr(place, called, None) is value:
            return ".".join(["sf", *path, called])
    return called


# ---- the page ------------------------------------------------------------------------


def card(row: Method) -> str:
    """A heading, a sentence, a picture where there is one, the expression, and the
    evidence.
    """
    title, told = row.headline.split(": ", 1)
    name = f"`sf.methods.{row.name}`"
    lines = [f"### {title}", wrapped(f"{name}: {told}")]
    if (PAGE.parent / "gallery" / f"{row.name}.png").exists():
        lines.append(
            "![Masks of one layer at five steps of training with "
            f"{row.name}](gallery/{row.name}.png)"
        )
    if row.expression != f"`sf.{row.name}`":
        lines.append(wrapped(row.expression))
    return "\n\n".join([*lines, wrapped(f"{row.paper}. Verified by {row.verified}.")])


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def page(text: str) -> str:
    """The page with the cards as they are now."""
    before, rest = text.split(BEGIN)
    cards = "\n\n".join(card(method(name, make)) for name, make in named().items())
    return f"{before}{BEGIN}\n\n{cards}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
