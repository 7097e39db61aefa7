"""Which values a transform hides, and which ones compiled code knows."""

import torch

from sparsefn import tree
from sparsefn.engine import transforms


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


def test_constant_is_the_mark_of_torch():
    def ours(word):
        return len(word)

    def theirs(word):
        return len(word)

    assert vars(transforms.constant(ours)) == vars(torch.compiler.assume_constant_result(theirs))
    # Without the mark the compiler gives up on a function that it cannot trace.
    path = transforms.constant(lambda: sum(ord(c) for c in __import__("pathlib").Path("a").name))
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
