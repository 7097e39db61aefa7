"""Derivatives through whole runs, other transforms that no law covers, and the table of
docs/transforms.md.
"""

import random
from functools import partial

import optree
import pytest
import torch
from torch.func import grad, jvp, vmap

import sparsefn as sf
from property_tests import transforms
from property_tests.registry import ROWS
from property_tests.transforms import CLOSE, COLUMNS, EPS, case_of, misfit
from sparsefn.testing import Case, Meta, Row

NAMED = {row.name: row for row in ROWS}
CHEAP = ("jvp", "functorch")  # the latter is grad, too, by its old name


@pytest.mark.deep(
    but=[
        "gmp-jvp",
        "rigl-jvp",
        "ste-jvp",
        "supermask-jvp",
        "low_rank-jvp",
        "gmp nm-jvp",
    ]
)
@pytest.mark.parametrize("column", CHEAP)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_differentiates_and_takes_the_old_names(
    row: Row, column: str
) -> None:
    COLUMNS[column](row, case_of(row))


@pytest.mark.deep
@pytest.mark.parametrize("name", ["adam rigl"])
def test_batched_updates_compile_whole(name: str) -> None:
    assert (
        transforms.compiled_vmap(NAMED[name], case_of(NAMED[name]), backend="eager")
        == "="
    )


@pytest.mark.deep
def test_inductor_gives_the_same_bits() -> None:
    assert (
        transforms.compiled(NAMED["gmp"], case_of(NAMED["gmp"]), backend="inductor")
        == "="
    )


@pytest.mark.deep(but=["gmp regrow keep"])
@pytest.mark.parametrize(
    "name", ["gmp regrow keep", "snfs", "supermask bernoulli", "torchopt gmp"]
)
def test_updates_are_exported(name: str) -> None:
    assert transforms.exported(NAMED[name], case_of(NAMED[name])) == "="


# ---- the checks can fail -------------------------------------------------------------


def changed(update: object) -> Row:
    def make(sparsity: object, key: object, params: object) -> sf.Algorithm:
        return sf.gmp(0.5)._replace(update=update)

    return Row("changed", make, Meta())


def halved(
    state: sf.State, grads: object, step: object, scale: object = 0.5
) -> sf.State:
    return state._replace(params=optree.tree_map(lambda p: p * scale, state.params))


def cut(state: sf.State, grads: object, step: object) -> sf.State:
    return state._replace(params=optree.tree_map(lambda p: p.detach(), state.params))


def by_kind(state: sf.State, grads: object, step: object) -> sf.State:
    return halved(state, grads, step, 0.5 if isinstance(step, int) else 0.25)


def branching(state: sf.State, grads: object, step: object) -> sf.State:
    return halved(state, grads, step) if bool(state.params["norm"].sum() > 0) else state


def noisy(state: sf.State, grads: object, step: object) -> sf.State:
    return halved(state, grads, step, torch.rand(()))


@pytest.mark.parametrize("column", ["grad", "jvp", "functorch"])
def test_a_cut_gradient_is_found(column: str) -> None:
    COLUMNS[column](changed(halved), case_of(changed(halved)))
    with pytest.raises(AssertionError, match="is not"):
        COLUMNS[column](changed(cut), case_of(changed(cut)))


