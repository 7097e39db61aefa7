"""The site: `make docs` builds it from the pages of this folder, which are plain
Markdown, into out/site.

What the pages do not say in Markdown is added here: menus from comments
`<!-- contents: Caption -->` above a list of links, the docstrings of names from
comments `<!-- names: scores -->`, and links from names and papers.
"""

import contextlib
import operator
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pybtex.database
import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import sparsefn as sf

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
import pages  # noqa: E402
import test_public  # noqa: E402

os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}

logger = logging.getLogger(__name__)

project, author, version = "sparsefn", "The sparsefn authors", sf.__version__
copyright, release = author, version
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.bibtex",
    "sphinx_copybutton",
]
napoleon_use_ivar = True
napoleon_attr_annotations = False
myst_heading_anchors = 4
smartquotes = False
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# docs/reference/state.md says what they are
autodoc_type_aliases = {name: name for name in sf.typing.__all__}
autosummary_generate = False
maximum_signature_line_length = 88
bibtex_bibfiles = ["references.bib"]
bibtex_cite_id = "{key}"
copybutton_prompt_text = ">>> |... "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .go"

html_theme = "sphinx_book_theme"
html_title = f"sparsefn {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "navbar_persistent": [],
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}

# ---- pages ---------------------------------------------------------------------------

CONTENTS = re.compile(
    r"<!-- contents(?:: (?P<caption>.+?))? -->\n\n(?P<list>(?:(?:- |  ).*\n)+)"
)
NAMES = re.compile(r"<!-- names: (?P<names>[\w\s.]+)-->")
PAGE = re.compile(r"^- \[(?P<title>[^\]]*)\]\((?P<page>[\w/.-]+)\.md\)", re.MULTILINE)
TUTORIALS = re.findall(
    r"\]\(\.\./(recipes/\w+)\.md\)",
    (HERE / "tutorials" / "index.md").read_text(encoding="utf-8"),
)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<to>\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


def written(app: Sphinx, docname: str, source: list[str]) -> None:
    """A page as Sphinx reads it: its code has been run, and is followed by what it
    printed.
    """
    # recipes need more libraries: `make recipes`; tests/test_docs.py runs all others
    is_tutorial = docname.startswith("tutorials/") or docname in TUTORIALS
    left_out = docname.startswith("recipes/") or app.tags.has("tutorials_alone")
    if is_tutorial or not left_out:
        source[0] = with_output(source[0], docname)
    folder = (HERE / docname).parent

    def outside(link: re.Match[str]) -> str:
        # Files of the repository that are no pages: the site has no copy of them.
        file = (folder / link["to"]).resolve()
        if file.is_relative_to(HERE) or not file.exists():
            return link[0]
        path = f"`{file.relative_to(HERE.parent)}`"
        return path if link["text"] in path else f"{link['text']} ({path})"

    text = LINK.sub(outside, source[0])
    text = CONTENTS.sub(lambda match: match["list"] + menu(match), text)
    source[0] = NAMES.sub(lambda match: reference(match["names"].split()), text)


