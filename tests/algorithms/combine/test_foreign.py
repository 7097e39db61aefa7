"""Finding moments in the state of any optimizer; what cannot be found is refused with
words.
"""

import optree
import pytest
import torch
import torchopt

import sparsefn as sf
from sparsefn.algorithms.combine import foreign
from sparsefn.nn.checkpoint import load_state_dict, state_dict, tree_equal

MAKE = torch.Generator().manual_seed(0)
PARAMS = {
    "w": torch.randn(6, 8, generator=MAKE),
    "v": torch.randn(4, 4, generator=MAKE),
    "t": torch.randn(()),
}
GRADS = optree.tree_map(lambda p: 0.5 * p + 0.1, PARAMS)


def stacked(*trees):
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


class Remembers:
    """A descent whose state is what two functions make of the params and of the state
    and gradients.
    """

    def __init__(self, init, step=lambda state, grads, params: state):
        self.init, self.step = init, step

    def update(self, grads, state, *, params, inplace):
        return optree.tree_map(lambda g: -0.1 * g, grads), self.step(
            state, grads, params
        )


def statistics(params):
    def split(x):
        if x.ndim != 2:
            return torch.zeros_like(x)
        return x.new_zeros(x.shape[0]), x.new_zeros(1, x.shape[1])

    return optree.tree_map(split, params)


def factored(state, grads, params):
    # The squares of a matrix by rows and columns, as Adafactor keeps them.
    new = [
        (g * g).mean(1) if s.ndim == 1 else (g * g).mean(0, keepdim=True)
        for g in grads.values()
        if g.ndim
        for s in (torch.zeros(1), torch.zeros(1, 1))
    ]
    return optree.tree_unflatten(
        optree.tree_structure(state), [g for g in grads.values() if not g.ndim] + new
    )


FACTORED = Remembers(statistics, factored)


def joined(params):
    return {
        "all": torch.cat(
            [torch.zeros_like(x).reshape(-1) for x in optree.tree_leaves(params)]
        )
    }


def rigl(optimizer, **options):
    return sf.with_optimizer(sf.rigl(0.5), optimizer, **options)


# ---- what is found -------------------------------------------------------------------


def test_statistics_of_rows_and_columns_see_masked_gradients_and_are_left_alone():
    params = {path: PARAMS[path] for path in ("t", "v", "w")}
    grads = {path: GRADS[path] for path in params}
    algorithm = rigl(FACTORED)
    state = algorithm.init(params)
    new = algorithm.update(state, grads, 0)
    masked = sf.apply_masks(grads, state.masks)
    assert torch.equal(new.opt["w"][0], (masked["w"] ** 2).mean(1))
    assert torch.equal(new.opt["v"][1], (masked["v"] ** 2).mean(0, keepdim=True))
    assert tree_equal(load_state_dict(algorithm.init(grads), state_dict(new)), new)
    batch = torch.vmap(lambda p, g: algorithm.update(algorithm.init(p), g, 0))(
        stacked(params), stacked(grads)
    )
    assert tree_equal(batch, stacked(new))


def test_the_smaller_sizes_of_a_leaf_stay_what_they_are():
    # As optax's adafactor: a matrix is factored where both of its sizes are large.
    def init(params):
        return [
            statistics(p) if min(p.shape) > 5 else torch.zeros_like(p)
            for p in optree.tree_leaves(params)
        ]

    params = {"w": PARAMS["w"], "v": PARAMS["v"]}
    found = foreign.find(Remembers(init), params, [True, True])
    assert found.owners == [0, -1, -1]


def test_a_state_whose_form_depends_on_sizes_is_refused():
    def init(params):
        largest = max(p.numel() for p in optree.tree_leaves(params))
        return [torch.zeros_like(p) for p in params.values()] * (1 + (largest > 1000))

    with pytest.raises(ValueError, match="takes another form for leaves of other siz"):
        rigl(Remembers(init)).init(PARAMS)


