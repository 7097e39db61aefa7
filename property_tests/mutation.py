"""Mutation testing: change a module in one place at a time, and see which changes no
test notices.

`python -m property_tests.mutation sparsefn/masks/select.py tests/masks/test_select.py
...` prints the mutants that survive of one module. The mutants are those of mutmut's
operators, less those of texts and those that put None for a value. No file is changed:
a mutant exists in a forked process only. It is tried twice. First its code is put into
the functions of a session that has collected the tests already, which is quick, but
what was made while importing stays unmutated; so who survives that is imported anew.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.machinery
import inspect
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import libcst as cst
import pytest
from mutmut.mutation import mutators
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.pragma_handling import IgnoredCode

ROOT = Path(__file__).parents[1]
# Imported before any fork; nothing here may import the library.
WARM = [
    "torch",
    "torch.func",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "optree",
    "hypothesis",
    "numpy",
]
OPTIONS = [
    "-x",
    "-q",
    "--tb=no",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
]
PASSED = 0
QUICK = 4.0  # seconds of tests that are tried first
SLOW = 12  # seconds of a processor for them: more is a loop without an end


class _Visitor(MutationVisitor):
    # mutmut's own runner must leave out functions with decorators, such as properties
    # and operators.
    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        return not isinstance(
            node, cst.FunctionDef
        ) and super()._skip_node_and_children(node)


def mutants(source: str) -> Iterator[str]:
    """The source, changed in one place: not its texts, nor what a run on one device
    cannot see.
    """
    operators = [
        (kind, _fewer(operator)) for kind, operator in mutators.mutation_operators
    ]
    visitor = _Visitor(operators, IgnoredCode(set(), set(), set()))
    module = cst.metadata.MetadataWrapper(cst.parse_module(source)).visit(visitor)
    for mutation in visitor.mutations:
        yield module.deep_replace(mutation.original_node, mutation.mutated_node).code  # type: ignore[arg-type]


def _fewer(operator: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if operator in (mutators.operator_string, mutators.operator_assignment):
        return lambda node: []
    if operator is mutators.operator_arg_removal:
        return lambda node: [new for new in operator(node) if _visible(node, new)]
    return operator


def _visible(call: cst.Call, fewer: cst.Call) -> bool:
    names = [
        [arg.keyword.value for arg in node.args if arg.keyword]
        for node in (call, fewer)
    ]
    return len(fewer.args) < len(call.args) and not ({*names[0]} - {*names[1]}) & {
        "strict",
        "device",
    }


def outcome(run: Callable[[], int], limit: int) -> int:
    """The exit status of a forked process that makes the call; negative if it needed
    more than so many seconds.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os._exit(run())
    except BaseException:
        os._exit(1)


def anew(path: Path, source: str, tests: list[str]) -> int:
    """Run the tests where this is the source of the module, from its import on."""
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, name: str) -> CodeType | None:
        mine = Path(self.path) == path
        return (
            compile(source, str(path), "exec", dont_inherit=True)
            if mine
            else plain(self, name)
        )

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    return int(pytest.main([*OPTIONS, *tests]))


def put_in(module: ModuleType, source: str) -> None:
    """Give the functions of a module the code of this source."""
    fresh: dict[str, Any] = {**vars(module)}
    exec(compile(source, str(module.__file__), "exec", dont_inherit=True), fresh)
    _swap(vars(module), fresh)


def _swap(old: Any, new: Any) -> None:
    for name, value in new.items():
        was = old.get(name)
        if inspect.isfunction(was) and inspect.isfunction(value):
            # the function inside its decorators
            was, value = (inspect.unwrap(was), inspect.unwrap(value))
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                setattr(was, part, getattr(value, part))
        elif inspect.isclass(was) and was is not value:
            _swap(vars(was), vars(value))
        elif isinstance(old, dict):
            old[name] = value


class Quick:
    """A pytest plugin: instead of running the tests once, run the quicker ones in a
    fork for every mutant.
    """

    def __init__(self, name: str, sources: list[str], notes: Path, limit: int) -> None:
        self.name, self.sources, self.notes, self.limit = name, sources, notes, limit
        self.took: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        start = time.process_time()
        done = yield
        self.took[item.nodeid] = time.process_time() - start
        return done

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        from _pytest.main import pytest_runtestloop as run

        def attempt(source: str | None) -> int:
            if source is not None:
                put_in(sys.modules[self.name], source)
            run(session)
            if source is None:
                (self.notes / "took").write_text(json.dumps(self.took))
            return int(session.testsfailed)

        if outcome(lambda: attempt(None), self.limit):
            raise pytest.UsageError("the tests fail on the module as it is")
        took = json.loads((self.notes / "took").read_text())
        session.items.sort(key=lambda item: took[item.nodeid])
        sums = list(itertools.accumulate(took[item.nodeid] for item in session.items))
        del session.items[1 + sum(x < QUICK for x in sums) :]
        for source in self.sources:
            status = outcome(
                lambda source=source: attempt(source), min(self.limit, SLOW)
            )  # type: ignore[misc]
            with (self.notes / "statuses").open("a") as file:
                file.write(f"{status}\n")
        return True


def difference(old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def numbers(text: str) -> set[int]:
    """The numbers of a list with ranges: 3,7,20-40."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return {number for part in ends for number in range(part[0], part[-1] + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="+", help="files and other arguments for pytest")
    parser.add_argument(
        "--limit", type=int, default=60, help="seconds of a processor for a mutant"
    )
    parser.add_argument(
        "--every", type=int, default=1, help="try only every so many-th mutant"
    )
    parser.add_argument("--first", type=int, default=0, help="from this one on")
    parser.add_argument(
        "--only", type=numbers, help="try only those of these numbers: 3,7,20-40"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="do not import anew those that survive the quicker tests",
    )
    given, options = parser.parse_known_args()
    tests, path = [*given.tests, *options], (ROOT / given.module).resolve()
    for name in WARM:
        importlib.import_module(name)
    source = path.read_text()
    chosen = {
        number: mutant
        for number, mutant in enumerate(mutants(source))
        if (
            number % given.every == given.first
            if given.only is None
            else number in given.only
        )
    }
    sources = list(chosen.values())
    with tempfile.TemporaryDirectory() as folder:
        # The module as it is comes first: putting in a source must not be what the
        # tests notice.
        quick = Quick(
            ".".join(given.module.with_suffix("").parts),
            [source, *sources],
            Path(folder),
            given.limit,
        )
        if outcome(lambda: int(pytest.main([*OPTIONS, *tests], [quick])), 10**6):
            sys.exit("the tests fail on the module as it is")
        unchanged, *statuses = [
            int(line) for line in Path(folder, "statuses").read_text().split()
        ]
    assert unchanged == PASSED and len(statuses) == len(sources)
    for i, (number, mutant) in enumerate(chosen.items()):
        if statuses[i] == PASSED and not given.quick:
            statuses[i] = outcome(
                lambda mutant=mutant: anew(path, mutant, tests), given.limit
            )  # type: ignore[misc]
        if statuses[i] <= PASSED:
            print(f"{number} {statuses[i]}\n{difference(source, mutant)}\n", flush=True)
    left, late = (
        sum(status == PASSED for status in statuses),
        sum(status < PASSED for status in statuses),
    )
    print(
        f"{given.module}: {len(sources)} mutants, {left} survived, {late} ran out of "
        "time"
    )


if __name__ == "__main__":
    main()
