"""README and docs: every Python block runs, every relative link, file and name leads
somewhere.
"""

import operator
import re
from pathlib import Path
from typing import Any

import api_page
import pytest
import torch
from pages import links, run, runnable, split
from test_public import PUBLIC

import sparsefn as sf

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Recipes need libraries of their own: docs/recipes/test_recipes.py runs them.
RUN_HERE = [page for page in PAGES if page.parent.name != "recipes"]
WRITTEN = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "kernels/README.md")),
    *sorted((ROOT / "sparsefn").rglob("README.md")),
]
TEXTS = {page: page.read_text(encoding="utf-8") for page in WRITTEN}
PLACES = [
    ROOT,
    *(
        ROOT / name
        for name in (
            "docs",
            "examples",
            "benchmarks",
            "property_tests",
            "tests",
            "sparsefn",
        )
    ),
]
PLACES += (ROOT / "sparsefn").rglob("*/")
NAME = re.compile(r"\b(?:sf|sparsefn)((?:\.(?!py\b|md\b)[A-Za-z_]\w*)+)")
TERMS = {
    "weights": (
        "leaf",
        "path",
        "entry",
        "latent",
        "mask",
        "support",
        "sparsity",
        "density",
        "level",
        "gate",
    ),
    "patterns": ("pattern", "unit", "tied set", "group", "pool"),
    "selection": ("score", "winner", "eligible", "count", "budget", "distribution"),
    "runs": ("trigger", "schedule", "state", "algorithm", "view", "term", "law"),
}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.deep(but=["README.md"])
@pytest.mark.parametrize("page", RUN_HERE, ids=named)
def test_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(page.read_text(encoding="utf-8"), str(page))


def test_links_lead_somewhere() -> None:
    found = [(page, target) for page in PAGES for target in links(TEXTS[page])]
    assert [
        f"{named(page)}: {target}"
        for page, target in found
        if not (page.parent / target).exists()
    ] == []


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", split(text)[0], re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in titles
    }


def test_anchors_are_headings() -> None:
    found = [
        (page, *to.split("#"))
        for page in PAGES
        for to in re.findall(r"\]\(([^)\s:]*#[^)\s]+)\)", TEXTS[page])
    ]
    assert [
        f"{named(page)}: {path}#{to}"
        for page, path, to in found
        if to
        not in anchors(
            (page.parent / path if path else page).read_text(encoding="utf-8")
        )
    ] == []


def test_the_glossary_has_a_line_for_each_term() -> None:
    lines = TEXTS[ROOT / "docs" / "glossary.md"].splitlines()
    heads = [line.split(":")[0].lower() for line in lines if line.startswith("- ")]
    terms = [term for terms in TERMS.values() for term in terms]
    assert [
        term for term in terms if sum(f"**{term}**" in head for head in heads) != 1
    ] == []


def test_every_page_leads_to_the_glossary() -> None:
    assert [
        named(page)
        for page in PAGES
        if page.name != "glossary.md" and "glossary.md" not in TEXTS[page]
    ] == []


def test_the_readme_is_short() -> None:
    assert len(TEXTS[PAGES[0]].splitlines()) <= 120


def test_the_readme_shows_the_two_commands() -> None:
    shown = [
        line for block in split(TEXTS[PAGES[0]])[1] for line in block.code.splitlines()
    ]
    assert {"make demo", "make test"} <= {
        line.split("#")[0].removeprefix("$ ").strip() for line in shown
    }


def test_every_public_name_is_on_its_page() -> None:
    written = api_page.PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^- `sf\.([\w.]+)`: ", written, re.MULTILINE)
    assert sorted(listed) == sorted(PUBLIC), (
        "docs/api.md has a line for each public name"
    )
    assert written == api_page.page(), (
        "docs/api.md is out of date: run `python tests/api_page.py`"
    )


