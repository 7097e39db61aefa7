"""Limits and errors of torch and TorchOpt: each line of the table in
docs/transforms.md, and its workaround; and each workaround of
sparsefn/_engine/torch_limits.py.

A test of a limit fails once upstream is fixed. Then remove its line from
docs/transforms.md, and the workaround if possible.
"""

import io
import math
import multiprocessing
import re
import tomllib
import warnings
from functools import partial
from pathlib import Path

import optree
import pytest
import torch
import torchopt
from torch._inductor.utils import run_and_get_code
from torch.func import functional_call, grad, jvp, vmap

import sparsefn as sf
from sparsefn._engine.numbers import elementary
from sparsefn.shrinking.trace import guards_by_name

pytestmark = pytest.mark.deep

compiled = partial(torch.compile, fullgraph=True, backend="eager")
X = torch.tensor([1.0, -1.0])
SLOPES = torch.tensor([2.0, 3.0])
VECTORS = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="seen on these vector units",
)


ROOT = Path(__file__).parents[1]
BEFORE_2_14 = torch.__version__ < "2.14"


def refused(kind, text):
    return pytest.raises(kind, match=text)


# ---- functions with a backward of their own ------------------------------------------


class Hard(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def by_function(x):
    return (Hard.apply(x) * SLOPES).sum()


def by_detaching(x):
    return (sf.masks.straight_through((x > 0).to(x.dtype), x) * SLOPES).sum()


# torch's own, while it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_function_of_ones_own_loses_its_backward_in_a_compiled_grad():
    assert torch.equal(grad(by_function)(X), SLOPES)
    # wrong, and silent
    assert torch.equal(compiled(grad(by_function))(X), torch.zeros(2))


def test_a_function_of_ones_own_has_no_forward_mode():
    with refused(NotImplementedError, "You must implement the jvp function"):
        jvp(by_function, (X,), (X,))


def test_straight_through_is_right_under_both():
    assert torch.equal(compiled(grad(by_detaching))(X), SLOPES)
    assert torch.equal(jvp(by_detaching, (X,), (X,))[1], (SLOPES * X).sum())


@torch.library.custom_op("sparsefn_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x):
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, gradient: 2 * gradient)


def test_an_operator_of_ones_own_has_no_forward_mode_and_says_nothing():
    assert torch.equal(jvp(twice, (X,), (X,))[1], torch.zeros(2))  # wrong, and silent


def test_an_operator_with_a_backward_is_refused_by_grad():
    with refused(RuntimeError, "must override the setup_context staticmethod"):
        grad(lambda x: twice(x).sum())(X)


def test_slopes_beside_the_operator_are_right_under_both():
    def doubled(x):
        return twice(x.detach()) - ((2 * x).detach() - 2 * x)

    assert torch.equal(jvp(doubled, (X,), (X,))[1], 2 * X)
    assert torch.equal(grad(lambda x: doubled(x).sum())(X), torch.full((2,), 2.0))


P = {"w": torch.ones(2, 3)}


# ---- graphs of one code --------------------------------------------------------------


def test_compiled_algorithms_of_one_process_are_as_many_as_wanted():
    assert torch._dynamo.config.recompile_limit < 12
    for i in range(12):
        algorithm = sf.with_optimizer(
            sf.rigl(0.5, when=sf.never()), sf.optimizers.sgd(0.01 * (i + 1))
        )
        state = algorithm.init(P)
        new = compiled(algorithm.update)(state, P, torch.tensor(0))
        assert sf.checkpoint.tree_equal(new, algorithm.update(state, P, 0))


# ---- TorchOpt ------------------------------------------------------------------------


def step_of(optimizer, params=P):
    state = optimizer.init(params)
    return lambda grads: optimizer.update(grads, state, params=params, inplace=False)[0]


@pytest.mark.skipif(not BEFORE_2_14, reason="torch 2.14 compiles it")
def test_torchopts_adam_does_not_compile_whole():
    with refused(torch._dynamo.exc.Unsupported, "Failed to trace builtin operator"):
        compiled(step_of(torchopt.adam(0.1)))(P)


def test_our_adam_compiles_whole_and_takes_the_same_step():
    ours, theirs = (
        compiled(step_of(sf.optimizers.adam(0.1)))(P),
        step_of(torchopt.adam(0.1))(P),
    )
    assert torch.allclose(ours["w"], theirs["w"], rtol=1e-5)


def test_torchopts_adam_starts_one_count_for_a_whole_stack():
    adam = torchopt.adam(0.1)
    with refused(ValueError, "that input is a Tensor of dimensionality 0"):
        vmap(
            lambda grads, state: adam.update(grads, state, params=grads, inplace=False)[
                0
            ]
        )(P, adam.init(P))


# its adam in place, without a batching rule
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_vmapped_init_starts_a_count_for_each_member():
    algorithm = sf.with_optimizer(sf.dense(), torchopt.adam(0.1))
    states = vmap(algorithm.init)(P)
    moved = vmap(algorithm.update, in_dims=(0, 0, None))(states, P, 0)
    assert torch.allclose(moved.params["w"], torch.full((2, 3), 0.9))


def test_torchopts_fused_adam_is_refused_by_vmap():
    adam = torchopt.adam(0.1, use_accelerated_op=True)
    with refused(RuntimeError, "must override the setup_context staticmethod"):
        vmap(lambda w: step_of(adam, {"w": w})({"w": w}))(P["w"])


def test_torchopts_sgd_treats_the_first_call_of_its_life_apart():
    first, fresh = (torchopt.sgd(1.0, momentum=0.5) for _ in range(2))
    state = first.update(P, first.init(P), params=P, inplace=False)[1]
    going_on, resumed = (
        o.update(P, state, params=P, inplace=False)[0]["w"] for o in (first, fresh)
    )
    # the same state, another step: wrong, and silent
    assert not torch.equal(going_on, resumed)


def test_with_optimizer_spends_that_call():
    def algorithm():
        return sf.with_optimizer(sf.dense(), torchopt.sgd(1.0, momentum=0.5))

    first = algorithm()
    state = first.update(first.init(P), P, 0)
    assert torch.equal(
        first.update(state, P, 1).params["w"],
        algorithm().update(state, P, 1).params["w"],
    )


# ---- modules -------------------------------------------------------------------------


def stacked(module):
    return {
        name: torch.stack([p.detach(), p.detach() * 2])
        for name, p in module.named_parameters()
    }


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_layers_have_no_batching_rule(kind):
    module, x = kind(2, 3), torch.ones(4, 1, 2)
    with refused(
        RuntimeError, r"Batching rule not implemented for aten::(lstm|gru).input"
    ):
        vmap(lambda params: functional_call(module, params, (x,))[0])(stacked(module))


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_a_loop_over_members_takes_them(kind):
    module, x = kind(2, 3), torch.ones(4, 1, 2)
    algorithm = sf.static(0.5, init="magnitude")
    states = vmap(algorithm.init)(stacked(module))
    members = sf.ensemble.unstack(states)
    outputs = torch.stack([sf.modules.call(module, state, x)[0] for state in members])
    assert outputs.shape == (2, 4, 1, 3) and not torch.equal(outputs[0], outputs[1])
    grads = [
        grad(lambda p: sf.modules.call(module, p, x)[0].sum())(sf.effective(state))
        for state in members
    ]
    following = vmap(algorithm.update, in_dims=(0, 0, None))(
        states, sf.ensemble.stack(grads), 0
    )
    assert sf.checkpoint.tree_equal(
        sf.ensemble.member(following, 1), algorithm.update(members[1], grads[1], 0)
    )


def norm_of(params, buffers, x):
    return functional_call(torch.nn.BatchNorm1d(2), {**params, **buffers}, (x,)).sum()


def test_batch_norm_in_training_changes_captured_buffers():
    module, x = torch.nn.BatchNorm1d(2), torch.randn(5, 2)
    params = sf.modules.params_of(module)
    with refused(RuntimeError, "that would mutate a captured Tensor"):
        grad(lambda params: functional_call(module, params, (x,)).sum())(params)
    with refused(
        RuntimeError,
        "running_mean or running_var, which will be updated in place, were not batched",
    ):
        vmap(partial(norm_of, params, sf.modules.buffers_of(module)))(
            torch.stack([x, 2 * x])
        )


def test_call_with_buffers_gives_them_back():
    module, x = torch.nn.BatchNorm1d(2), torch.randn(5, 2)
    params, buffers = sf.modules.params_of(module), sf.modules.buffers_of(module)

    def loss(params):
        out, new = sf.modules.call_with_buffers(module, params, buffers, x)
        return out.square().sum(), new

    slopes, new = grad(loss, has_aux=True)(params)
    assert (
        torch.isfinite(slopes["weight"]).all() and int(new["num_batches_tracked"]) == 1
    )
    assert int(module.num_batches_tracked) == 0


# ---- last bits -----------------------------------------------------------------------

LINE = torch.linspace(-5, 5, 1001)


@VECTORS
def test_sigmoid_has_other_last_bits_in_a_batch():
    alone = torch.stack([torch.sigmoid(x) for x in LINE])
    assert not torch.equal(alone, vmap(torch.sigmoid)(LINE))


@VECTORS
def test_square_roots_are_not_rounded_right():
    assert not torch.equal(LINE.abs().sqrt(), LINE.abs().double().sqrt().float())


def test_what_the_library_uses_has_the_same_bits():
    wave = sf.schedules.cosine(1.0, 7)
    assert vmap(wave)(torch.arange(50)).tolist() == [wave(step) for step in range(50)]
    roots = elementary.sqrt(LINE.abs())
    assert torch.equal(roots, vmap(elementary.sqrt)(LINE.abs()))
    assert torch.equal(roots, LINE.abs().double().sqrt().float())


def test_topk_takes_any_of_equal_ones():
    assert sorted(torch.topk(torch.zeros(40), 3).indices.tolist()) != [0, 1, 2]
    assert sf.masks.topk_mask(torch.zeros(40), 3).nonzero().flatten().tolist() == [
        0,
        1,
        2,
    ]


# ---- values that a transform hides ---------------------------------------------------


def test_a_batched_truth_cannot_be_branched_on():
    with refused(RuntimeError, "data-dependent control flow"):
        vmap(lambda x: x if x > 0 else -x)(X)
    with refused(torch._dynamo.exc.Unsupported, "Data-dependent branching"):
        compiled(lambda x: x if x > 0 else -x)(X[1])
    with refused(Exception, "treespec.unflatten"):
        vmap(
            lambda p, x: torch.cond(
                p, lambda x: (x + 1, x + 2), lambda x: (x - 1, x - 2), (x,)
            )
        )(X > 0, X)


def test_choose_takes_any():
    def size(x):
        return sf.tree.choose(x > 0, lambda old: -old, -x)

    assert vmap(size)(X).tolist() == [1.0, 1.0]
    assert compiled(size)(X[1]).item() == 1.0


def test_a_batched_count_is_refused():
    with refused(RuntimeError, "over calling .item"):
        vmap(lambda k: torch.kthvalue(X, k).values)(torch.tensor([1, 2]))
    assert vmap(lambda k: sf.masks.topk_mask(X, k))(torch.tensor([0, 1])).tolist() == [
        [False, False],
        [True, False],
    ]


def test_global_random_numbers_are_refused_by_vmap():
    with refused(
        RuntimeError, "called random operation while in randomness error mode"
    ):
        vmap(lambda x: x + torch.rand(()))(X)
    keys = sf.random.split(sf.random.key(0), 2)
    assert torch.equal(
        vmap(lambda k: sf.random.uniform(k, (2,)))(keys)[1],
        sf.random.uniform(keys[1], (2,)),
    )


def test_grad_takes_no_tree_with_masks_in_it():
    state = sf.static(0.5).init({"w": torch.ones(2, 2)})
    with refused(
        RuntimeError, "only Tensors of floating point dtype can require gradients"
    ):
        grad(lambda state: sf.effective(state)["w"].sum())(state)
    slopes = grad(
        lambda params: sf.effective(state._replace(params=params))["w"].sum()
    )(state.params)
    assert torch.equal(slopes["w"], state.masks["w"].float())


def test_vmap_takes_no_none():
    with refused(
        ValueError,
        "Got in_dim=0 for an input but the input is of type <class 'NoneType'>",
    ):
        vmap(lambda tree: tree["a"])({"a": X, "b": None})
    assert vmap(lambda tree: tree["a"])({"a": X, "b": ()}).tolist() == X.tolist()


# ---- programs and names --------------------------------------------------------------


class Update(torch.nn.Module):
    def __init__(self, algorithm, like=None):
        super().__init__()
        self.algorithm, self.like = algorithm, like

    def forward(self, state, grads, step):
        if self.like is None:
            return self.algorithm.update(state, grads, step)
        leaves, treedef = state, optree.tree_structure(self.like)
        return optree.tree_leaves(
            self.algorithm.update(treedef.unflatten(leaves), grads, step)
        )


def test_a_program_of_states_cannot_be_saved_but_one_of_leaves_can():
    algorithm = sf.gmp(0.5)
    state, step = algorithm.init(P), torch.tensor(0)
    program = torch.export.export(Update(algorithm), (state, P, step))
    assert sf.checkpoint.tree_equal(
        program.module()(state, P, step), algorithm.update(state, P, 0)
    )
    with refused(NotImplementedError, "serializ"):
        torch.export.save(program, io.BytesIO())
    file = io.BytesIO()
    torch.export.save(
        torch.export.export(
            Update(algorithm, state), (optree.tree_leaves(state), P, step)
        ),
        file,
    )
    file.seek(0)
    leaves = torch.export.load(file).module()(optree.tree_leaves(state), P, step)
    again = optree.tree_unflatten(optree.tree_structure(state), leaves)
    assert sf.checkpoint.tree_equal(again, algorithm.update(state, P, 0))


def cube(x):
    return (x * x * x).sum()


def curvature(x):
    return vmap(lambda way: jvp(grad(cube), (x,), (way,))[1])(torch.eye(3))


class Slope(torch.nn.Module):
    def forward(self, x):
        return grad(cube)(x)


def exported_gradient():
    out = torch.export.export(Slope(), (torch.ones(2),)).module()(torch.ones(2))
    return type(out).__name__


def compiled_curvatures():
    try:
        compiled(vmap(curvature))(torch.ones(2, 3))
    except Exception as error:
        return type(error).__name__
    return "it works"


def alone(function):
    """In a process of its own, as a failure leaves levels of torch.func behind."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(function)


def test_an_exported_gradient_has_no_values():
    assert alone(exported_gradient) == "FakeTensor"  # wrong, and silent


def test_a_compiled_gradient_has():
    assert torch.equal(compiled(grad(cube))(torch.ones(2)), torch.full((2,), 3.0))


def test_a_compiled_batch_of_second_derivatives_is_refused():
    assert alone(compiled_curvatures) == (
        "TorchRuntimeError" if BEFORE_2_14 else "Unsupported"
    )


def test_a_batch_of_them_and_a_compiled_one_are_right():
    want = torch.diag(torch.full((3,), 6.0))
    assert torch.equal(vmap(curvature)(torch.ones(2, 3)), torch.stack([want, want]))
    assert torch.equal(compiled(curvature)(torch.ones(3)), want)


@torch.compiler.assume_constant_result
def constant() -> int:
    return int(torch.ones(2).sum())


class Constant(torch.nn.Module):
    def forward(self, x):
        return x + (1 if constant() == 2 else 0)


def test_an_exported_program_works_out_constants_in_strict_mode_alone():
    with refused(Exception, "Could not guard on data-dependent expression"):
        torch.export.export(Constant(), (X,))
    assert torch.equal(
        torch.export.export(Constant(), (X,), strict=True).module()(X), X + 1
    )
    algorithm = sf.rigl(
        0.5, distribution=sf.budgets.erk(), drop_fraction=0.5, when=sf.always()
    )
    params = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.arange(10.0).reshape(5, 2),
    }
    state, step = algorithm.init(params), torch.tensor(0)
    program = torch.export.export(
        Update(algorithm), (state, params, step), strict=True
    ).module()
    assert sf.checkpoint.tree_equal(
        program(state, params, step), algorithm.update(state, params, 0)
    )


@pytest.mark.parametrize("name", ["vmap", "grad"])
def test_the_old_names_work_and_warn(name):
    import functorch

    with pytest.warns(FutureWarning, match=f"`functorch.{name}` is deprecated"):
        transformed = getattr(functorch, name)(torch.sin)
    x = torch.tensor([0.5]) if name == "vmap" else torch.tensor(0.5)
    with warnings.catch_warnings():
        assert torch.equal(transformed(x), getattr(torch.func, name)(torch.sin)(x))


# ---- compiled trees ------------------------------------------------------------------


def test_optree_refuses_a_dict_without_tensors_in_compiled_code():
    with refused(torch._dynamo.exc.Unsupported, "DictMetaData"):
        compiled(lambda tree: optree.tree_leaves(tree))({"a": {}, "w": X})


def test_the_library_goes_through_it():
    assert torch.equal(
        compiled(lambda tree: sf.tree.leaves_of(tree))({"a": {}, "w": X})[0], X
    )


def test_a_compiled_number_is_symbolic_where_shapes_are_dynamic():
    dynamic = partial(compiled, dynamic=True)
    with refused(torch._dynamo.exc.Unsupported, "non-Tensor"):
        dynamic(lambda x: (x, math.isinf(x.shape[0] * 0.5)))(torch.ones(5))
    if BEFORE_2_14:
        with refused(torch._dynamo.exc.Unsupported, "max"):
            dynamic(lambda x: (x, max(x.shape, default=1)))(torch.ones(5, 6))

    def known(x):
        sf.tree.fix_sizes(x)
        return x, math.isinf(x.shape[0] * 0.5), max(x.shape, default=1)

    assert dynamic(known)(torch.ones(5, 6))[1:] == (False, 6)


# ---- compiled code, in _engine/torch_limits.py; programs, in shrinking/trace.py ------


def test_workarounds_for_old_releases_go_with_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (oldest,) = [x for x in project["project"]["dependencies"] if "torch" in x]
    # From 2.12 on remove what is for `OLD`, from 2.13 on `VMAP_REINTERPRETS`, `GATHER`.
    assert oldest == "torch>=2.11"


class Keywords(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, **more):
        return self.layer(more["x"])


@pytest.mark.skipif(BEFORE_2_14, reason="other releases find them")
def test_a_program_does_not_find_its_keywords():
    x = torch.ones(2, 3)
    any_size = dict.fromkeys(range(2), torch.export.Dim.AUTO)
    program = torch.export.export(
        Keywords(), (), {"x": x}, dynamic_shapes={"more": {"x": any_size}}
    )
    with refused(NameError, "name 'L' is not defined"):
        program.module()(x=x)
    assert guards_by_name(program, Keywords()).module()(x=x).shape == (2, 2)


def code_of(run, *given):
    """The code that inductor makes of a function."""
    results, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), *given)
    return results, code


def test_compiled_loops_compute_a_number_again():
    def scaled(x, y, number):
        number = (number + 1).sqrt()
        return x * number, y * number

    _, code = code_of(scaled, torch.ones(300), torch.ones(40), torch.tensor(3.0))
    assert code.count("std::sqrt(") > 1


def test_compiled_code_does_not_round_to_sixteen_bits():
    x, y = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()

    def product(x, y):
        return (x * y).float()

    assert not torch.equal(code_of(product, x, y)[0], product(x, y))


def test_compiled_loops_load_bools_one_by_one():
    # The code of a loop loads a vector of bools by this function of torch's headers.
    x = torch.ones(300)
    _, code = code_of(torch.where, x > 0, x, x)
    header = Path(torch.__file__).with_name("include") / "ATen/cpu/vec/vec_mask.h"
    one_by_one = re.search(r"mask\[i\] = .*b\[i\]", header.read_text(encoding="utf-8"))
    assert "VecMask<float,1>::from(" in code and one_by_one
