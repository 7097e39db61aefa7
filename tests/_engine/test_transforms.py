"""Which values a transform hides, and which ones compiled code knows."""

import ast
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import sparsefn as sf
from sparsefn import tree
from sparsefn._engine import transforms

PACKAGE = Path(sf.__file__).parent


def test_concrete_values_and_hidden_ones():
    assert (
        transforms.host_number(3) == 3
        and transforms.host_number(torch.tensor(2.5)) == 2.5
        and transforms.host_number(torch.tensor(True)) is True
    )
    seen = []
    torch.func.vmap(lambda x: (seen.append(transforms.host_number(x)), x)[1])(
        torch.ones(2)
    )
    torch.func.grad(lambda x: (seen.append(transforms.host_number(x)), x)[1])(
        torch.tensor(2.0)
    )
    assert seen == [None, 2.0]


def test_the_mark_for_compile_time_is_that_of_torch():
    def ours(word):
        return len(word)

    def theirs(word):
        return len(word)

    assert vars(transforms.at_compile_time(ours)) == vars(
        torch.compiler.assume_constant_result(theirs)
    )
    # Without the mark the compiler gives up on a function that it cannot trace.
    path = transforms.at_compile_time(
        lambda: sum(ord(c) for c in __import__("pathlib").Path("a").name)
    )
    compiled = torch.compile(lambda x: x + path(), backend="eager", fullgraph=True)
    assert compiled(torch.tensor(1.0)) == 98.0


def test_fixed_sizes_and_known_floats_are_numbers_in_compiled_code():
    def count(x, share):
        tree.fix_sizes({"x": x})
        return (
            x,
            round(transforms.as_constant(share) * x.shape[0]),
            max([*x.shape], default=0),
        )

    compiled = torch.compile(count, fullgraph=True, backend="eager", dynamic=True)
    for n, share in [(5, 0.5), (6, 0.3), (7, 0.5)]:
        assert compiled(torch.ones(n, 3), share)[1:] == (round(share * n), n)
    assert transforms.as_constant(0.1) == 0.1 and transforms.as_constant(True) is True


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
    assert torch.compile(
        lambda x: x + transforms.differentiated(x), backend="eager", fullgraph=True
    )(x).tolist() == [
        2.0,
        2.0,
    ]


def seen_by(ask):
    """What a question answers in each place: eager, vmap, grad, jvp, a mode,
    compiled.
    """
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
    answers["compiled"] = bool(
        torch.compile(lambda x: x + ask(), backend="eager", fullgraph=True)(x)[0] == 2.0
    )
    return {place for place, answer in answers.items() if answer}


def test_each_question_is_answered_in_each_place():
    assert seen_by(transforms.transformed) == {"vmap", "grad", "jvp", "compiled"}
    assert seen_by(lambda: transforms.as_numpy([]) is None) == {
        "grad",
        "jvp",
        "mode",
        "compiled",
    }
    assert seen_by(
        lambda: transforms.in_mode() and not torch.compiler.is_compiling()
    ) == {"mode"}


def test_real_tensors_are_made_outside_modes():
    with FakeTensorMode():
        with transforms.outside_modes():
            assert torch.full((), 3.0).item() == 3.0
        assert (
            transforms.in_mode() and transforms.as_numpy_inside([torch.ones(2)]) is None
        )
    with transforms.outside_modes():
        assert torch.full((), 3.0).item() == 3.0


def test_wrapped_tensors_can_be_unwrapped():
    x, seen = torch.ones(3, 2), []

    def note(row):
        seen.append((transforms.unwrapped(row) is x, transforms.as_numpy_inside([row])))
        return row.sum()

    vmap(grad(note))(x)
    vmap(note)(x)
    assert seen == [(True, None)] * 2 and transforms.unwrapped(x) is x


def test_constants_are_tensors_whose_derivative_nobody_asks_for():
    x, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    assert (
        transforms.constants([x]) is not None
        and transforms.constants([x, leaf]) is None
    )
    with torch.no_grad():
        assert transforms.constants([x, leaf]) is not None
    with torch.autograd.forward_ad.dual_level():
        assert (
            transforms.constants([x]) is None and transforms.as_numpy([x]) is not None
        )


def memory_of(x):
    seen = transforms.as_numpy([x])
    return None if seen is None else seen[0]


def memory_inside(x):
    seen = transforms.as_numpy_inside([x])
    return None if seen is None else seen[0]


class Named(torch.Tensor):
    pass