def test_moments_are_told_from_other_tensors():
    def init(params):
        w = params["w"]
        left, right = (
            w.new_zeros(w.shape[0], w.shape[0]),
            w.new_zeros(w.shape[1], w.shape[1]),
        )
        return {
            "mu": torch.zeros_like(w),
            "left": left,
            "right": right,
            "count": torch.zeros(()),
            "window": [None],
        }

    assert foreign.find(Remembers(init), {"w": PARAMS["w"]}, [True]).owners == [
        -1,
        -1,
        0,
        -1,
    ]


def test_a_state_of_any_form_goes_where_no_moment_is_looked_for():
    for algorithm in (
        rigl(Remembers(joined), mask_moments=False, reset_grown=False),
        sf.with_optimizer(sf.dense(), Remembers(joined)),
        sf.with_optimizer(sf.with_dense_gradients(sf.rigl(0.5)), Remembers(joined)),
    ):
        state = algorithm.update(algorithm.init(PARAMS), GRADS, 0)
        assert state.opt["all"].shape == (65,)


# ---- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "path"),
    [
        (joined, "all"),
        (lambda params: [params["w"].new_zeros(2, *params["w"].shape)], "0"),
        (lambda params: {"mu": torch.zeros_like(params["w"]).T}, "mu"),
        (lambda params: params["w"].new_zeros(params["w"].numel()), ""),
        (
            lambda params: params["w"].new_zeros(
                params["w"].shape[1], params["v"].shape[0]
            ),
            "",
        ),
    ],
)
def test_a_state_that_joins_leaves_or_holds_one_in_another_shape_is_refused(init, path):
    text = (
        "with_optimizer: cannot find moments of pruned weights in the state of "
        f"Remembers: at '{path}' it joins leaves, or holds one in another shape; pass "
        "mask_moments=False and reset_grown=False to leave its state alone"
    )
    for options in ({}, {"mask_moments": False}, {"reset_grown": False}):
        with pytest.raises(ValueError) as caught:
            rigl(Remembers(init), **options).init(PARAMS)
        assert str(caught.value) == text


@pytest.mark.parametrize(
    ("init", "path", "what"),
    [
        (
            lambda p: {"m": p["w"].new_zeros(2, p["w"].shape[1])},
            "m",
            "it joins leaves, or holds one in another shape",
        ),
        (
            lambda p: {"on": torch.ones_like(p["w"], dtype=torch.bool)},
            "on",
            "it holds torch.bool entries, whose zero",
        ),
        (
            lambda p: {"m": torch.zeros_like(p["w"], dtype=torch.int8)},
            "m",
            "it holds torch.int8 entries, whose zero",
        ),
        (
            lambda p: {"m": p, "Q": p["w"].new_zeros(8, 8)},
            "Q",
            "it holds a basis, so that moments belong to direct",
        ),
    ],
)
def test_moments_of_low_rank_in_codes_or_in_a_basis_are_refused(init, path, what):
    with pytest.raises(
        ValueError,
        match=f"in the state of Remembers: at '{path}' {what}.*pass mask_moments=False "
        "and",
    ):
        rigl(Remembers(init)).init(PARAMS)
    rigl(Remembers(init), mask_moments=False, reset_grown=False).init(PARAMS)
    sf.with_optimizer(sf.dense(), Remembers(init)).init(PARAMS)


def test_a_weight_may_have_the_name_of_a_basis():
    params = {"Q": PARAMS["w"], "t": PARAMS["t"]}
    found = foreign.find(
        Remembers(lambda p: {"m": p, "row": p["Q"].new_zeros(6)}), params, [True, False]
    )
    assert found.owners == [0, -1, -1]


