"""Atoms: union-find with products; joins are sufficient, and what stays has a
reason.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefn.shrinking.channels import Atoms, product


def kept(atoms, label, alive):
    return alive[atoms.resolve(label)].all(1).tolist()


def test_new_labels_have_an_atom_for_each_index():
    atoms = Atoms()
    assert atoms.new(2).tolist() == [[1], [2]]
    assert atoms.new(3).tolist() == [[3], [4], [5]]
    assert atoms.count == 6


def test_tables_grow():
    atoms = Atoms()
    label = atoms.new(10_000)
    atoms.join(label, label[::-1], "joined")
    assert len(np.unique(atoms.resolve(label))) == 5_000


def test_joined_labels_are_one():
    atoms = Atoms()
    a, b, c = atoms.new(3), atoms.new(3), atoms.new(2)
    atoms.join(a, b, "joined")
    atoms.join(b[1:], c, "joined")
    assert atoms.resolve(c).tolist() == atoms.resolve(a)[1:].tolist()
    assert (atoms.find(a) == atoms.find(b)).all()


def test_a_join_with_what_stays_freezes_the_rest():
    for one, two in ((None, 0), (0, None)):
        atoms = Atoms()
        label = atoms.new(2)
        atoms.join(label if one == 0 else None, label if two == 0 else None, "no label")
        assert atoms.free(label) is None
        assert [atoms.reasons[i] for i in atoms.reason[label].ravel()] == [
            "no label"
        ] * 2
    Atoms().join(None, None, "joined")


def test_the_first_reason_stays_and_what_is_joined_has_the_reason_of_the_join():
    atoms = Atoms()
    a, b = atoms.new(3), atoms.new(3)
    atoms.freeze(b, "it is summed", np.array([False, True, False]))
    atoms.freeze(b, "it is an output", np.array([False, True, True]))
    atoms.join(a, b, "joined")
    assert [atoms.reasons[i] for i in atoms.reason[b].ravel()] == [
        "",
        "it is summed",
        "it is an output",
    ]
    assert [atoms.reasons[i] for i in atoms.reason[a].ravel()] == [
        "",
        "joined",
        "joined",
    ]
    assert atoms.free(a).tolist() == [[1], [0], [0]]
    atoms.freeze(None, "nothing")
    assert "nothing" not in atoms.reasons


def test_a_joined_atom_is_the_product_of_its_factors():
    atoms = Atoms()
    whole, heads, widths = atoms.new(6), atoms.new(2, rank=1), atoms.new(3, rank=2)
    atoms.join(whole, product(heads, 2, widths, 3), "joined")
    alive = np.ones(atoms.count, bool)
    alive[heads[0]] = alive[widths[2]] = False
    assert kept(atoms, whole, alive) == [False] * 3 + [True, True, False]


def test_products_of_one_label_with_itself_hold_each_atom_once():
    atoms = Atoms()
    a = atoms.new(2)
    assert atoms.resolve(np.concatenate([a, a, atoms.new(2)], 1)).tolist() == [
        [1, 3],
        [2, 4],
    ]


def test_what_one_side_has_more_stays():
    atoms = Atoms()
    a, b = atoms.new(2), atoms.new(2)
    atoms.join(a, np.concatenate([a, b], 1), "further factors")
    assert atoms.free(b) is None and atoms.free(a) is not None
    assert atoms.reasons[atoms.reason[b[0, 0]]] == "further factors"


def test_two_divisions_that_do_not_fit_stay():
    atoms = Atoms()
    a, b, c, d = atoms.new(2), atoms.new(2), atoms.new(2), atoms.new(2)
    e = atoms.new(2)
    atoms.join(np.concatenate([a, b], 1), np.concatenate([c, d, e], 1), "joined")
    assert atoms.free(np.concatenate([a, b, c, d, e], 1)) is None
    assert atoms.reasons[atoms.reason[a[0, 0]]] == "joined, and divided in two ways"


def test_no_atom_becomes_its_own_factor():
    atoms = Atoms()
    a, b = atoms.new(2), atoms.new(2)
    atoms.join(a, np.concatenate([a[::-1], b], 1), "turned")
    atoms.resolve(a)  # ends
    assert atoms.find(a).shape == (2, 1)


def test_ranks_and_reasons_of_the_united():
    atoms = Atoms()
    a, b = atoms.new(2, rank=2), atoms.new(2)
    atoms.join(b, a, "joined")
    assert atoms.rank[atoms.find(a)].ravel().tolist() == [2, 2]


@pytest.mark.parametrize(
    ("a", "b"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_product(a, b):
    one, two = np.array([[1], [2]]), np.array([[3], [4], [5]])
    made = product(one if a else None, 2, two if b else None, 3)
    if not a and not b:
        assert made is None
        return
    rows = [[i + 1, j + 3] for i in range(2) for j in range(3)]
    assert made.tolist() == [row[0 if a else 1 :][: 1 + (a and b)] for row in rows]


@st.composite
def joins(draw):
    """Rows of up to three of twelve atoms, in pairs."""
    row = st.lists(st.integers(1, 12), min_size=1, max_size=3)
    return draw(st.lists(st.tuples(row, row), min_size=1, max_size=6))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(joins(), st.sets(st.integers(1, 12)), st.data())
def test_whatever_goes_both_sides_of_each_join_agree(pairs, frozen, data):
    atoms = Atoms()
    atoms.new(12)
    sides = []
    for pair in pairs:
        a, b = (np.array([row + [0] * (3 - len(row))]) for row in pair)
        sides.append((a, b))
        atoms.join(a, b, "joined")
    for i in frozen:
        atoms.freeze(np.array([[i]]), "frozen")
    alive = np.array(
        data.draw(st.lists(st.booleans(), min_size=atoms.count, max_size=atoms.count))
    )
    alive |= atoms.reason[: atoms.count] > 0
    for a, b in sides:
        assert kept(atoms, a, alive) == kept(atoms, b, alive)
    for i in frozen:
        assert kept(atoms, np.array([[i]]), alive) == [True]
