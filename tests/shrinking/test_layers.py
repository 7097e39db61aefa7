"""Linear layers and convolutions: which dimensions go together."""

import pytest
import torch
from torch import nn

from tests.shrinking.small import MAP, told

# A network, its groups, and why the rest stays.
CASES = {
    "grouped": (
        lambda: (
            nn.Sequential(
                nn.Conv2d(3, 4, 1),
                nn.Conv2d(4, 6, 3, padding=1, groups=2),
                nn.Conv2d(6, 2, 1),
            ),
            MAP,
        ),
        [
            (
                "0.weight[0] (blocks of 1 in 2 parts), 0.bias[0] (blocks of 1 in 2 "
                "parts), 1.weight[1]"
            ),
            (
                "0.weight[0] (blocks of 2), 0.bias[0] (blocks of 2), 1.weight[0] "
                "(blocks of 3), 1.bias[0] (blocks of 3), 2.weight[1] (blocks of 3)"
            ),
            (
                "1.weight[0] (blocks of 1 in 2 parts), 1.bias[0] (blocks of 1 in 2 "
                "parts), 2.weight[1] (blocks of 1 in 2 parts)"
            ),
        ],
        {"conv2d at '1' mixes its entries": "1.weight[2], 1.weight[3]"},
    ),
    "depthwise": (
        lambda: (
            nn.Sequential(
                nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 2, 1)
            ),
            MAP,
        ),
        [
            (
                "0.weight[0], 0.bias[0], 1.weight[0] (blocks of 2), 1.bias[0] (blocks "
                "of 2), 2.weight[1] (blocks of 2)"
            ),
            (
                "1.weight[0] (blocks of 1 in 4 parts), 1.bias[0] (blocks of 1 in 4 "
                "parts), 2.weight[1] (blocks of 1 in 4 parts)"
            ),
        ],
        {"conv2d at '1' mixes its entries": "1.weight[2], 1.weight[3]"},
    ),
    "transposed conv": (
        lambda: (
            nn.Sequential(
                nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 2), nn.Conv2d(6, 2, 1)
            ),
            MAP,
        ),
        ["0.weight[0], 0.bias[0], 1.weight[0]", "1.weight[1], 1.bias[0], 2.weight[1]"],
        {"conv_transpose2d at '1' mixes its entries": "1.weight[2], 1.weight[3]"},
    ),
    "grouped transposed": (
        lambda: (
            nn.Sequential(
                nn.Conv2d(3, 4, 1),
                nn.ConvTranspose2d(4, 6, 2, groups=2),
                nn.Conv2d(6, 2, 1),
            ),
            MAP,
        ),
        [
            (
                "1.weight[1], 1.bias[0] (blocks of 1 in 2 parts), 2.weight[1] (blocks "
                "of 1 in 2 parts)"
            ),
            (
                "0.weight[0] (blocks of 2), 0.bias[0] (blocks of 2), 1.weight[0] "
                "(blocks of 2), 1.bias[0] (blocks of 3), 2.weight[1] (blocks of 3)"
            ),
            (
                "0.weight[0] (blocks of 1 in 2 parts), 0.bias[0] (blocks of 1 in 2 "
                "parts), 1.weight[0] (blocks of 1 in 2 parts)"
            ),
        ],
        {"conv_transpose2d at '1' mixes its entries": "1.weight[2], 1.weight[3]"},
    ),
    "conv1d": (
        lambda: (
            nn.Sequential(nn.Conv1d(3, 4, 1), nn.ReLU(), nn.Conv1d(4, 2, 1)),
            torch.randn(2, 3, 5),
        ),
        ["0.weight[0], 0.bias[0], 2.weight[1]"],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes_together_and_what_stays(name):
    build, groups, stays = CASES[name]
    assert told(build) == (groups, stays)