@pytest.mark.parametrize(
    ("shape", "weight", "kind"),
    [
        ((6, 8), (6, 8), "entries"),
        ((), (), "entries"),
        ((48,), (6, 8), "reshaped"),
        ((64, 27), (64, 3, 3, 3), "reshaped"),
        ((1, 6, 1, 8), (6, 8), "reshaped"),
        ((6,), (6, 1), "reshaped"),
        ((), (1, 1), "shared"),
        ((64, 1, 3, 3), (64, 3, 3, 3), "shared"),
        ((27, 27), (64, 3, 3, 3), "shared"),
        ((5,), (5, 5), "shared"),
        ((12,), (12, 0), "shared"),
        ((27, 64), (64, 3, 3, 3), "other"),
        ((8, 6), (6, 8), "other"),
        ((4, 8), (6, 8), "other"),
        ((2, 6, 8), (6, 8), "other"),
    ],
)
def test_the_layout_of_a_state_follows_from_shapes(shape, weight, kind):
    assert foreign.layout(shape, weight) == kind


def test_an_init_that_reads_values_is_refused():
    algorithm = rigl(
        Remembers(lambda params: torch.full((2,), params["w"].sum().item()))
    )
    text = (
        r"with_optimizer: cannot find the moments of Remembers: its init fails on "
        r"tensors of the meta device "
        r"\(RuntimeError: Tensor.item\(\) cannot be called on meta tensors\); pass "
        r"mask_moments=False and "
        r"reset_grown=False to leave its state alone"
    )
    with pytest.raises(ValueError, match=text):
        algorithm.init(PARAMS)


@pytest.mark.parametrize(
    "init",
    [
        lambda params: (
            {} if params["w"].numel() > 99 else {"mu": torch.zeros_like(params["w"])}
        ),
        lambda params: torch.zeros_like(
            params["w"] if params["w"].numel() > 99 else params["v"]
        ),
    ],
)
def test_a_state_whose_form_hangs_on_sizes_is_refused(init):
    text = (
        "with_optimizer: cannot find the moments of Remembers: its state takes "
        "another form for leaves of other sizes; pass mask_moments=False and "
        "reset_grown=False to leave its state alone"
    )
    with pytest.raises(ValueError, match=text):
        rigl(Remembers(init)).init(PARAMS)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            torchopt.radam(0.1),
            "GradientTransformation to hold tensors, {}, got int at '0.t' of "
            "ScaleByRAdamState",
        ),
        (
            torchopt.adamax(0.1),
            "GradientTransformation to hold tensors, {}, got int at '0.t' of "
            "ScaleByAdamaxState",
        ),
        (
            Remembers(lambda params: {"lr": 0.1}),
            "Remembers to hold tensors, {}, got float at 'lr' of dict",
        ),
        (
            Remembers(lambda params: [len]),
            "Remembers to hold tensors, {}, got builtin_function_or_method at '0' of "
            "list",
        ),
    ],
)
def test_a_state_that_holds_anything_but_tensors_is_refused(optimizer, text):
    why = "as vmap, checkpoints and compiled code carry nothing else"
    for options in ({}, {"mask_moments": False, "reset_grown": False}):
        with pytest.raises(TypeError) as caught:
            rigl(optimizer, **options).init(PARAMS)
        assert str(
            caught.value
        ) == "with_optimizer: expected the state of " + text.format(why)


def test_a_state_that_turns_into_numbers_is_refused():
    algorithm = rigl(
        Remembers(
            lambda params: {"n": torch.zeros(())}, lambda state, grads, params: {"n": 1}
        )
    )
    with pytest.raises(
        TypeError,
        match="expected the state of Remembers to hold tensors, .* got int at 'n' of "
        "dict",
    ):
        algorithm.update(algorithm.init(PARAMS), GRADS, 0)