@pytest.mark.parametrize(
    ("column", "update", "error"),
    [
        ("int step", noisy, AssertionError),
        ("tensor step", by_kind, AssertionError),
        ("vmap", branching, RuntimeError),
        ("nested vmap", branching, RuntimeError),
        ("compile", branching, Exception),
        ("compile(vmap)", branching, Exception),
        ("export", by_kind, AssertionError),
    ],
)
def test_what_a_transform_breaks_is_found(
    column: str, update: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        COLUMNS[column](changed(update), case_of(changed(update)))


# ---- in what a run depends on --------------------------------------------------------

CASE: Case = transforms.in_double(case_of(NAMED["rigl"]))
S, T = sf.schedules, sf.terms


def gmp() -> sf.Algorithm:
    return sf.gmp(S.polynomial(0.2, 0.6, begin=0, end=2))


def with_rate(make: object, optimizer: object = sf.optimizers.sgd) -> object:
    return lambda v: sf.with_optimizer(gmp(), optimizer(make(v)))


def with_term(make: object) -> object:
    return lambda v: sf.with_optimizer(
        sf.with_terms(gmp(), make(v)), sf.optimizers.sgd(0.2, momentum=0.5)
    )


def soft(v: torch.Tensor) -> sf.Algorithm:
    soft = sf.reparam.soft_threshold(lambda s: v * torch.sigmoid(s), init=0.5)
    return sf.with_optimizer(
        sf.reparametrised(soft, sf.set(0.5, when=sf.always())), sf.optimizers.adam(0.1)
    )


# The parts of a run as functions of one number.
IN: dict[str, object] = {
    "learning rate": with_rate(lambda v: v),
    "learning rate of adam": with_rate(lambda v: v, sf.optimizers.adam),
    "learning rate of adamw": with_rate(lambda v: v, sf.optimizers.adamw),
    "start of a polynomial rate": with_rate(
        lambda v: S.polynomial(v, 0.01, begin=0, end=4)
    ),
    "end of a polynomial rate": with_rate(
        lambda v: S.polynomial(0.3, v, begin=0, end=4)
    ),
    "power of a polynomial rate": with_rate(
        lambda v: S.polynomial(0.3, 0.01, begin=0, end=4, power=10 * v)
    ),
    "horizon of a polynomial rate": with_rate(
        lambda v: S.polynomial(0.3, 0.01, begin=0, end=20 * v)
    ),
    "start of a cosine rate": with_rate(lambda v: S.cosine_decay(v, 4)),
    "horizon of a cosine rate": with_rate(lambda v: S.cosine_decay(0.3, 20 * v)),
    "minimum of a cosine wave": with_rate(lambda v: S.cosine(0.3, 5, v / 10)),
    "decay of an exponential rate": with_rate(
        lambda v: S.exponential(0.3, -v, final=0.01)
    ),
    "base of a power": with_rate(lambda v: S.power(0.3, v), sf.optimizers.adam),
    "slope of a line": with_rate(lambda v: S.linear(0.3, -v / 10)),
    "a piece": with_rate(lambda v: S.piecewise({0: 0.3, 1: v})),
    "a turn": with_rate(lambda v: S.cycling([0.3, v], sf.every(1))),
    "l1": with_term(T.l1),
    "l2": with_term(T.l2),
    "a term by a schedule": with_term(
        lambda v: (
            lambda state, step: optree.tree_map(
                lambda w: S.cosine_decay(v, 4)(step) * w, state.params
            )
        )
    ),
    "penalty": with_term(
        lambda v: T.penalty(
            lambda p, step: v * sum(x.cos().sum() for x in optree.tree_leaves(p))
        )
    ),
    "threshold": soft,
}


def final_loss(make: object, value: torch.Tensor) -> torch.Tensor:
    return transforms.later_loss(make(value), CASE, CASE.params)[0]


@pytest.mark.deep(but=["learning rate*", "power of a polynomial rate", "a piece", "l1"])
@pytest.mark.parametrize("name", IN)
def test_a_later_loss_differentiates_in_what_the_run_was_made_of(name: str) -> None:
    value, loss = torch.tensor(0.2, dtype=torch.float64), partial(final_loss, IN[name])
    want = float(loss(value + EPS) - loss(value - EPS)) / (2 * EPS)
    assert abs(want) > 1e-4
    leaf = value.clone().requires_grad_()
    found = {
        "grad": grad(loss)(value),
        "jvp": jvp(loss, (value,), (torch.ones_like(value),))[1],
        "vmap(grad)": vmap(grad(loss))(value.expand(2))[1],
        "autograd": torch.autograd.grad(loss(leaf), leaf)[0],
    }
    for way, got in found.items():
        assert abs(float(got) - want) <= CLOSE * (1 + abs(want)), (
            f"{way}: {float(got)} is not {want}"
        )


COUNTED: dict[str, object] = {
    "sparsity": lambda v: sf.with_optimizer(sf.gmp(v), sf.optimizers.sgd(0.1)),
    "sparsity by a schedule": lambda v: sf.with_optimizer(
        sf.gmp(S.polynomial(0.1, v, begin=0, end=4)), sf.optimizers.sgd(0.1)
    ),
    "drop fraction": lambda v: sf.with_optimizer(
        sf.rigl(0.5, drop_fraction=v, when=sf.always()), sf.optimizers.adam(0.1)
    ),
    "erk": lambda v: sf.with_optimizer(
        sf.rigl(v, distribution=sf.budgets.erk(), when=sf.always()),
        sf.optimizers.sgd(0.1),
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_rounded_to_counts_has_slope_zero(name: str) -> None:
    value, loss = (
        torch.tensor(0.3, dtype=torch.float64),
        partial(final_loss, COUNTED[name]),
    )
    assert float(grad(loss)(value)) == 0.0
    assert float(jvp(loss, (value,), (torch.ones_like(value),))[1]) == 0.0
    assert float(loss(value + 1e-9)) == float(loss(value))


def test_adam_differentiates_where_gradients_are_exactly_zero() -> None:
    algorithm = sf.with_optimizer(
        sf.static(0.5, init="magnitude"), sf.optimizers.adam(0.1)
    )

    def later(params: dict[str, torch.Tensor]) -> torch.Tensor:
        state = algorithm.init(params)
        for step in range(3):
            # two columns are unused
            grads = grad(lambda p: (p["w"][:, :2] ** 2).sum())(sf.effective(state))
            state = algorithm.update(state, grads, step)
        return (sf.effective(state)["w"] ** 3).sum()

    slopes = grad(later)(
        {"w": torch.arange(1.0, 17.0, dtype=torch.float64).reshape(4, 4)}
    )["w"]
    assert torch.isfinite(slopes).all() and (slopes[2:] != 0).all()


def test_weights_as_parameters_are_cut_off_and_plain_tensors_are_not() -> None:
    weights = {"w": torch.arange(1.0, 5.0).reshape(2, 2)}
    wrapped = {"w": torch.nn.Parameter(weights["w"])}
    assert not sf.static(0.5).init(wrapped).params["w"].requires_grad
    leaf = weights["w"].requires_grad_()
    loss = misfit(
        sf.effective(sf.static(0.5, init="magnitude").init({"w": leaf})),
        {"w": torch.zeros(2, 2)},
    )
    assert (torch.autograd.grad(loss, leaf)[0] != 0).sum() == 2


# ---- the table -----------------------------------------------------------------------

CELLS = transforms.table(transforms.PAGE.read_text(encoding="utf-8"))
LETTERS = set(transforms.REASONS.values())


def test_the_table_has_every_row_and_column() -> None:
    missing = [row.name for row in ROWS if row.name not in CELLS]
    assert not missing, (
        "run `python -m property_tests.transforms` with those that are new of "
        f"{missing}"
    )
    assert list(CELLS) == [row.name for row in ROWS]
    assert transforms.HEAD[0] in transforms.PAGE.read_text(encoding="utf-8")
    assert all(len(cells) == len(COLUMNS) for cells in CELLS.values())


def test_cells_are_equal_or_close_or_explained() -> None:
    page = transforms.PAGE.read_text(encoding="utf-8")
    close = [list(COLUMNS).index(column) for column in ("grad", "jvp")]
    for name, cells in CELLS.items():
        for i, value in enumerate(cells):
            assert value == ("~" if i in close else "=") or value in LETTERS, (
                f"{name}, {list(COLUMNS)[i]}: {value}"
            )
    used = {value for cells in CELLS.values() for value in cells} - {"=", "~"}
    assert used == LETTERS
    assert all(f"\n- **{letter}**: " in page for letter in LETTERS)


def sample() -> list[tuple[str, str]]:
    """Some cells, always the same ones; those with a letter would leave torch broken
    (see tests/test_upstream.py).
    """
    chosen, slow = random.Random(0), ("compile", "compile(vmap)", "export")
    good = [
        (name, column)
        for name, cells in sorted(CELLS.items())
        for column, value in zip(COLUMNS, cells, strict=True)
        if value in "=~" and column != "sharded"  # which needs processes
    ]
    return chosen.sample([x for x in good if x[1] not in slow], 6) + chosen.sample(
        [x for x in good if x[1] in slow], 2
    )


@pytest.mark.deep(but=["*-vmap", "*-functorch", "*step"])
@pytest.mark.parametrize(("name", "column"), sample(), ids=str)
def test_a_fresh_run_says_the_same(name: str, column: str) -> None:
    cells = dict(zip(COLUMNS, CELLS[name], strict=True))
    assert transforms.cell(NAMED[name], column) == cells[column]


@pytest.mark.deep
def test_every_row_and_method_has_the_bits_of_one_process_on_two() -> None:
    methods = [row.name for row in transforms.METHODS]
    found = transforms.shards_of([*CELLS, *methods])
    assert {name: found[name] for name in CELLS} == {
        name: cells[-1] for name, cells in CELLS.items()
    }
    page = transforms.PAGE.read_text(encoding="utf-8")
    assert (
        transforms.with_methods(page, {name: found[name] for name in methods}) == page
    )


def test_a_page_keeps_its_words_and_gets_the_rows_in_order() -> None:
    page = f"before\n\n{transforms.BEGIN}\n\n{transforms.END}\n\nafter\n"
    one = transforms.with_table(
        page, {"static": ["="] * len(COLUMNS), "dense": ["~"] * len(COLUMNS)}
    )
    assert list(transforms.table(one)) == ["dense", "static"]
    assert transforms.table(
        transforms.with_table(one, transforms.table(one))
    ) == transforms.table(one)
    assert one.startswith("before\n") and one.endswith("\nafter\n")


def test_most_rows_are_counted_and_a_new_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = transforms.with_table(transforms.PAGE.read_text(encoding="utf-8"), CELLS)
    assert transforms.table(page) == CELLS and page.count("| the other ") == 1
    one, *most = ROWS
    monkeypatch.setattr(transforms, "ROWS", [one._replace(name="new"), *most, one])
    assert len(transforms.table(page)) < len(
        CELLS
    ) and one.name not in transforms.table(page)
    assert transforms.table(page, new=["new"]) == {
        row.name: CELLS[row.name] for row in (*most, one)
    }


def test_a_failure_without_a_reason_is_raised_with_its_cell() -> None:
    with pytest.raises(
        RuntimeError,
        match="changed, tensor step: AssertionError: tensor steps: differs",
    ):
        transforms.cell(changed(by_kind), "tensor step")
    assert transforms.cell(NAMED["one_shot fisher"], "export") == "a"