def with_output(text: str, docname: str) -> str:
    """The page, with what each block printed below it."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            printed = pages.run(text, f"{docname}.md")
        except Exception as error:
            lines = [
                frame.lineno
                for frame in traceback.extract_tb(error.__traceback__)
                if frame.filename == f"{docname}.md"
            ]
            logger.warning(
                "a block raised %r",
                error,
                location=(docname, lines[-1] if lines else None),
            )
            return text
    made = []
    for number, line in enumerate(text.splitlines(), start=1):
        made.append(line)
        if shown := printed.get(number, "").rstrip():
            made += ["", "~~~{code-block} text", ":class: printed", "", shown, "~~~"]
    return "\n".join(made) + "\n"


def menu(match: re.Match[str]) -> str:
    """A menu of the pages of a list."""
    caption = f":caption: {match['caption']}\n" if match["caption"] else ""
    entries = "\n".join(
        f"{page['title']} <{page['page']}>" for page in PAGE.finditer(match["list"])
    )
    return f"\n```{{toctree}}\n:hidden:\n{caption}\n{entries}\n```\n"


# ---- names ---------------------------------------------------------------------------


def members(name: str) -> list[str]:
    """A name after `sf.`, or all names of a module."""
    value = valued(name)
    if not isinstance(value, ModuleType):
        return [f"sparsefn.{name}"]
    inside = {part: getattr(value, part) for part in value.__all__}
    return [
        f"sparsefn.{name}.{part}"
        for part, each in inside.items()
        if not isinstance(each, ModuleType)
    ]


def valued(name: str) -> Any:
    """What a name stands for."""
    return operator.attrgetter(name.removeprefix("sparsefn."))(sf)


def reference(names: list[str]) -> str:
    """A table of names, and their docstrings."""
    every = [each for name in names for each in members(name)]
    table = [
        ".. autosummary::",
        "   :nosignatures:",
        "",
        *(f"   ~{name}" for name in every),
        "",
    ]
    return "\n".join(
        [
            "```{eval-rst}",
            *table,
            *(line for name in every for line in directive(name)),
            "```",
        ]
    )


def directive(name: str) -> list[str]:
    """The docstring of a name."""
    value = valued(name)
    if isinstance(value, type):
        fields = [
            *getattr(value, "_fields", ()),
            *getattr(value, "__dataclass_fields__", ()),
        ]
        return [
            f".. autoclass:: {name}",
            "   :members:",
            f"   :exclude-members: {', '.join(fields)}",
            "",
        ]
    if hasattr(value, "__code__") or hasattr(value, "__wrapped__"):
        return [f".. autofunction:: {name}", ""]
    return [
        f".. autodata:: {name}",
        *([] if isinstance(value, dict) else ["   :no-value:"]),
        "",
    ]


def docstring(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """A docstring, which is Markdown with doctests, as reStructuredText; of a constant
    without one, its type.
    """
    if what == "data" and value.__doc__ == type(value).__doc__:
        lines[:] = [f"`{type(value).__name__}`."]
    lines[:] = [line for block in blocks(lines) for line in [*converted(block), ""]]


def blocks(lines: list[str]) -> list[list[str]]:
    """What stands between blank lines."""
    return [
        part.splitlines()
        for part in re.split(r"\n\s*\n", "\n".join(lines))
        if part.strip()
    ]


def converted(block: list[str]) -> list[str]:
    """One block: a doctest as it is, an aligned table as code, and text with its code
    and special characters marked.
    """
    if block[0].lstrip().startswith(">>>"):
        return block
    if any(re.match(r"`\w+` {2,}\S", line) for line in block):
        head = [] if block[0].startswith("`") else [block[0], ""]
        return [
            *head,
            "::",
            "",
            *(f"   {line.replace('`', '')}" for line in block[len(head) // 2 :]),
        ]
    text = ""
    for i, part in enumerate(re.split(r"(?<!`)`([^`]+)`(?!`)", "\n".join(block))):
        if i % 2:
            text += f"``{' '.join(part.split())}``"
            continue
        after = i and re.match(r"\w", part)  # `leaf`s
        plain = re.sub(
            # napoleon has escaped the stars of *args
            r"(\*\*\S.*?\S\*\*|\\[*])|([\\*|]|_(?!\w))",
            lambda m: m[1] or "\\" + m[2],
            part,
            flags=re.DOTALL,
        )
        text += "\\ " * bool(after) + plain
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("- ")), 0)
    return [*lines[:first], *([""] if first else []), *lines[first:]]


def signature(
    app: Sphinx,
    what: str,
    name: str,
    value: Any,
    options: Any,
    args: str | None,
    returns: str | None,
) -> Any:
    """Functions among the defaults by name, and what holds a lambda as an ellipsis."""

    def plain(text: str) -> str:
        # an alias in a union
        text = re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text)
        text = re.sub(
            r"(?<== )\([^()]*<lambda>[^()]*\)|<function [\w.]*<lambda>>", "...", text
        )
        return re.sub(r"<function ([\w.]+)>", r"\1", text)

    return (
        (plain(args), plain(returns) if returns else returns)
        if args is not None
        else None
    )


def complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Each public name has its place in the reference, and a docstring if it can be
    called. Types for annotations have a table there.
    """
    there = {
        id(valued(name))
        for name, entry in env.domains.python_domain.objects.items()
        if not entry.aliased
    }
    for name, value in test_public.public(sf):
        if name.startswith("typing."):
            continue
        if id(value) not in there:
            logger.warning("sparsefn.%s is on no page of docs/reference", name)
        if callable(value) and not value.__doc__:
            logger.warning("sparsefn.%s has no docstring", name)


# ---- links ---------------------------------------------------------------------------

CALL = re.compile(r"sf\.([\w.]+)(?:\(.*\))?", re.DOTALL)
ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
ENTRIES = pybtex.database.parse_file(str(HERE / "references.bib")).entries
PAPERS = {
    entry.fields["eprint"]: key
    for key, entry in ENTRIES.items()
    if "eprint" in entry.fields
}


def linked(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Names in code lead to their docstring, and papers to the bibliography."""
    there = app.env.domains.python_domain.objects

    def to(page: str, anchor: str, *inside: nodes.Node) -> nodes.reference:
        address = app.builder.get_relative_uri(docname, page)
        return nodes.reference(
            "", "", *inside, refuri=f"{address}#{anchor}", internal=True
        )

    for code in [*doctree.findall(nodes.literal)]:
        call = CALL.fullmatch(code.astext())
        found = there.get(f"sparsefn.{call[1]}") if call else None
        if found and not isinstance(code.parent, nodes.reference):
            code.replace_self(to(found.docname, found.node_id, code.deepcopy()))
    if docname == "bibliography":
        return
    for text in [*doctree.findall(nodes.Text)]:
        parts = ARXIV.split(text)
        if len(parts) == 1 or isinstance(
            text.parent, nodes.reference | nodes.literal | nodes.literal_block
        ):
            continue
        made: list[nodes.Node] = [nodes.Text(parts[0])]
        for number, rest in zip(parts[1::2], parts[2::2], strict=True):
            if number not in PAPERS:
                logger.warning(
                    "arXiv %s is not in references.bib", number, location=docname
                )
            made += [
                to(
                    "bibliography",
                    PAPERS.get(number, ""),
                    nodes.Text(f"arXiv {number}"),
                ),
                nodes.Text(rest),
            ]
        text.parent.replace(text, made)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", written)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)
    app.connect("env-updated", complete)
    app.connect("doctree-resolved", linked)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
