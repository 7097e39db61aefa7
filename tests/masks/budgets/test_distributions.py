"""Counts: one rounding rule, exact totals."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsefn as sf
from sparsefn.masks.budgets import distributions

B = sf.budgets
SHAPES = {"a": (300, 64), "b": (100, 300), "c": (10, 100)}


@pytest.mark.parametrize(
    "sparsity,error,text",
    [
        (
            1,
            TypeError,
            r"expected sparsity to be a float in \[0, 1\], got the int 1; a fraction "
            r"is written 1.0",
        ),
        (True, TypeError, "got the bool True$"),
        ([0.5], TypeError, r"got \[0.5\]"),
        (1.5, ValueError, r"expected sparsity in \[0, 1\], got 1.5"),
        (-0.1, ValueError, "got -0.1"),
        (math.nan, ValueError, "got nan"),
        (
            torch.tensor(1),
            TypeError,
            "expected sparsity to be a 0-d floating-point tensor, got torch.int64",
        ),
        (torch.ones(2), TypeError, r"got torch.float32 of shape \(2,\)"),
    ],
)
def test_bad_sparsity(sparsity, error, text):
    for call in (
        lambda: B.n_kept(10, sparsity),
        lambda: B.uniform()(SHAPES, sparsity),
        lambda: sf.rigl(sparsity),
    ):
        with pytest.raises(error, match=text):
            call()


def test_uniform():
    assert B.uniform()(SHAPES, 0.98) == {"a": 384, "b": 600, "c": 20}


def test_uniform_with_a_dense_first_leaf():
    shapes = {"10.weight": (4, 4), "2.weight": (4, 6), "fc": (2, 5)}
    assert B.uniform(True)(shapes, 0.5) == {"10.weight": 8, "2.weight": 24, "fc": 5}
    assert B.uniform(dense_first="fc")(shapes, 0.5) == {
        "10.weight": 8,
        "2.weight": 12,
        "fc": 10,
    }
    assert B.uniform(dense_first="*.weight")(shapes, 0.5) == {
        "10.weight": 16,
        "2.weight": 24,
        "fc": 5,
    }
    assert (
        B.uniform(True)({}, 0.5) == {}
        and not distributions.is_uniform(B.uniform(True))
        and distributions.is_uniform(B.uniform(False))
    )
    found = torch.func.vmap(lambda s: B.uniform(True)(shapes, s)["fc"])(
        torch.tensor([0.5, 0.8])
    )
    assert found.tolist() == [5, 2]
    level = B.compensated(0.5, total=50, dense=24)
    assert sum(B.uniform(True)(shapes, level).values()) == 25
    masks = (
        sf.rigl(0.9, distribution=B.uniform(True))
        .init({"0.w": torch.ones(3, 5), "1.w": torch.ones(10, 10)})
        .masks
    )
    assert masks["0.w"].all() and int(masks["1.w"].sum()) == 10
    with pytest.raises(
        ValueError, match="uniform: no path matches 'stem'; the paths are '10.weight'"
    ):
        B.uniform("stem")(shapes, 0.5)
    with pytest.raises(
        TypeError, match="uniform: expected dense_first to be a bool or a glob, got int"
    ):
        B.uniform(1)


SIZES = st.dictionaries(
    st.text("ab.1", min_size=1),
    st.tuples(st.integers(0, 9), st.integers(1, 12)),
    max_size=6,
)


@settings(deadline=None, derandomize=True)
@given(
    SIZES,
    st.floats(0.0, 1.0),
    st.integers(1, 20),
    st.sampled_from([B.uniform(), B.erk(), B.uniform(True)]),
)
def test_at_least_keeps_the_total_and_moves_no_more_than_it_must(
    shapes, sparsity, least, distribution
):
    asked, limited = distribution(shapes, sparsity), B.at_least(distribution, least)
    floors = {path: min(least, math.prod(shape)) for path, shape in shapes.items()}
    if sum(asked.values()) < sum(floors.values()):
        with pytest.raises(
            ValueError, match="at_least: expected .* units or more, got"
        ):
            limited(shapes, sparsity)
        return
    counts = limited(shapes, sparsity)
    assert sum(counts.values()) == sum(asked.values()) and list(counts) == list(shapes)
    for path, count in counts.items():
        assert type(count) is int and floors[path] <= count <= max(
            asked[path], floors[path]
        )
    if all(asked[path] >= floors[path] for path in shapes):
        assert counts == asked
    above = {path: max(asked[path] - floors[path], 0) for path in shapes}
    share = Fraction(
        sum(asked.values()) - sum(floors.values()), max(sum(above.values()), 1)
    )
    assert all(
        abs(counts[path] - floors[path] - share * above[path]) < 1 for path in shapes
    )
    level = torch.tensor([sparsity], dtype=torch.float64)
    hidden = torch.func.vmap(
        lambda s: {path: torch.as_tensor(n) for path, n in limited(shapes, s).items()}
    )(level)
    assert {path: int(n) for path, n in hidden.items()} == counts


def test_at_least_in_algorithms_and_what_it_refuses():
    params = {"a": torch.ones(100, 10), "b": torch.ones(10, 10)}
    masks = sf.gmp(0.99, distribution=B.at_least(B.uniform(), 5)).init(params).masks
    assert {path: int(mask.sum()) for path, mask in masks.items()} == {"a": 6, "b": 5}
    with pytest.raises(ValueError, match="at_least: expected 10 units or more, got 0"):
        B.at_least(B.uniform(), 5)({"a": (10, 10), "b": (10, 10)}, 1.0)
    for wrong in (B.global_(), 0.5):
        with pytest.raises(
            TypeError, match="at_least: expected a distribution like uniform"
        ):
            B.at_least(wrong, 5)
    with pytest.raises(ValueError, match="at_least: expected least >= 1, got 0"):
        B.at_least(B.uniform(), 0)


def closed_form_erk(shapes, sparsity):
    """Densities by the usual loop over saturated layers, in exact fractions."""
    n = {k: math.prod(s) for k, s in shapes.items()}
    raw = {k: Fraction(sum(s), math.prod(s)) for k, s in shapes.items()}
    total, full = sum(n.values()) - round(sparsity * sum(n.values())), set()
    while True:
        rest = [k for k in shapes if k not in full]
        eps = (total - sum(n[k] for k in full)) / sum(n[k] * raw[k] for k in rest)
        over = {k for k in rest if eps * raw[k] > 1}
        if not over:
            return {k: float(1 if k in full else eps * raw[k]) for k in shapes}
        full |= over


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.8, 0.9, 0.98, 1.0])
@pytest.mark.parametrize(
    "shapes",
    [SHAPES, {"x": (64, 3, 3, 3), "y": (128, 64, 3, 3), "z": (10, 128)}],
    ids=["mlp", "conv"],
)
def test_erk_is_the_closed_form_with_an_exact_total(shapes, sparsity):
    counts = B.erk()(shapes, sparsity)
    sizes = {k: math.prod(s) for k, s in shapes.items()}
    assert sum(counts.values()) == B.n_kept(sum(sizes.values()), sparsity)
    for path, density in closed_form_erk(shapes, sparsity).items():
        assert abs(counts[path] - density * sizes[path]) < 1
    tensors = torch.func.vmap(lambda s: B.erk()(shapes, s))(
        torch.tensor([sparsity], dtype=torch.float64)
    )
    assert {path: int(count) for path, count in tensors.items()} == counts
    assert B.erk()(dict(reversed(shapes.items())), sparsity) == counts


def test_erdos_renyi_reads_the_first_two_dimensions():
    counts = B.erdos_renyi()({"x": (8, 4, 3, 3), "y": (8, 4)}, 0.5)
    shares = {"x": 288 * 12 / 32, "y": 32 * 12 / 32}
    assert counts == {
        "x": round(160 * shares["x"] / 120),
        "y": round(160 * shares["y"] / 120),
    }
    # Shares 200 and 110 of the 1100 that are kept.
    assert B.erdos_renyi()({"a": (100, 100), "b": (10, 100)}, 0.9) == {
        "a": 710,
        "b": 390,
    }
    assert B.erdos_renyi()({"a": (100, 100), "b": (100, 10)}, 0.9) == {
        "a": 710,
        "b": 390,
    }


@pytest.mark.parametrize("make", [B.erk, B.erdos_renyi])
def test_a_leaf_without_elements_takes_no_share(make):
    assert make()({"a": (0, 4), "b": (4, 4)}, 0.5) == {"a": 0, "b": 8}


def test_erk_of_a_power_that_overflows():
    text = (
        r"expected a power whose densities are finite, but -200.0 overflows for shape "
        r"\(64, 32, 3, 3\)"
    )
    with pytest.raises(ValueError, match=text):
        B.erk(power=-200.0)({"a": (64, 32, 3, 3), "b": (10, 64)}, 0.9)
    assert B.erk(power=-20.0)({"a": (64, 32, 3, 3), "b": (10, 64)}, 0.9) == {
        "a": 1907,
        "b": 0,
    }


def test_erk_power_zero_is_uniform():
    assert B.erk(power=0.0)({"a": (10, 10), "b": (20, 10)}, 0.9) == {"a": 10, "b": 20}


@pytest.mark.parametrize("make", [B.erk, B.erdos_renyi])
def test_erdos_renyi_needs_matrices(make):
    with pytest.raises(
        ValueError,
        match=r"need leaves of 2 dimensions or more, got shape \(5,\) at 'b'",
    ):
        make()({"a": (5, 5), "b": (5,)}, 0.5)
    with pytest.raises(ValueError, match="at 'bias'"):
        sf.static(0.5, where="*", distribution=make()).init(
            {"w": torch.ones(4, 4), "bias": torch.ones(4)}
        )


def test_by_path_takes_the_first_match_and_the_rest_the_default():
    budget = B.by_path({"c": 0.0, "[bc]": 0.5})
    assert budget(SHAPES, 0.98) == {"a": 384, "b": 15000, "c": 1000}
    with pytest.raises(
        ValueError, match="by_path: no path matches 'd'; the paths are 'a', 'b', 'c'"
    ):
        B.by_path({"d": 0.5})(SHAPES, 0.9)
    with pytest.raises(
        ValueError, match=r"expected the sparsity of 'c' in \[0, 1\], got 2.0"
    ):
        B.by_path({"c": 2.0})


class TestGlobal:
    params = {  # noqa: RUF012
        "a": torch.tensor([[10.0, 9.0, 8.0, 7.0]]),
        "b": torch.tensor([[0.4, 0.3, 0.2, 0.1]]),
    }

    def prune(self, sparsity, **bounds):
        algorithm = sf.one_shot(sparsity, distribution=B.global_(**bounds))
        masks = algorithm.update(algorithm.init(self.params), self.params, 0).masks
        return masks["a"].int().tolist()[0], masks["b"].int().tolist()[0]

    def test_one_competition(self):
        assert self.prune(0.5) == ([1, 1, 1, 1], [0, 0, 0, 0])
        assert self.prune(0.25) == ([1, 1, 1, 1], [1, 1, 0, 0])

    def test_floor_and_ceiling(self):
        assert self.prune(0.5, floor=0.25) == ([1, 1, 1, 0], [1, 0, 0, 0])
        assert self.prune(0.5, ceiling=0.5) == ([1, 1, 0, 0], [1, 1, 0, 0])
        assert self.prune(0.5, floor=0.25, ceiling=0.75) == ([1, 1, 1, 0], [1, 0, 0, 0])
        assert self.prune(0.75, floor=0.25, ceiling=0.25) == (
            [1, 0, 0, 0],
            [1, 0, 0, 0],
        )

    def test_bounds_are_those_of_the_fraction_as_it_was_written(self):
        # 0.07 * 100 is 7.000000000000001 in float64, and 0.29 * 100 is
        # 28.999999999999996.
        params = {"w": torch.rand(10, 10), "v": torch.rand(10, 10) / 100}
        for floor, ceiling, kept in (
            (0.07, 1.0, (7, 7)),
            (0.29, 0.29, (29, 29)),
            (0.0, 0.29, (29, 0)),
        ):
            distribution = B.global_(floor, ceiling)
            algorithm = sf.one_shot(1 - sum(kept) / 200, distribution=distribution)
            masks = algorithm.update(algorithm.init(params), params, 0).masks
            assert (int(masks["w"].sum()), int(masks["v"].sum())) == kept
        for q in (*range(1, 130), 997, 1000, 12345, 99991):
            for p in {0, 1, q // 3, q // 2, q - 1, q}:
                for n in (q, 3 * q, 7, 1000):
                    exact = Fraction(p, q) * n
                    limits = B.global_(p / q, p / q).bounds(
                        {"a": (n,)}, torch.tensor(0)
                    )["a"]
                    assert limits == (math.ceil(exact), math.floor(exact))
        assert B.global_(5e-324).bounds({"a": (10,)}, 10) == {"a": (1, 10)}

    @pytest.mark.deep
    def test_bounds_in_compiled_code(self):
        algorithm = sf.one_shot(0.9, distribution=B.global_(0.07, 0.29))
        params = {"w": torch.rand(10, 10), "v": torch.rand(10, 10) / 100}
        state = algorithm.init(params)
        compiled = torch.compile(algorithm.update, backend="eager", fullgraph=True)(
            state, params, 0
        )
        assert sf.checkpoint.tree_equal(
            compiled.masks, algorithm.update(state, params, 0).masks
        )
        assert int(compiled.masks["v"].sum()) == 7

    def test_infeasible_bounds(self):
        with pytest.raises(
            ValueError,
            match=r"keeps between 4 and 8 units, but the sparsity asks for 2 over 'a', "
            r"'b'",
        ):
            self.prune(0.75, floor=0.5)
        with pytest.raises(
            ValueError, match="keeps between 0 and 4 units, but the sparsity asks for 6"
        ):
            self.prune(0.25, ceiling=0.5)

    def test_arguments(self):
        for bad, text in (
            ({"floor": -0.1}, "floor"),
            ({"ceiling": 1.5}, "ceiling"),
            ({"floor": math.nan}, "floor"),
        ):
            with pytest.raises(
                ValueError, match=rf"global_: expected {text} in \[0, 1\]"
            ):
                B.global_(**bad)
        for bad in (True, "0.1", torch.tensor(0.1)):
            with pytest.raises(
                TypeError,
                match=r"expected ceiling to be a float in \[0, 1\], got "
                rf"{type(bad).__name__}",
            ):
                B.global_(ceiling=bad)
        with pytest.raises(
            ValueError, match="expected floor <= ceiling, got 0.5 > 0.25"
        ):
            B.global_(floor=0.5, ceiling=0.25)
        with pytest.raises(TypeError, match="a global_ budget needs scores"):
            B.global_()(SHAPES, 0.5)
        with pytest.raises(
            ValueError, match="global_ needs a pattern with one competing group a leaf"
        ):
            sf.static(
                0.5, pattern=sf.patterns.row_balanced(), distribution=B.global_()
            ).init(self.params | {"c": torch.ones(2, 2)})


def test_compensated():
    # (density * (conv + fc) - fc) / conv of the struct inits: (.4 * 100 - 20) / 80 =
    # .25.
    assert B.compensated(0.6, 100, 20) == pytest.approx(0.75)
    assert B.compensated(0.6, 100, 0) == 0.6
    assert B.compensated(0.0, 100, 100) == 0.0
    text = (
        "compensated: 70 of 100 weights are dense, so the other 30 would keep none at "
        "sparsity 0.9; expected less than 0.3"
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        B.compensated(0.9, 100, 70)
    with pytest.raises(
        ValueError, match="would keep none at sparsity 0.5; expected less than 0.5$"
    ):
        B.compensated(0.5, 100, 50)
    with pytest.raises(
        ValueError,
        match="the other 0 would keep none at sparsity 0.5; expected less than 0$",
    ):
        B.compensated(0.5, 1, 1)
    with pytest.raises(
        ValueError, match="compensated: expected 0 <= dense <= total, got 5 of 4"
    ):
        B.compensated(0.5, 4, 5)
    with pytest.raises(
        TypeError,
        match=r"compensated: expected sparsity to be a float in \[0, 1\], got a tensor",
    ):
        B.compensated(torch.tensor(0.5), 4, 2)
    with pytest.raises(TypeError, match="got the int 1; a fraction is written 1.0"):
        B.compensated(1, 4, 2)


def test_a_count_is_spread_over_groups():
    assert (
        distributions.spread(7, 1) == 7
        and distributions.spread(torch.tensor(7), 1).shape == ()
    )
    assert distributions.spread(6, 3) == 2 and type(distributions.spread(6, 3)) is int
    for count in (7, torch.tensor(7)):
        assert torch.equal(distributions.spread(count, 3), torch.tensor([3, 2, 2]))
    assert torch.equal(
        distributions.spread(torch.tensor(6), 3), torch.tensor([2, 2, 2])
    )
    batch = torch.func.vmap(lambda count: distributions.spread(count, 2))(
        torch.tensor([0, 3])
    )
    assert batch.tolist() == [[0, 0], [2, 1]]


def test_a_fixed_sparsity_may_come_in_float32():
    distributions.check_fixed(torch.tensor(0.9), 0.1, "nm(1, 10)")
    with pytest.raises(
        ValueError, match=r"nm\(1, 10\) fixes the sparsity at 0.9, got 0.89"
    ):
        distributions.check_fixed(torch.tensor(0.89), 0.1, "nm(1, 10)")


def test_owl_keeps_the_sparsity_over_blocks_of_one_size():
    ratios = {"0.*": 0.011, "1.*": 0.052, "2.*": 0.03, "3.*": 0.017}
    shapes = {f"{i}.{name}": (200, 300) for i in range(4) for name in ("up", "down")}
    for spread in (0.0, 0.08, 0.2):
        for sparsity in (0.5, 0.7, torch.tensor(0.7, dtype=torch.float64)):
            kept = {
                path: int(count)
                for path, count in sf.budgets.owl(ratios, spread)(
                    shapes, sparsity
                ).items()
            }
            # a half for each leaf, rounded
            assert abs(sum(kept.values()) - (1 - float(sparsity)) * 8 * 60000) <= 8
            assert kept["0.up"] == kept["0.down"]
            assert kept["1.up"] - kept["0.up"] == pytest.approx(
                2 * spread * 60000, abs=1
            )  # the most and the fewest


def test_owl_looks_at_differences_of_ratios_alone():
    shapes = {"a": (100, 100), "b": (100, 100), "c": (100, 100)}
    first = sf.budgets.owl({"a": 0.1, "b": 0.2, "c": 0.4})(shapes, 0.6)
    assert first == sf.budgets.owl({"a": 11.0, "b": 12.0, "c": 14.0})(shapes, 0.6)
    assert sf.budgets.owl({"*": 0.3})(shapes, 0.6) == sf.budgets.uniform()(shapes, 0.6)
    assert sf.budgets.owl({"a": 0.1, "b": 0.2, "c": 0.4})({"b": (100, 100)}, 0.6) == {
        "b": first["b"]
    }  # a part


def test_owl_refuses_what_it_cannot_meet():
    owl = sf.budgets.owl({"a": 0.0, "b": 1.0}, spread=0.2)
    with pytest.raises(
        ValueError,
        match=r"owl: expected every block to keep a share in \[0, 1\], got -0\.1 for "
        r"'a'",
    ):
        owl({"a": (4, 4)}, 0.9)
    with pytest.raises(
        ValueError, match="owl: expected a glob for each leaf, got none for 'c' in"
    ):
        owl({"c": (4, 4)}, 0.5)
    with pytest.raises(
        ValueError, match="owl: expected a ratio for one glob or more, got {}"
    ):
        sf.budgets.owl({})
    with pytest.raises(
        ValueError, match="owl: expected a finite ratio of 'a', got nan"
    ):
        sf.budgets.owl({"a": float("nan")})
    with pytest.raises(
        ValueError, match=r"owl: expected spread in \[0, 0\.5\], got 0\.6"
    ):
        sf.budgets.owl({"a": 1.0}, spread=0.6)


# ---- bounds of leaves ----------------------------------------------------------------


def test_bounds_are_exact():
    found = distributions.Global(0.07, 0.29).bounds(
        {"a": (100,), "b": (10, 10), "c": (0, 3)}, 20
    )
    assert found == {"a": (7, 29), "b": (7, 29), "c": (0, 0)}
    assert distributions.Global(1 / 3, 1.0).bounds({"a": (3,)}, 1) == {"a": (1, 3)}


def test_totals_that_bounds_cannot_meet_are_refused():
    for total in (6, 30):
        with pytest.raises(
            ValueError,
            match=r"keeps between 7 and 29 units, but the sparsity asks for \d+ over "
            r"'a'",
        ):
            distributions.Global(0.07, 0.29).bounds({"a": (100,)}, total)


@pytest.mark.parametrize(
    "around",
    [
        lambda own: own,
        lambda own: B.in_multiples(own, 2),
        lambda own: B.at_least(own, 2),
    ],
    ids=["alone", "in_multiples", "at_least"],
)
def test_a_function_of_ones_own_gives_counts_of_all_leaves(around):
    params = {"a": torch.ones(4, 4), "b": torch.ones(3, 3)}
    for result, error, match in (
        ({"a": 2}, ValueError, "each leaf keeps, got nothing for 'b'"),
        (None, TypeError, "expected a dict of how many units .*, got NoneType"),
    ):
        own = around(lambda shapes, sparsity, result=result: result)
        with pytest.raises(error, match=f"distribution: .*{match}"):
            sf.static(0.5, distribution=own).init(params)