def test_a_state_that_changes_its_structure_is_refused():
    algorithm = rigl(
        Remembers(lambda params: {}, lambda state, grads, params: {"mu": grads})
    )
    text = (
        "with_optimizer: expected the new state of Remembers with the structure of "
        "the old one, but there is an "
    )
    with pytest.raises(ValueError, match=text + "unknown leaf at 'mu.t'"):
        algorithm.update(algorithm.init(PARAMS), GRADS, 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda u: {**u, "w": None},
            "with the structure of params, but there is no leaf at 'w' in the updates "
            "of Answers, but None",
        ),
        (
            lambda u: {**u, "x": u["w"]},
            "with the structure of params, but there is an unknown leaf at 'x' in the "
            "updates of Answers, which params lack",
        ),
        (lambda u: {**u, "w": u["t"]}, "of shape (6, 8) at 'w', got ()"),
    ],
)
def test_updates_unlike_the_params_are_refused_by_path(change, text):
    class Answers:
        init = staticmethod(lambda params: ())
        update = staticmethod(
            lambda grads, state, *, params, inplace: (change(grads), state)
        )

    algorithm = rigl(Answers())
    state = algorithm.init(PARAMS)
    with pytest.raises(ValueError) as caught:
        algorithm.update(state, GRADS, 0)
    assert str(caught.value) == f"expected the updates of Answers {text}"


# ---- first values --------------------------------------------------------------------


def squares(params):
    return {
        "sum": optree.tree_map(lambda p: torch.full_like(p, 0.5), params),
        "slow": params,
    }


def test_moments_start_where_the_optimizer_starts_them():
    algorithm = sf.with_optimizer(
        sf.rigl(0.5, when=sf.at([1])),
        Remembers(
            squares,
            lambda s, grads, params: {
                "sum": optree.tree_map(lambda a, g: a + g * g, s["sum"], grads),
                "slow": s["slow"],
            },
        ),
    )
    old = algorithm.update(algorithm.init(PARAMS), GRADS, 0)
    assert not old.opt["sum"]["w"][~old.masks["w"]].any()
    new = algorithm.update(old, GRADS, 1)
    grew = new.masks["w"] & ~old.masks["w"]
    assert grew.any()
    assert (new.opt["sum"]["w"][grew] == 0.5).all()
    assert torch.equal(new.opt["slow"]["w"][grew], new.params["w"][grew])
    kept = new.masks["w"] & old.masks["w"]
    assert (new.opt["sum"]["w"][kept] > 0.5).all() and not new.opt["sum"]["w"][
        ~new.masks["w"]
    ].any()
    batch = torch.vmap(lambda s, g: algorithm.update(s, g, 1))(
        stacked(old), stacked(GRADS)
    )
    assert tree_equal(batch, stacked(new))


# ---- memory --------------------------------------------------------------------------