def missing_files(text: str) -> list[str]:
    """Files and folders in backticks that are nowhere: at the root, beside a folder of
    it, or below `sparsefn/`.
    """
    named = re.findall(
        r"`(?:python )?([\w./-]+(?:\.(?:py|md|txt|toml)|/))(?= |`)", split(text)[0]
    )
    return [
        path for path in named if not any((place / path).exists() for place in PLACES)
    ]


def missing_names(text: str) -> list[str]:
    """Names such as `sf.scores.magnitude` that lead nowhere, in prose and in code that
    runs.
    """
    missing = []
    for name in {
        *NAME.findall(
            "\n".join([split(text)[0], *(block.code for block in runnable(text))])
        )
    }:
        try:
            operator.attrgetter(name.removeprefix("."))(sf)
        except AttributeError:
            missing.append("sf" + name)
    return sorted(missing)


def test_files_that_a_page_names_exist() -> None:
    assert [
        f"{named(page)}: {file}"
        for page in WRITTEN
        for file in missing_files(TEXTS[page])
    ] == []


def test_names_that_a_page_uses_exist() -> None:
    assert [
        f"{named(page)}: {name}"
        for page in WRITTEN
        if page.name != "moved.md"  # names of the last release
        for name in missing_names(TEXTS[page])
    ] == []


def test_a_file_or_name_that_is_gone_is_found() -> None:
    text = page(
        "`sparsefn/core/state.py`, `state.py`, `benchmarks/` and `gone/budgets.py`",
        "`sf.scores.gone`, `sf.set(0.5)`",
    )
    assert (missing_files(text), missing_names(text)) == (
        ["gone/budgets.py"],
        ["sf.scores.gone"],
    )


def page(*lines: str) -> str:
    return "\n".join(lines)


def test_blocks_share_a_namespace_and_run_in_order() -> None:
    text = page(
        "```python",
        "seen = [1]",
        "```",
        "- a list",
        "  ```python",
        "  if seen:",
        "      seen.append(2)",
        "  ```",
    )
    run(text + page("", "~~~python", "assert seen == [1, 2]", "~~~"), "page.md")


def test_what_a_block_prints_is_known_by_the_line_of_its_last_fence() -> None:
    text = page(
        "# Title", "```python", "x = 1", "print(x)", "```", "```python", "x", "```"
    )
    assert run(text, "page.md") == {5: "1\n", 8: ""}


def test_a_failing_block_names_the_page_and_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run(page("# Title", "", "```python", "x = 1", "1 / 0", "```"), "page.md")
    last = raised.traceback[-1]
    assert (str(last.frame.code.raw.co_filename), last.lineno + 1) == ("page.md", 5)


def test_a_marked_block_does_not_run() -> None:
    run(
        page(
            "<!-- no-run: needs two machines -->",
            "",
            "```python",
            "1 / 0",
            "```",
            "```sh",
            "rm x",
            "```",
        ),
        "page.md",
    )


def test_a_mark_holds_for_the_next_block_only() -> None:
    mark, block = "<!-- no-run: slow -->", ("```python", "1 / 0", "```")
    assert len(runnable(page(mark, *block, *block))) == 1
    assert len(runnable(page(mark, "Some text.", *block))) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ("<!-- no-run -->", "```python", "1", "```"),
            "line 2: a block that does not run says why",
        ),
        (
            ("<!-- no-run: -->", "```python", "1", "```"),
            "line 2: a block that does not run says why",
        ),
        (
            ("```py", "1", "```"),
            "line 1: write ```python, not ```py, so that the block runs",
        ),
        (("```python", "1"), "line 1: this block is never closed"),
    ],
)
def test_a_page_that_would_hide_a_block_is_refused(
    lines: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runnable(page(*lines))


def test_links_are_read_from_prose_alone() -> None:
    text = page(
        "[a](docs/a.md#top) [b](https://x.org/b.md) [c](#here) [![d](d.png "
        "'title')](d.md) `[e](e.md)` [f][g]",
        "[g]: ../g.md",
        "```python",
        "table[0](key)",
        "```",
    )
    assert links(text) == ["docs/a.md", "d.png", "d.md", "../g.md"]


def rows_of_the_table(text: str) -> list[str]:
    """The code of each row under "Which algorithm": arguments and names first, the
    algorithms last.
    """
    table = text.split("## Which algorithm")[1].split("\n## ")[0]
    return [
        line.split(" | ")[1]
        for line in table.splitlines()
        if line.startswith("| ") and "`sf." in line
    ]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.ModuleDict(
            {"up_proj": torch.nn.Linear(8, 16), "down_proj": torch.nn.Linear(16, 8)}
        )
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.mlp.down_proj(torch.relu(self.mlp.up_proj(x))))  # type: ignore[no-any-return]


