"""One operation as the rules see it: joins and reasons that name its place."""

import numpy as np
import torch
from torch import fx

from sparsefn.shrinking.atoms import Atoms
from sparsefn.shrinking.steps import Book, Step
from tests.shrinking.small import analysed, conv


def step_of(atoms):
    node = fx.Graph().placeholder("x")
    return Step(node, "sum", "sum at 'layer'", {}, None, Book(atoms, False, True, None))


def test_joins_give_the_first_label_or_none():
    atoms = Atoms()
    step, a, b, c = step_of(atoms), atoms.new(2), atoms.new(2), atoms.new(2)
    assert step.join(a, b) is a and step.atoms is atoms and step.target == "x"
    assert (atoms.find(a) == atoms.find(b)).all()
    assert step.join(c, None) is None
    assert (
        atoms.reasons[atoms.reason[c[0, 0]]]
        == "joined with what stays by sum at 'layer'"
    )


def test_reasons_name_the_place():
    atoms = Atoms()
    step, a = step_of(atoms), atoms.new(2)
    step.freeze(a, "mixes its entries", np.array([True, False]))
    assert [atoms.reasons[i] for i in atoms.reason[a].ravel()] == [
        "sum at 'layer' mixes its entries",
        "",
    ]


def test_groups_and_folds_are_noted():
    net, x = conv(
        lambda net, x: net.b(net.c(net.a(x))), c=torch.nn.Conv2d(4, 4, 1, groups=2)
    )
    masks = {"a.weight": torch.arange(4)[:, None, None, None].expand(4, 3, 1, 1) > 0}
    book = analysed(net, x, masks=masks).book
    (node,) = book.groups
    assert node.name == "conv2d_1" and len(book.groups[node]) == 2
    (fold,) = book.folds
    assert fold.bias == "c.bias" and fold.weights.shape == (2, 2, 2)
    np.testing.assert_allclose(
        fold.weights.reshape(4, 2), net.c.weight.detach().reshape(4, 2), rtol=1e-6
    )
    np.testing.assert_allclose(
        fold.constants, [net.a.bias[0].item(), *[np.nan] * 3], rtol=1e-6
    )
