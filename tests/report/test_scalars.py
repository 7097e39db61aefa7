"""Numbers to log."""

import pytest
import torch

import sparsefn as sf
from sparsefn.core.state import State
from sparsefn.report.scalars import itop, scalars

T = torch.tensor(True)


def mask(*rows):
    return torch.tensor([[x == "1" for x in row] for row in rows])


PARAMS = {
    "a": {"weight": torch.ones(3, 4), "bias": torch.ones(3)},
    "b": torch.ones(2, 1, 2),
    "c": torch.ones(4),
}
OLD = State(
    PARAMS,
    {
        "a": {"weight": mask("1100", "0000", "0001"), "bias": T},
        "b": mask("11", "00").reshape(2, 1, 2),
        "c": mask("1000")[0],
    },
)
NEW = OLD._replace(
    masks=OLD.masks | {"a": {"weight": mask("1010", "0000", "0000"), "bias": T}}
)


def test_scalars_of_a_state():
    assert scalars(OLD) == {
        "sparsity": 14 / 20,
        "sparsity/a.weight": 9 / 12,
        "sparsity/b": 2 / 4,
        "sparsity/c": 3 / 4,
        "dead_units": 5.0,
        "dead_units/a.weight": 1.0,
        "dead_units/b": 1.0,
        "dead_units/c": 3.0,
    }


def test_scalars_of_a_change():
    values = scalars(NEW, OLD)
    assert list(values)[:8] == list(scalars(NEW))
    changed = sf.report.changed(OLD, NEW)
    assert list(values)[8:] == [
        name + path
        for name in ("overlap", "grown", "dropped")
        for path in ("", "/a.weight", "/b", "/c")
    ]
    for name in ("overlap", "grown", "dropped"):
        assert values[name] == getattr(changed.total, name)
        assert [values[f"{name}/{row.path}"] for row in changed.rows] == [
            getattr(row, name) for row in changed.rows
        ]
    assert (values["grown"], values["dropped"], values["dead_units"]) == (1.0, 2.0, 6.0)


def test_all_values_are_floats():
    empty = State({"w": torch.ones(0, 3)}, {"w": torch.ones(0, 3, dtype=torch.bool)})
    for values in (scalars(NEW, OLD), scalars(State({}, {})), scalars(empty, empty)):
        assert all(type(value) is float for value in values.values())
    assert scalars(sf.dense().init(PARAMS)) == {"sparsity": 0.0, "dead_units": 0.0}


def test_scalars_refuses():
    stack = sf.ensemble.stack([OLD, OLD])
    with pytest.raises(
        ValueError,
        match="got a stack of 2: sf.ensemble.summary counts the members of a stack",
    ):
        scalars(stack)
    with pytest.raises(
        ValueError, match=r"expected the new params of shape \(2,\) at 'w', got \(3,\)"
    ):
        scalars(
            State({"w": torch.ones(3)}, {"w": T}), State({"w": torch.ones(2)}, {"w": T})
        )
    with pytest.raises(
        TypeError, match="expected a bool mask at 'w', got torch.float32"
    ):
        scalars(State({"w": torch.ones(3)}, {"w": torch.ones(3)}))


def test_itop_counts_what_was_ever_kept():
    assert (
        itop(sf.masks.explored(sf.masks.explored(None, OLD), NEW)) == (4 + 2 + 1) / 20
    )
    assert itop(OLD.masks, PARAMS) == (3 + 3 + 2 + 1) / 23
    assert itop({"b": T}) == itop({}) == 1.0
    assert itop({"b": T}, {"b": torch.ones(2)}) == 1.0
    assert type(itop(OLD.masks)) is type(itop({})) is float


def test_itop_of_dynamic_sparse_training_rises_and_of_a_static_mask_does_not():
    params = {"w": torch.randn(20, 20, generator=torch.Generator().manual_seed(0))}
    for algorithm, rises in (
        (sf.set(0.9, when=sf.always(), key=sf.random.key(0)), True),
        (sf.static(0.9), False),
    ):
        state = algorithm.init(params)
        seen, rates = None, []
        for step in range(4):
            seen = sf.masks.explored(seen, state)
            rates.append(itop(seen))
            state = algorithm.update(state, params, step)
        assert rates[0] == 0.1
        assert (rates == sorted(set(rates))) is rises


def test_itop_under_vmap_is_a_tensor():
    seen = torch.stack([mask("1100"), mask("1110")])
    found = torch.vmap(lambda m: itop({"w": m}))(seen)
    assert found.dtype == torch.float64
    assert found.tolist() == [0.5, 0.75]


def test_itop_refuses():
    with pytest.raises(
        TypeError, match="expected a bool mask at 'w', got torch.float32"
    ):
        itop({"w": torch.ones(2)})
    with pytest.raises(
        ValueError, match=r"expected a mask of shape \(3,\) or \(\) at 'w', got \(1,\)"
    ):
        itop({"w": torch.tensor([True])}, {"w": torch.ones(3)})


def test_dead_units_of_rows_entries_and_empty_leaves():
    masks = {
        "w": torch.tensor([[True, False], [False, False]]),
        "v": torch.tensor([True, False, False]),
    }
    masks["none"] = torch.ones(5, 0, dtype=torch.bool)
    found = sf.report.scalars(
        sf.State({path: torch.ones(mask.shape) for path, mask in masks.items()}, masks)
    )
    assert {path: found[f"dead_units/{path}"] for path in masks} == {
        "w": 1.0,
        "v": 2.0,
        "none": 5.0,
    }
    assert found["dead_units"] == 8.0