HOLDERS = {
    "params": Remembers(lambda params: {"slow": params}),
    "views": Remembers(
        lambda params: {"slow": optree.tree_map(lambda p: p.view_as(p), params)}
    ),
    "grads": Remembers(
        lambda params: {"last": params}, lambda state, grads, params: {"last": grads}
    ),
    "old params": Remembers(
        lambda params: {"last": params}, lambda state, grads, params: {"last": params}
    ),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_no_later_change_in_place_reaches_the_state_of_an_optimizer(name):
    alone = rigl(HOLDERS[name])
    for init, update, given, slope in (
        (alone.init, lambda s, g: alone.update(s, g, 0), PARAMS, GRADS),
        (
            torch.vmap(alone.init),
            torch.vmap(lambda s, g: alone.update(s, g, 0)),
            stacked(PARAMS),
            stacked(GRADS),
        ),
    ):
        params, grads = (optree.tree_map(torch.clone, tree) for tree in (given, slope))
        state = init(params)
        kept = optree.tree_map(torch.clone, state.opt)
        optree.tree_map(lambda p, q: (p.zero_(), q.zero_()), params, state.params)
        assert tree_equal(state.opt, kept)
        state = update(init(optree.tree_map(torch.clone, given)), grads)
        kept = optree.tree_map(torch.clone, state.opt)
        optree.tree_map(lambda g, q: (g.zero_(), q.zero_()), grads, state.params)
        assert tree_equal(state.opt, kept)


def test_a_wider_update_is_added_in_its_own_dtype_and_rounded_once():
    wide = Remembers(lambda params: ())
    wide.update = lambda grads, state, *, params, inplace: (
        optree.tree_map(lambda g: 0.003 * g.float(), grads),
        state,
    )
    params = {
        "w": torch.full((64, 96), 1.0, dtype=torch.bfloat16),
        "t": torch.ones((), dtype=torch.bfloat16),
    }
    for inner in (sf.static(0.5), sf.reparametrised(sf.reparam.power(2.0))):
        algorithm = sf.with_optimizer(inner, wide)
        state = algorithm.update(algorithm.init(params), params, 0)
        assert all(
            leaf.dtype == torch.bfloat16 for leaf in optree.tree_leaves(state.params)
        )


# ---- TorchOpt ------------------------------------------------------------------------

# Whether vmap carries it (clip asks for a number), and whether it is compiled here. In
# TorchOpt's adam the graph breaks inside its lists, which torch.compile does not
# survive.
TORCHOPT = {
    "sgd": (lambda: torchopt.sgd(0.1, weight_decay=0.1), True, False),
    "momentum": (lambda: torchopt.sgd(0.1, momentum=0.9, nesterov=True), True, True),
    "adam": (lambda: torchopt.adam(0.1), True, False),
    "adamw": (lambda: torchopt.adamw(0.1, weight_decay=0.1), True, False),
    "rmsprop": (
        lambda: torchopt.rmsprop(0.1, momentum=0.9, centered=True),
        True,
        False,
    ),
    "adagrad": (lambda: torchopt.adagrad(0.1), True, False),
    "adadelta": (lambda: torchopt.adadelta(), True, False),
    "scheduled": (
        lambda: torchopt.sgd(torchopt.schedule.linear_schedule(0.1, 0.01, 10, 2)),
        True,
        False,
    ),
    "clipped": (
        lambda: torchopt.chain(torchopt.clip_grad_norm(0.5), torchopt.adam(0.1)),
        False,
        False,
    ),
    "cleaned": (
        lambda: torchopt.chain(torchopt.nan_to_num(0.0), torchopt.rmsprop(0.1)),
        True,
        False,
    ),
}


def two_steps(algorithm, state):
    for step in range(2):
        state = algorithm.update(state, GRADS, step)
    return state


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", TORCHOPT)
def test_optimizers_of_torchopt_train_resume_batch_and_compile(name):
    make, batches, compiles = TORCHOPT[name]
    algorithm = sf.with_optimizer(sf.static(0.5, init="magnitude"), make())
    start = algorithm.init(PARAMS)
    state = two_steps(algorithm, start)
    assert tree_equal(load_state_dict(start, state_dict(state)), state)
    if batches:
        batch = torch.vmap(lambda params: two_steps(algorithm, algorithm.init(params)))(
            stacked(PARAMS, PARAMS)
        )
        close = optree.tree_map(
            lambda a, b: torch.allclose(a[1].double(), b.double()), batch, state
        )
        assert all(optree.tree_leaves(close))
    if compiles:
        torch._dynamo.reset()
        compiled = torch.compile(algorithm.update, backend="eager")
        assert tree_equal(compiled(start, GRADS, 0), algorithm.update(start, GRADS, 0))


@pytest.mark.deep
@pytest.mark.parametrize("dynamic", [None, True])
def test_moments_are_found_in_compiled_code(dynamic):
    torch._dynamo.reset()
    algorithm = sf.with_optimizer(sf.static(0.5, init="magnitude"), FACTORED)
    params, grads = (
        {path: tree[path] for path in ("t", "v", "w")} for tree in (PARAMS, GRADS)
    )
    start = algorithm.init(params)
    compiled = torch.compile(algorithm.update, backend="eager", dynamic=dynamic)
    assert tree_equal(compiled(start, grads, 0), algorithm.update(start, grads, 0))
