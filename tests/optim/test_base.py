"""SGD, Adam and AdamW: equal to torch.optim, pure, the same bits under vmap and
compile.
"""

import itertools
import math
import pickle
from collections import OrderedDict

import optree
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import sparsefn.optim as O
from sparsefn.nn.checkpoint import tree_equal

CASES = {
    "sgd": (
        lambda **kw: O.sgd(0.05, **kw),
        lambda p, **kw: torch.optim.SGD(p, 0.05, **kw),
        {},
    ),
    "sgd-momentum": (
        lambda **kw: O.sgd(0.05, **kw),
        lambda p, **kw: torch.optim.SGD(p, 0.05, **kw),
        {"momentum": 0.9, "weight_decay": 0.01},
    ),
    "sgd-nesterov": (
        lambda **kw: O.sgd(0.05, **kw),
        lambda p, **kw: torch.optim.SGD(p, 0.05, **kw),
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (
        lambda **kw: O.adam(0.01, **kw),
        lambda p, **kw: torch.optim.Adam(p, 0.01, **kw),
        {},
    ),
    "adam-decay": (
        lambda **kw: O.adam(0.01, **kw),
        lambda p, **kw: torch.optim.Adam(p, 0.01, **kw),
        {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    ),
    "adamw": (
        lambda **kw: O.adamw(0.01, **kw),
        lambda p, **kw: torch.optim.AdamW(p, 0.01, **kw),
        {},
    ),
    "adamw-decay": (
        lambda **kw: O.adamw(0.01, **kw),
        lambda p, **kw: torch.optim.AdamW(p, 0.01, **kw),
        {"weight_decay": 0.3, "betas": (0.0, 0.9)},
    ),
}


def halving(step):
    return 0.05 * 0.5 ** (step / 25)


def start(dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(3, 4, generator=make).to(dtype),
        "b": [torch.randn(4, generator=make).to(dtype)],
    }


def gradient(params):
    # A lopsided bowl with a dead weight: the gradient of "b" starts large, one weight
    # has none.
    grads = optree.tree_map(lambda p: p * 0.5 + torch.sin(3 * p), params)
    grads["w"] = grads["w"].clone().index_fill(0, torch.tensor([2]), 0.0)
    return grads


def run(optimizer, params, steps):
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(gradient(params), state, params=params)
        params = optree.tree_map(torch.add, params, updates)
    return params, state


def run_torch(make, params, steps, lr=None):
    params = optree.tree_map(lambda p: p.clone().requires_grad_(), params)
    optimizer = make(optree.tree_leaves(params))
    for step in range(steps):
        with torch.no_grad():
            optree.tree_map(
                lambda p, g: setattr(p, "grad", g), params, gradient(params)
            )
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr(step)
        optimizer.step()
    return optree.tree_map(torch.detach, params)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)]
)
def test_equal_to_torch_optim_over_100_steps(name, dtype, tolerance):
    ours, theirs, options = CASES[name]
    params, _ = run(ours(**options), start(dtype), 100)
    want = run_torch(lambda p: theirs(p, **options), start(dtype), 100)
    for got, expected in zip(
        optree.tree_leaves(params), optree.tree_leaves(want), strict=True
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (O.sgd(halving, momentum=0.5), lambda p: torch.optim.SGD(p, 0.0, momentum=0.5)),
        (O.adam(halving), lambda p: torch.optim.Adam(p, 0.0)),
        (
            O.adamw(halving, weight_decay=0.2),
            lambda p: torch.optim.AdamW(p, 0.0, weight_decay=0.2),
        ),
    ],
)
def test_a_schedule_reads_the_optimizers_own_count_from_0(ours, theirs):
    params, state = run(ours, start(), 100)
    want = run_torch(theirs, start(), 100, lr=halving)
    for got, expected in zip(
        optree.tree_leaves(params), optree.tree_leaves(want), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert (state.count.item(), state.count.dtype, state.count.ndim) == (
        100,
        torch.int64,
        0,
    )


@pytest.mark.parametrize("make", [lambda lr: O.sgd(lr, 0.9), O.adam, O.adamw])
def test_a_number_a_tensor_and_a_constant_schedule_give_the_tree_equal(make):
    want = run(make(0.01), start(), 5)
    assert tree_equal(
        run(make(torch.tensor(0.01, dtype=torch.float64)), start(), 5), want
    )
    assert tree_equal(run(make(lambda count: 0.01), start(), 5), want)
    assert tree_equal(
        run(
            make(lambda count: torch.full_like(count, 0.01, dtype=torch.float64)),
            start(),
            5,
        ),
        want,
    )


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_keeps_its_dtype_and_follows_float32(name):
    ours, _, options = CASES[name]
    params, state = run(ours(**options), start(torch.bfloat16), 10)
    want, _ = run(ours(**options), start(), 10)
    for leaf in optree.tree_leaves(params):
        assert leaf.dtype == torch.bfloat16
    for leaf in optree.tree_leaves([part for part in state[1:3] if part != ()]):
        assert leaf.dtype == torch.bfloat16
    for got, expected in zip(
        optree.tree_leaves(params), optree.tree_leaves(want), strict=True
    ):
        torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)