HIDDEN = {
    "vmap": lambda see: torch.vmap(see)(torch.ones(2, 3)),
    "grad": lambda see: torch.func.grad(lambda x: see(x).sum())(torch.ones(3)),
    "jvp": lambda see: torch.func.jvp(see, (torch.ones(3),), (torch.ones(3),)),
    "fake": lambda see: see(FakeTensorMode().from_tensor(torch.ones(3))),
    "trace": lambda see: make_fx(see)(torch.ones(3)),
    "functionalize": lambda see: torch.func.functionalize(see)(torch.ones(3)),
    "functionalize of a plain one": lambda see: torch.func.functionalize(
        lambda _: see(torch.ones(3))
    )(torch.ones(1)),
    "negative view": lambda see: see(torch._neg_view(torch.ones(3))),
    "zeros": lambda see: see(torch._efficientzerotensor((3,))),
    "subclass": lambda see: see(torch.ones(3).as_subclass(Named)),
    "meta": lambda see: see(torch.ones(3, device="meta")),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool]
)
def test_the_memory_is_shared(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    seen = memory_of(x)
    x[1, 2] = 0
    assert seen.shape == (2, 3) and not seen[1, 2] and seen.sum() == 5


def test_bfloat16_comes_as_words():
    seen = memory_of(torch.tensor([1.0, -0.0], dtype=torch.bfloat16))
    assert seen.dtype == np.int16 and seen.tolist() == [0x3F80, -0x8000]


def test_a_tensor_that_requires_grad_shows_its_memory():
    assert memory_of(torch.nn.Parameter(torch.ones(2))).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", HIDDEN)
def test_tensors_that_are_traced_or_elsewhere_have_no_memory(name):
    seen = []

    def see(x):
        seen.append(memory_of(x))
        return x * 1.0

    HIDDEN[name](see)
    assert seen and all(found is None for found in seen)


def test_layouts_and_dtypes_that_numpy_lacks_have_no_memory():
    x = torch.ones(3, 3)
    lacking = [x.to(torch.float8_e5m2), x.to_sparse(), x.to_mkldnn()]
    assert all(memory_inside(other) is None for other in lacking)


def test_compiled_code_sees_no_memory():
    @torch.compile(backend="eager", fullgraph=True)
    def see(x):
        return x + (0.0 if memory_of(x) is None else 1.0)

    assert see(torch.ones(2)).tolist() == [1.0, 1.0]


def test_inside_an_operator_a_mode_that_looks_on_hides_nothing():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Watch():
        seen += [memory_of(x), memory_inside(x)]
    assert seen[0] is None and seen[1].tolist() == [1.0, 1.0]


def test_a_recorded_program_does_not_take_a_mask_for_a_constant():
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that recording is old
        torch.jit.trace(
            lambda x: seen.append(memory_of(x)) or x + 1.0, (torch.ones(3),)
        )
        with pytest.raises(RuntimeError):
            torch.jit.trace(lambda x: sf.masks.topk_mask(x, 2), (torch.ones(3),))
    assert seen and seen[0] is None


def private_names(source: str) -> list[str]:
    """What a module names of torch, of functorch or of torch.library that begins with
    an underscore.
    """
    found, modules = [], {"torch"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "torch",
            "functorch",
        ):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found += [
                alias.name
                for alias in node.names
                if alias.name.split(".")[0] in ("torch", "functorch")
            ]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.split(".")[0] in modules:
                found.append(name)
    return [name for name in found if re.search(r"\._(?!_)|functorch", name)]


# Names of torch.distributed have one place as well, and so has what torch 2.11 needs.
# The laws count graphs with a test tool of the compiler, and operations with a mode,
# which has no public name.
PLACES = {
    *(
        f"shrinking/{name}.py"
        for name in (
            *("attributes", "experts", "proof", "small_layers", "trace"),
            "values",
        )
    ),  # of traced programs
    "_engine/transforms.py",
    "_engine/torch_limits.py",
    "_engine/processes/lines.py",
    "testing/laws_transforms.py",
    "testing/harness.py",
}


def test_private_names_of_torch_have_one_place():
    files = {
        file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")
    }
    found = {
        name: private_names(file.read_text("utf-8"))
        for name, file in files.items()
        if name not in PLACES
    }
    assert {name: names for name, names in found.items() if names} == {}


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
    assert not private_names(
        "import torch\nfrom torch import Tensor\ntorch.ones(2).__class__\nself._x"
    )


@pytest.mark.deep
def test_code_is_fused_where_it_is_compiled_and_no_gradient_flows_back():
    x, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    asked = {}

    def note(place):
        def at(x):
            asked[place] = transforms.is_compiled_without_grad(2 * x)
            return x.sum()

        return at

    note("eager")(x)
    for run, given in (
        (note("compiled"), x),
        (note("leaf"), leaf),
        (grad(note("grad")), x),
        (vmap(note("vmap")), x),
    ):
        torch.compile(run, fullgraph=True, backend="eager")(given)
    assert asked == {
        "eager": False,
        "compiled": True,
        "leaf": False,
        "grad": False,
        "vmap": True,
    }
