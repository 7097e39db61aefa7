"""Padding in the ids of a call, told by the config of the model."""

from types import SimpleNamespace

import pytest
import torch

from sparsefn.nn.modules.padding import padding_in


def model(**config):
    made = torch.nn.Embedding(9, 2)
    made.config = SimpleNamespace(**config)
    return made


TEXT = torch.tensor([[5, 6, 7, 8]])


@pytest.mark.parametrize(
    ("ids", "count"),
    [
        ([[5, 6, 0, 0]], 2),
        ([[0, 0, 0, 6]], 3),
        ([[0, 0, 6, 7], [5, 0, 0, 0]], 5),
        ([[0, 0, 0, 0]], 4),
        ([[5, 6, 7, 0]], 0),  # the end of a text may be the same id
        ([[0, 6, 7, 8]], 0),  # as the ids of a decoder begin
        ([[5, 0, 0, 8]], 0),  # inside of a text
        ([[0, 6, 7, 0]], 0),
    ],
)
def test_runs_at_the_ends_are_padding(ids, count):
    told = padding_in(model(pad_token_id=0), [torch.tensor(ids)])
    total = len(ids) * 4
    assert told == (
        f"{count} of {total} ids, at the ends of rows, are 0, the pad_token_id of the "
        "model"
        if count
        else ""
    )


def test_without_a_pad_token_people_pad_with_the_end_of_a_text():
    padded = [torch.tensor([[5, 2, 2, 2]]), torch.tensor([[5, 6, 3, 3]])]
    assert padding_in(model(pad_token_id=None, eos_token_id=2), padded).startswith(
        "3 of 8 ids"
    )
    several = padding_in(model(pad_token_id=None, eos_token_id=[2, 3]), padded)
    assert (
        several
        == "5 of 8 ids, at the ends of rows, are 2 or 3, the eos_token_id of the model"
    )
    assert padding_in(model(pad_token_id=0, eos_token_id=2), padded) == ""


def test_the_text_part_of_a_config_and_the_module_in_wrappers():
    part = SimpleNamespace(pad_token_id=0)
    padded = [torch.tensor([[5, 6, 0, 0]])]
    assert padding_in(model(get_text_config=lambda: part), padded)
    assert padding_in(torch.nn.DataParallel(model(pad_token_id=0)), padded)


def test_a_model_that_does_not_say_and_other_inputs_are_not_told():
    padded = torch.tensor([[5, 6, 0, 0]])
    for other in (
        torch.nn.Embedding(9, 2),
        len,
        model(),
        model(pad_token_id=None, eos_token_id=None),
    ):
        assert padding_in(other, [padded]) == ""
    for ids in (
        padded[0],
        padded.float(),
        padded.bool(),
        padded.to("meta"),
        [[5, 0, 0]],
        TEXT[:, :0],
    ):
        assert padding_in(model(pad_token_id=0), [ids]) == ""