def test_float16_gradients_near_zero_do_not_overflow():
    params = {"w": torch.ones(3, dtype=torch.float16)}
    # 300 squared is inf in float16
    grads = {"w": torch.tensor([0.0, 6e-8, 300.0], dtype=torch.float16)}
    updates, _ = O.adam(0.1).update(grads, O.adam(0.1).init(params))
    assert updates["w"].isfinite().all()
    assert updates["w"][0] == 0
    torch.testing.assert_close(updates["w"][2].item(), -0.1, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_pure(name):
    optimizer = CASES[name][0](**CASES[name][2])
    params = start()
    grads, state = gradient(params), optimizer.init(params)
    before = [leaf.clone() for leaf in optree.tree_leaves((params, grads, state))]
    seed = torch.get_rng_state()
    first = optimizer.update(grads, state, params=params)
    inputs = {leaf.data_ptr() for leaf in optree.tree_leaves((params, grads, state))}
    assert all(map(torch.equal, optree.tree_leaves((params, grads, state)), before))
    assert inputs.isdisjoint(leaf.data_ptr() for leaf in optree.tree_leaves(first))
    assert torch.equal(torch.get_rng_state(), seed)
    assert tree_equal(first, optimizer.update(grads, state, params=params))
    assert inputs.isdisjoint(
        leaf.data_ptr() for leaf in optree.tree_leaves(optimizer.init(params))
    )


def test_init_detaches_parameters():
    params = {"w": torch.nn.Parameter(torch.ones(2))}
    for optimizer in (O.sgd(0.1, 0.9), O.adam(0.1)):
        for leaf in optree.tree_leaves(optimizer.init(params)):
            assert type(leaf) is torch.Tensor
            assert not leaf.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_vmap_gives_the_bits_of_the_loop(name, dtype):
    optimizer = CASES[name][0](**CASES[name][2])
    members = [
        optree.tree_map(lambda p, i=i: p * (i + 0.3), start(dtype)) for i in range(17)
    ]
    stacked = optree.tree_map(lambda *leaves: torch.stack(leaves), *members)

    def steps(params):
        state = optimizer.init(params)
        for _ in range(3):
            updates, state = optimizer.update(gradient(params), state, params=params)
            params = optree.tree_map(torch.add, params, updates)
        return params, tuple(state)

    batched = torch.vmap(steps)(stacked)
    loop = [steps(member) for member in members]
    assert tree_equal(
        batched, optree.tree_map(lambda *leaves: torch.stack(leaves), *loop)
    )


@pytest.mark.parametrize("make", [lambda lr: O.sgd(lr, 0.9), O.adam, O.adamw])
def test_vmap_over_learning_rates(make):
    rates = torch.tensor([0.1, 0.01, 0.3])
    params = start()
    batched = torch.vmap(lambda lr: run(make(lr), params, 2)[0])(rates)
    loop = [run(make(lr), params, 2)[0] for lr in rates]
    assert tree_equal(
        batched, optree.tree_map(lambda *leaves: torch.stack(leaves), *loop)
    )


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_compile_gives_the_bits_of_eager_in_one_graph(name):
    torch._dynamo.reset()
    optimizer = CASES[name][0](**CASES[name][2])
    counter = CompileCounter()
    compiled = torch.compile(
        lambda grads, state, params: optimizer.update(grads, state, params=params),
        fullgraph=True,
        backend=counter,
    )
    params, state = start(), optimizer.init(start())
    for _ in range(5):
        want = optimizer.update(gradient(params), state, params=params)
        updates, state = compiled(gradient(params), state, params)
        assert tree_equal((updates, state), want)
        params = optree.tree_map(torch.add, params, updates)
    assert counter.frame_count == 1


@pytest.mark.deep
# from inductor's own imports
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_inductor_gives_the_bits_of_eager_in_every_dtype():
    torch._dynamo.reset()
    optimizer = O.adamw(halving, weight_decay=0.1)
    compiled = torch.compile(
        lambda g, s, p: optimizer.update(g, s, params=p), fullgraph=True
    )
    params = {
        **start(),
        "d": torch.linspace(0.1, 9.0, 997, dtype=torch.float64),
        "h": start(torch.bfloat16)["w"],
    }
    got = want = optimizer.init(params)
    for _ in range(3):
        updates, got = compiled(gradient(params), got, params)
        expected, want = optimizer.update(gradient(params), want, params=params)
        assert tree_equal((updates, got), (expected, want))
        params = optree.tree_map(torch.add, params, expected)
    assert got.count.item() == 3


@pytest.mark.parametrize("name", CASES)
def test_resume_through_pickle_is_bit_exact(name):
    make, options = CASES[name][0], CASES[name][2]
    want = run(make(**options), start(), 8)
    params, state = run(make(**options), start(), 3)
    params, state = pickle.loads(pickle.dumps((params, state)))
    optimizer = make(**options)
    for _ in range(5):
        updates, state = optimizer.update(gradient(params), state, params=params)
        params = optree.tree_map(torch.add, params, updates)
    assert tree_equal((params, state), want)


def test_differentiable_in_params_and_gradients():
    def loss(scale):
        params = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}
        optimizer = O.sgd(0.1, momentum=0.9, weight_decay=0.1)
        state = optimizer.init(params)
        for _ in range(3):
            grads = {"w": scale * params["w"] ** 3}
            updates, state = optimizer.update(grads, state, params=params)
            params = optree.tree_map(torch.add, params, updates)
        return params["w"].sum()

    at, step = torch.tensor(0.3, dtype=torch.float64), 1e-6
    numeric = (loss(at + step) - loss(at - step)) / (2 * step)
    torch.testing.assert_close(torch.func.grad(loss)(at), numeric, rtol=1e-6, atol=1e-8)


