"""Pictures of masks. The exact strings of whole masks are in test_golden_dmx.py."""

import pytest
import torch

import sparsefn as sf

MASK = torch.rand(5, 6, 7, generator=torch.Generator().manual_seed(0)) < 0.5


def dots(picture):
    """The rows of bools that the picture shows, read back from its cells."""
    rows = []
    for line in picture.splitlines()[1:-1]:
        cells = [ord(cell) - 0x2800 for cell in line.strip("│")]
        rows += [
            [bool(c >> d & 1) for c in cells for d in pair]
            for pair in ((0, 3), (1, 4), (2, 5), (6, 7))
        ]
    return torch.tensor(rows)


@pytest.mark.parametrize(
    "dims", [(0, 1), (1, 0), (2, 0), (0, 2), (2, 1), (1, 2), (-1, -3), (-2, 2)]
)
def test_any_two_dims_in_any_order(dims):
    shown = dots(sf.report.braille(MASK, dims))
    down, across = (dim % 3 for dim in dims)
    (other,) = {0, 1, 2} - {down, across}
    plane = MASK.select(other, 0)
    plane = plane if down < across else plane.T
    assert torch.equal(shown[: plane.shape[0], : plane.shape[1]], plane)
    assert int(shown.sum()) == int(plane.sum())  # and nothing at the padded borders


def test_a_row():
    picture = sf.report.braille(torch.tensor([True, False, True, True, True]))
    assert picture == "╭───╮\n│⠁⠉⠁│\n╰───╯"
    assert picture == sf.report.braille(torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0]]))


@pytest.mark.parametrize(
    ("shape", "most", "lines"),
    [
        ((4, 2), 4, ["⣿"]),
        ((5, 2), 4, ["⣿", "▒"]),
        ((4, 5), 4, ["⣿⣿▒"]),
        ((5, 5), 4, ["⣿⣿▒", "▒▒▒"]),
        ((9, 3), 4, ["⣿⡇", "▒▒"]),
        ((9, 9), 1, ["⠁▒", "▒▒"]),
        ((5, 1), None, ["⡇", "⠁"]),
    ],
)
def test_what_is_cut_off_is_marked(shape, most, lines):
    picture = sf.report.braille(torch.ones(shape), max_elems=most)
    assert picture.splitlines()[1:-1] == [f"│{line}│" for line in lines]
    assert {len(line) for line in picture.splitlines()} == {len(lines[0]) + 2}


def test_of_other_dims_index_0_is_shown():
    mask = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    mask[0, 0, 1, 1] = True
    assert sf.report.braille(mask).splitlines()[1] == "│⠀│"
    assert sf.report.braille(mask, (2, 3)).splitlines()[1] == "│⠐│"


def test_nothing_to_show_is_an_empty_box():
    assert sf.report.braille(torch.ones(0, 4)) == "╭──╮\n╰──╯"
    assert sf.report.braille(torch.ones(1, 0)) == "╭╮\n││\n╰╯"
    assert sf.report.braille(torch.ones(2, 2, 0)) == sf.report.braille(
        torch.zeros(2, 2)
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: sf.report.braille(torch.tensor(True)),
            "expected a mask of one dimension or more, got a 0-d mask: nothing is "
            "sparsified",
        ),
        (
            lambda: sf.report.braille(torch.tensor([[0.5]])),
            "expected a mask of zeros and ones",
        ),
        (
            lambda: sf.report.braille(torch.tensor([[float("nan")]])),
            "expected a mask of zeros and ones",
        ),
        (
            lambda: sf.report.braille(MASK, (0, -3)),
            "expected two different dims of a mask of shape (5, 6, 7), got (0, -3)",
        ),
        (
            lambda: sf.report.braille(MASK, (0, 3)),
            "expected two different dims of a mask of shape (5, 6, 7), got (0, 3)",
        ),
        (
            lambda: sf.report.braille(MASK, max_elems=0),
            "expected max_elems >= 1, got 0",
        ),
    ],
)
def test_errors(call, text):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == text
