import pytest
import torch

import sparsefn as sf
from sparsefn.nn.attach.placed import hiding
from sparsefn.nn.attach.records import Record, owned_parameters
from sparsefn.nn.attach.writes import (
    check_links,
    check_members,
    check_order,
    in_module,
    left_dense,
    links_of,
    members_of,
    stains,
    taken_over,
)

MASK = torch.tensor([True, True, False, False])


def record(values, **flags):
    weight = torch.nn.Parameter(torch.tensor(values))
    return Record("w", weight, torch.optim.SGD([weight], lr=0.1), **flags)


def state(values, mask=MASK):
    return sf.State({"w": torch.tensor(values)}, {"w": mask})


def test_places_are_found_through_wrappers_and_containers():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
            )

    model = torch.nn.DataParallel(Net())
    links = links_of(
        model,
        reversed(
            owned_parameters(
                model, [torch.optim.SGD(model.parameters(), lr=0.1)]
            ).values()
        ),
    )
    check_links(links)
    assert len(links) == 8  # module, layers, two layers, four parameters
    model.module.layers[1] = torch.nn.Linear(2, 2)
    with pytest.raises(
        RuntimeError,
        match=r"before_step: 'layers.1.bias', or a layer that holds it, was replaced",
    ):
        check_links(links)


def test_new_members_of_an_optimizer():
    layer = torch.nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    own = Record("weight", layer.weight, torch.optim.SGD(layer.parameters(), lr=0.1))
    members = members_of([own.optimizer])
    assert check_members([own], members, {id(layer.weight)}) == []
    layer.bias.requires_grad_(True)
    (new,) = check_members([own], members, {id(layer.weight)})
    assert new is layer.bias
    own.optimizer.param_groups[0]["params"].pop(0)
    with pytest.raises(
        RuntimeError,
        match="before_step: the optimizer of 'weight' has it no more: call detach",
    ):
        check_members([own], members_of([own.optimizer]))


@pytest.mark.parametrize(
    "made", [sf.static(0.5), sf.supermask(0.5), sf.partition([("*", sf.rigl(0.5))])]
)
def test_weights_that_would_have_been_masked(made):
    model = torch.nn.DataParallel(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    )
    layer, norm = model.module
    assert left_dense(made, model, [norm.weight, layer.bias, torch.ones(2, 2)]) == ""
    assert left_dense(made, model, [layer.bias, layer.weight]) == (
        "before_step: '0.weight' trains since attach, and stays dense: add or "
        "unfreeze it before, or call detach(), then attach again"
    )


def test_weights_that_where_does_not_choose():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    algorithm = sf.rigl(0.5, where="0.*")
    assert left_dense(algorithm, model, [model[1].weight]) == ""
    assert "'0.weight' trains since attach" in left_dense(
        algorithm, model, [model[0].weight]
    )


def test_values_at_kept_entries_are_taken_over():
    got = taken_over(
        "state", state([1.0, 2.0, 0.0, 0.0]), [record([5.0, 6.0, 7.0, 8.0])]
    ).params["w"]
    assert got.tolist() == [5.0, 6.0, 0.0, 0.0]


def test_of_hidden_leaves_what_differs_from_the_module_is_taken_over():
    nan = float("nan")
    old = state([1.0, nan, 3.0, 4.0])
    got = taken_over("state", old, [record([1.0, nan, 0.0, 9.0], hidden=True)]).params[
        "w"
    ]
    assert got[[0, 2, 3]].tolist() == [1.0, 3.0, 9.0] and got[1].isnan()
    assert old.params["w"][3] == 4.0


@pytest.mark.parametrize(
    ("follows", "text"),
    [
        ("latents", "its values follow from latents, .* the latents"),
        ("scores", "its mask follows from scores, .* scores"),
    ],
)
def test_weights_that_follow_are_not_written(follows, text):
    own = record([1.0, 2.0, 0.0, 0.0], hidden=True, follows=follows)
    old = state([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(taken_over("state", old, [own]).params["w"], old.params["w"])
    with torch.no_grad():
        own.parameter[2] = 1.0
    with pytest.raises(RuntimeError, match=f"state: somebody wrote to 'w', but {text}"):
        taken_over("state", old, [own])


def test_a_parameter_of_another_kind_is_named():
    with pytest.raises(
        RuntimeError,
        match=r"state: 'w' was torch.float32 on cpu of shape \(4,\) .* of shape "
        r"\(2,\): call",
    ):
        taken_over("state", state([1.0, 2.0, 0.0, 0.0]), [record([1.0, 2.0])])


def test_weights_that_move_without_their_optimizer():
    own = record([1.0, 2.0])
    own.note()
    assert check_order([own], {"w": torch.ones(2)}) == (
        "after_step: no optimizer has stepped since before_step: where several "
        "batches make a step, call both around optimizer.step(), after the last "
        "backward; where a step is left out on purpose, all is well"
    )
    with torch.no_grad():
        own.parameter.add_(1.0)
    # as a GradScaler leaves a step out
    assert check_order([own], {"w": torch.tensor([1.0, torch.inf])}) == ""
    with pytest.raises(
        RuntimeError,
        match="after_step: 'w' moved without its optimizer: for another optimizer, "
        "call",
    ):
        check_order([own], {"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("made", "flags", "hides"),
    [
        (state([1.0, 2.0, 3.0, 4.0]), {}, True),
        (state([1.0, 2.0, 0.0, 0.0]), {}, False),
        (state([1.0, 2.0, 3.0, 4.0], torch.tensor(True)), {}, False),
        (
            state([1.0, 2.0, 0.0, 0.0])._replace(support={"w": torch.tensor(True)}),
            {},
            True,
        ),
        (state([1.0, 2.0, 0.0, 0.0]), {"follows": "latents"}, True),
    ],
)
def test_what_the_module_does_not_show(made, flags, hides):
    own = record([0.0] * 4, **flags)
    hiding(made, [own], [sf.effective(made)["w"]])
    assert own.hidden is hides


def test_stains_are_counted_and_shown():
    own, nan = state([1.0, 2.0, 0.0, 0.0]), float("nan")
    assert stains(own, [record([nan, 1.0, 0.0, -0.0])]) == {}
    assert stains(own, [record([1.0, 0.0, 3.0, nan])]) == {"w": 2}
    shown = in_module(own, [record([1.0, 0.0, 3.0, 0.0])])
    assert shown.masks["w"].tolist() == [True, True, True, False]
    assert shown.params["w"].tolist() == [1.0, 0.0, 3.0, 0.0]
