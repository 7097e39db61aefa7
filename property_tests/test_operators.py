"""Every operator of the library keeps the thirteenth law, and bad ones do not."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from property_tests.operators import INPUTS, W, operators, operators_are_sound


def test_every_operator_has_inputs() -> None:
    assert operators() == sorted(INPUTS)


@pytest.mark.deep(but=["pool", "winners"])
@pytest.mark.parametrize("name", INPUTS)
def test_operators_are_sound(name: str) -> None:
    operators_are_sound(getattr(torch.ops.sparsefn, name).default, INPUTS[name])


def other_dtype(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float64)


def right(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def written(x: Tensor) -> Tensor:
    return x.mul_(2).clone()


def handed_on(x: Tensor) -> Tensor:
    return x


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("sparsefn_planted", "FRAGMENT") as made:
        yield made


@pytest.mark.parametrize(
    ("kernel", "fake", "sound"),
    [
        (doubled, right, True),
        (doubled, other_dtype, False),
        (written, right, False),
        (handed_on, right, False),
    ],
)
def test_a_bad_operator_is_noticed(
    library: torch.library.Library,
    kernel: Callable[[Tensor], Tensor],
    fake: Callable[[Tensor], Tensor],
    sound: bool,
) -> None:
    library.define("bad(Tensor x) -> Tensor")
    library.impl("bad", kernel, "CPU")
    torch.library.register_fake("sparsefn_planted::bad", fake, lib=library)
    operator = torch.ops.sparsefn_planted.bad.default
    if sound:
        operators_are_sound(operator, [(W,)])
    else:
        with pytest.raises(AssertionError, match="sparsefn_planted.bad"):
            operators_are_sound(operator, [(W.clone(),)])
