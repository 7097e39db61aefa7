"""Pages of Markdown: their prose, their links, and their Python blocks, which are run.
For tests and docs/conf.py.
"""

import re
from contextlib import redirect_stdout
from io import StringIO
from typing import NamedTuple

FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,}|~{3,}) *(?P<info>[^`]*?)\s*$")
NO_RUN = re.compile(r"<!--\s*no-run\b(?P<reason>.*?)-->")
# `[text](target)` or `[label]: target`
LINK = re.compile(r"(?:\]\(|^ {0,3}\[[^\]]+\]:)\s*<?([^)\s>]+)", re.MULTILINE)


class Block(NamedTuple):
    line: int  # of its first line of code, from 1
    language: str
    code: str
    before: str  # the nearest line above the fence that is not blank


def split(text: str) -> tuple[str, list[Block]]:
    """A page's prose, and its fenced blocks in order."""
    prose: list[str] = []
    found: list[Block] = []
    code: list[str] = []
    fence, before, start = None, "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        if fence is None and match:
            fence, start, code = match, number + 1, []
        elif (
            fence is not None
            and match
            and match["ticks"].startswith(fence["ticks"])
            and not match["info"]
        ):
            language = (fence["info"].split() or [""])[0]
            found.append(Block(start, language, "\n".join(code), before))
            fence, before = None, ""
        elif fence is not None:
            code.append(line.removeprefix(fence["indent"]))
        else:
            prose.append(line)
            before = line.strip() or before
    if fence is not None:
        raise ValueError(f"line {start - 1}: this block is never closed")
    return "\n".join(prose), found


def runnable(text: str) -> list[Block]:
    """The Python blocks that a page promises to work."""
    found = []
    for block in split(text)[1]:
        if block.language.lower().startswith("py") and block.language != "python":
            raise ValueError(
                f"line {block.line - 1}: write ```python, not ```{block.language}, so "
                "that the block runs"
            )
        if block.language != "python":
            continue
        mark = NO_RUN.fullmatch(block.before)
        if mark is None:
            found.append(block)
        elif not re.fullmatch(r":\s*\S.*", mark["reason"]):
            raise ValueError(
                f"line {block.line - 1}: a block that does not run says why: <!-- "
                "no-run: reason -->"
            )
    return found


def run(text: str, filename: str) -> dict[int, str]:
    """Run the blocks of one page in order, in one namespace; what each prints, by the
    line of its last fence.
    """
    namespace = {"__name__": "__main__"}
    printed = {}
    for block in runnable(text):
        # Blank lines above the code make a traceback show the page's own line numbers.
        code = compile("\n" * (block.line - 1) + block.code, filename, "exec")
        with redirect_stdout(StringIO()) as out:
            exec(code, namespace)
        printed[block.line + block.code.count("\n") + 1] = out.getvalue()
    return printed


def links(text: str) -> list[str]:
    """The relative links of a page, without anchors; code is not searched."""
    prose = re.sub(r"`[^`\n]*`", "", split(text)[0])
    return [
        target.split("#")[0]
        for target in LINK.findall(prose)
        if not re.match(r"[a-z][a-z0-9+.-]*:|#", target)
    ]
