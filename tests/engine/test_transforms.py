"""Which values a transform hides, and which ones compiled code knows."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap

import sparsefn
from sparsefn import tree
from sparsefn.engine import transforms

PACKAGE = Path(sparsefn.__file__).parent


def test_concrete_values_and_hidden_ones():
    assert (
        transforms.concrete(3) == 3
        and transforms.concrete(torch.tensor(2.5)) == 2.5
        and transforms.concrete(torch.tensor(True)) is True
    )
    seen = []
    torch.func.vmap(lambda x: (seen.append(transforms.concrete(x)), x)[1])(torch.ones(2))
    torch.func.grad(lambda x: (seen.append(transforms.concrete(x)), x)[1])(torch.tensor(2.0))
    assert seen == [None, 2.0]


def test_the_mark_for_compile_time_is_that_of_torch():
    def ours(word):
        return len(word)

    def theirs(word):
        return len(word)

    assert vars(transforms.at_compile_time(ours)) == vars(torch.compiler.assume_constant_result(theirs))
    # Without the mark the compiler gives up on a function that it cannot trace.
    path = transforms.at_compile_time(lambda: sum(ord(c) for c in __import__("pathlib").Path("a").name))
    compiled = torch.compile(lambda x: x + path(), backend="eager", fullgraph=True)
    assert compiled(torch.tensor(1.0)) == 98.0


def test_fixed_sizes_and_known_floats_are_numbers_in_compiled_code():
    def count(x, share):
        tree.fix_sizes({"x": x})
        return x, round(transforms.known(share) * x.shape[0]), max([*x.shape], default=0)

    compiled = torch.compile(count, fullgraph=True, backend="eager", dynamic=True)
    for n, share in [(5, 0.5), (6, 0.3), (7, 0.5)]:
        assert compiled(torch.ones(n, 3), share)[1:] == (round(share * n), n)
    assert transforms.known(0.1) == 0.1 and transforms.known(True) is True


def test_derivatives_are_asked_for_by_grad_jvp_and_requires_grad():
    seen = []

    def note(x):
        seen.append(transforms.differentiated(x))
        return x.sum()

    x = torch.ones(2)
    note(x)
    vmap(note)(x)
    grad(note)(x)
    vmap(grad(note))(torch.ones(2, 2))
    jvp(note, (x,), (x,))
    note(x.clone().requires_grad_())
    assert seen == [False, False, True, True, True, True]
    assert torch.compile(lambda x: x + transforms.differentiated(x), backend="eager", fullgraph=True)(x).tolist() == [
        2.0,
        2.0,
    ]


def seen_by(ask):
    """What a question answers in each place: eager, vmap, grad, jvp, a mode, compiled."""
    answers = {}

    def note(place):
        def at(x):
            answers[place] = ask()
            return x.sum()

        return at

    x = torch.ones(2)
    note("eager")(x)
    vmap(note("vmap"))(x)
    grad(note("grad"))(x)
    jvp(note("jvp"), (x,), (x,))
    with FakeTensorMode():
        note("mode")(torch.ones(2))
    answers["compiled"] = bool(torch.compile(lambda x: x + ask(), backend="eager", fullgraph=True)(x)[0] == 2.0)
    return {place for place, answer in answers.items() if answer}


def test_each_question_is_answered_in_each_place():
    assert seen_by(transforms.transformed) == {"vmap", "grad", "jvp", "compiled"}
    assert seen_by(transforms.hides_memory) == {"grad", "jvp", "mode", "compiled"}
    assert seen_by(transforms.in_forward_mode) == {"jvp"}
    assert seen_by(lambda: transforms.in_mode() and not torch.compiler.is_compiling()) == {"mode"}


def test_real_tensors_are_made_outside_modes():
    with FakeTensorMode():
        with transforms.outside_modes():
            assert torch.full((), 3.0).item() == 3.0
        assert transforms.in_mode() and not transforms.is_plain(torch.ones(2))
    with transforms.outside_modes():
        assert torch.full((), 3.0).item() == 3.0


def test_wrapped_tensors_are_not_plain_and_can_be_unwrapped():
    x, seen = torch.ones(3, 2), []

    def note(row):
        seen.append((transforms.is_plain(row), transforms.unwrapped(row) is x))
        return row.sum()

    vmap(grad(note))(x)
    assert seen == [(False, True)] and transforms.is_plain(x) and transforms.is_plain(torch.nn.Parameter(x))


def private_names(source: str) -> list[str]:
    """What a module names of torch, of functorch or of torch.library that begins with an underscore."""
    found, modules = [], {"torch"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "functorch"):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in ("torch", "functorch")]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.split(".")[0] in modules:
                found.append(name)
    return [name for name in found if re.search(r"\._(?!_)|functorch", name)]


# The laws count graphs with a test tool of the compiler, and operations with a mode, which has no public name.
TOOLS = {"testing/laws_transforms.py", "testing/harness.py"}


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_private_names_of_torch_have_one_place(file):
    if file.relative_to(PACKAGE).as_posix() not in {"engine/transforms.py", *TOOLS}:
        assert not private_names(file.read_text(encoding="utf-8"))


def test_the_rule_sees_every_way_to_name_them():
    for said in (
        "from torch._C import x",
        "import torch._dynamo",
        "torch._C.y()",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "from torch.utils._python_dispatch import z",
        "import functorch",
    ):
        assert private_names(f"import torch\n{said}"), said
    assert not private_names("import torch\nfrom torch import Tensor\ntorch.ones(2).__class__\nself._x")