def of_the_user(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor
) -> dict[str, object]:
    """What the rows take from their reader."""

    def loss(
        params: object, x: torch.Tensor, y: torch.Tensor, temperature: float = 1.0
    ) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            sf.modules.call(model, params, x) / temperature, y
        )

    params = sf.modules.params_of(model)
    wide = {path: leaf.shape[1] for path, leaf in params.items() if leaf.ndim > 1}
    return {
        "sf": sf,
        "masks": sf.static(0.5).init(params).masks,
        "stats": {
            path: {"count": torch.tensor(4), "square": torch.ones(n).double()}
            for path, n in wide.items()
        },
        "grams": {path: torch.eye(n) for path, n in wide.items()},
        "loss": loss,
        "batch": (x, y),
        "model": model,
        "x": x,
        "prune": sf.iterative(0.1, when=sf.always()),
        "regrow": sf.rigl("current", when=sf.always(), drop_fraction=0.1),
        "rows": sf.static(0.5, pattern=sf.patterns.channel(0)),
        "weights": sf.static(0.75),
    }


@pytest.mark.deep(but=["`sf.gmp*200)`", "`sf.one_shot*"])
@pytest.mark.parametrize("row", rows_of_the_table(TEXTS[PAGES[0]]))
def test_every_row_of_the_readme_works_in_its_loop(row: str) -> None:
    (loop,) = [
        block.code for block in runnable(TEXTS[PAGES[0]]) if "sf.attach(" in block.code
    ]
    before, rest = loop.split("\nalgorithm = ")
    _, training = rest.split("\n", 1)
    training, _ = training.split("\nassert ")  # how many RigL keeps
    namespace: dict[str, Any] = {}
    exec(f"{before}\nalgorithm = {row.strip('`')}\n{training}", namespace)
    namespace["sparse"].check()
    assert 0.0 < sf.masks.sparsity(namespace["sparse"].masks) < 1.0


@pytest.mark.parametrize("row", rows_of_the_table(TEXTS[ROOT / "docs" / "choose.md"]))
def test_every_row_of_the_table_works_under_attach_as_it_stands(row: str) -> None:
    spans = re.findall(r"`([^`]+)`", row)
    torch.manual_seed(0)
    x, y = torch.randn(16, 8), torch.arange(16) % 4
    for made in [span for span in spans if span.startswith("sf.")]:
        model = Net()
        names = of_the_user(model, x, y)
        for name, value in (span.split(" = ") for span in spans if " = " in span):
            names[name] = eval(value, names)
        given = (
            span.split("=", 1) for span in spans if re.match(r"(skip|reset)=", span)
        )
        options = {name: eval(value, names) for name, value in given}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sparse = sf.attach(eval(made, names), model, optimizer, **options)
        for step in range(4):
            torch.nn.functional.cross_entropy(model(x), y).backward()
            sparse.before_step()
            optimizer.step()
            optimizer.zero_grad()
            sparse.after_step(step)
        sparse.check()
        assert all(weight.isfinite().all() for weight in model.parameters())


def test_rows_are_found() -> None:
    found = rows_of_the_table(
        "## Which algorithm\n| a | b | c |\n|---|---|---|\n| x | `sf.f()` with `a=b` "
        "| y |\n## Z"
    )
    assert found == ["`sf.f()` with `a=b`"]