def test_any_tree_and_any_insertion_order():
    params = OrderedDict(b=torch.ones(2), a=(torch.ones(()), [torch.zeros(0, 3)]))
    for optimizer in (O.sgd(0.1, 0.9), O.adam(0.1)):
        updates, state = optimizer.update(params, optimizer.init(params), params=params)
        assert optree.tree_structure(updates) == optree.tree_structure(params)
        assert state.count.item() == 1
    a, b = (
        {"x": torch.ones(1), "y": torch.ones(2)},
        {"y": torch.ones(2), "x": torch.ones(1)},
    )
    assert tree_equal(
        O.adam(0.1).update(b, O.adam(0.1).init(a))[0],
        O.adam(0.1).update(a, O.adam(0.1).init(a))[0],
    )
    assert O.adam(0.1).update({}, O.adam(0.1).init({}))[1].count.item() == 1


@pytest.mark.parametrize(
    "make", [lambda **kw: O.sgd(0.1, 0.9, **kw), lambda **kw: O.adam(0.1, **kw)]
)
def test_update_refuses(make):
    params = start()
    optimizer, state = make(), make().init(params)
    with pytest.raises(
        ValueError,
        match="expected inplace=False: this optimizer never changes its arguments",
    ):
        optimizer.update(gradient(params), state, inplace=True)
    with pytest.raises(
        ValueError, match=r"expected params in update for weight_decay=0.1, got None"
    ):
        make(weight_decay=0.1).update(gradient(params), state)
    with pytest.raises(
        ValueError,
        match="expected grads with the structure of params, but there is no leaf at "
        "'w'",
    ):
        optimizer.update({"b": params["b"]}, state)
    with pytest.raises(
        ValueError, match=r"expected grads of shape \(4,\) at 'b.0', got \(3,\)"
    ):
        optimizer.update({"w": params["w"], "b": [torch.zeros(3)]}, state)
    with pytest.raises(
        TypeError,
        match=r"expected grads of dtype torch.float32 at 'b.0', got torch.float64",
    ):
        optimizer.update(
            {"w": params["w"], "b": [torch.zeros(4).double()]}, state, params=params
        )


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: O.sgd(-0.1), ValueError, "expected lr in [0, inf), got -0.1"),
        (lambda: O.sgd(math.nan), ValueError, "expected lr to be finite, got nan"),
        (lambda: O.adam(math.inf), ValueError, "expected lr to be finite, got inf"),
        (
            lambda: O.sgd("0.1"),
            TypeError,
            "expected lr to be a number or a 0-d float tensor, got str",
        ),
        (
            lambda: O.sgd(True),
            TypeError,
            "expected lr to be a number or a 0-d float tensor, got bool",
        ),
        (
            lambda: O.sgd(torch.ones(2)),
            ValueError,
            "expected lr to be a 0-d tensor, got shape (2,)",
        ),
        (
            lambda: O.adam(torch.tensor(1)),
            TypeError,
            "0-d float tensor, got a tensor of torch.int64",
        ),
        (
            lambda: O.sgd(0.1, momentum=torch.tensor(0.9)),
            TypeError,
            "expected momentum to be a number, got a tensor",
        ),
        (
            lambda: O.sgd(0.1, momentum=-1.0),
            ValueError,
            "expected momentum in [0, inf), got -1.0",
        ),
        (
            lambda: O.sgd(0.1, weight_decay=-1.0),
            ValueError,
            "expected weight_decay in [0, inf), got -1.0",
        ),
        (
            lambda: O.sgd(0.1, nesterov=True),
            ValueError,
            "expected a momentum above 0 for nesterov=True, got 0",
        ),
        (
            lambda: O.adam(0.1, betas=(0.9, 1.0)),
            ValueError,
            "expected betas[1] in [0, 1.0), got 1.0",
        ),
        (
            lambda: O.adamw(0.1, betas=(-0.1, 0.9)),
            ValueError,
            "expected betas[0] in [0, 1.0), got -0.1",
        ),
        (
            lambda: O.adam(0.1, betas=(0.9,)),
            ValueError,
            "expected two betas, got (0.9,)",
        ),
        (lambda: O.adam(0.1, betas=0.9), ValueError, "expected two betas, got 0.9"),
        (
            lambda: O.adam(0.1, eps=-1e-8),
            ValueError,
            "expected eps in [0, inf), got -1e-08",
        ),
        (
            lambda: O.adamw(0.1, weight_decay=None),
            TypeError,
            "expected weight_decay to be a number or a 0-d float tensor, got NoneType",
        ),
    ],
)
def test_bad_hyper_parameters_are_named(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RATES = {
    "number": 0.05,
    "tensor": torch.tensor(0.0512345, dtype=torch.float64),
    "schedule": halving,
}
OPTIONS = {
    "sgd": lambda lr: O.sgd(lr),
    "decayed": lambda lr: O.sgd(lr, weight_decay=0.0123),
    "momentum": lambda lr: O.sgd(lr, momentum=0.9, weight_decay=0.0123),
    "nesterov": lambda lr: O.sgd(lr, momentum=0.9, nesterov=True, weight_decay=0.0123),
    "adam": lambda lr: O.adam(lr, weight_decay=0.0123),
    "adamw": lambda lr: O.adamw(lr, weight_decay=0.0123),
}


def small_leaves(seed):
    make = torch.Generator().manual_seed(seed)
    return {
        f"{dtype}-{ndim}": torch.randn(
            (3,) * ndim, generator=make, dtype=torch.float64
        ).to(dtype)
        for dtype in DTYPES
        for ndim in (0, 1)
    }


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", OPTIONS)
def test_0d_leaves_of_every_dtype_have_the_bits_of_the_loop_under_vmap(name, rate):
    optimizer = OPTIONS[name](RATES[rate])
    stack = lambda trees: optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)  # noqa: E731
    params = [small_leaves(i) for i in range(7)]
    states = [optimizer.init(each) for each in params]
    batched = torch.vmap(lambda g, s, p: optimizer.update(g, s, params=p))
    for step in range(4):
        grads = [
            optree.tree_map(
                lambda p, k=step: p * 0.5 + torch.sin(3 * p) * (k + 1.3), each
            )
            for each in params
        ]
        got = batched(stack(grads), stack(states), stack(params))
        rows = [
            optimizer.update(g, s, params=p)
            for g, s, p in zip(grads, states, params, strict=True)
        ]
        assert tree_equal(got, stack(rows)), step
        states = [state for _, state in rows]
        params = [
            optree.tree_map(torch.add, p, u)
            for p, (u, _) in zip(params, rows, strict=True)
        ]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_0d_leaves_of_every_dtype_have_the_bits_of_eager_in_compiled_code(name):
    torch._dynamo.reset()
    optimizer = OPTIONS[name](halving)
    compiled = torch.compile(
        lambda g, s, p: optimizer.update(g, s, params=p), backend="aot_eager"
    )
    params = small_leaves(0)
    state = optimizer.init(params)
    for step in range(3):
        grads = optree.tree_map(
            lambda p, k=step: p * 0.5 + torch.sin(3 * p) * (k + 1.3), params
        )
        want = optimizer.update(grads, state, params=params)
        assert tree_equal(compiled(grads, state, params), want)
        params, state = optree.tree_map(torch.add, params, want[0]), want[1]


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_one_pass_under_masks_and_the_parts_agree_on_zeros_of_both_signs(case, clear):
    make, _, options = CASES[case]
    optimizer, signs = make(**options), (0.0, -0.0, 1.0, -1.0)
    rows = (
        list(itertools.product(signs, signs, signs, (0.0, 1.0), (True, False))) * 64
    )  # enough for one pass
    weight, grad, mean, square = (
        torch.tensor([row[i] for row in rows]) for i in range(4)
    )
    mask = torch.tensor([row[4] for row in rows])
    params = {"w": weight}
    state = optimizer.init(params)
    for name, moment in (("mu", mean), ("nu", square), ("momentum", mean)):
        if getattr(state, name, ()) != ():
            state = state._replace(**{name: {"w": moment}})
    masks = {"w": mask}
    moved, after = optimizer.under_masks({"w": grad}, state, params, masks, clear)
    updates, wanted = optimizer.update(
        {"w": torch.where(mask, grad, 0.0)}, state, params=params
    )
    if clear:
        wanted = optree.tree_map(
            lambda x: torch.where(mask, x, 0.0) if x.ndim else x, wanted
        )
    assert tree_equal(after, wanted)
    assert tree_equal(moved, {"w": torch.where(mask, weight + updates["w"], weight)})
