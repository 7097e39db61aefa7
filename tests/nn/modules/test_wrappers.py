"""Wrapped modules have the names of the bare one, and data parallelism is refused where
gradients are taken.
"""

import copy
import re

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.nn.utils import prune

import sparsefn as sf
import sparsefn.nn.modules as M
from sparsefn.nn.checkpoint import tree_equal
from sparsefn.nn.modules.wrappers import Named, own_tensors

nm = sf.patterns.nm


def bare():
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    return nn.Sequential(layers, nn.Linear(4, 4, bias=False)).eval()


def compiled(module):
    return torch.compile(module, backend="eager")


def inside(wrap):
    def wrapped(net):
        net[0] = wrap(net[0])
        return net

    return wrapped


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


PARALLEL = {"ddp": nn.parallel.DistributedDataParallel, "dp": nn.DataParallel}
RUNS = {
    "compiled": compiled,
    "checkpointed": checkpoint_wrapper,
    "compiled inside": inside(compiled),
    "checkpointed inside": inside(checkpoint_wrapper),
    "both": lambda net: compiled(inside(checkpoint_wrapper)(net)),
}
HELD = {
    "ddp of compiled": lambda net: PARALLEL["ddp"](compiled(net)),
    "dp inside": inside(PARALLEL["dp"]),
}
WRAPPED = {**RUNS, **PARALLEL, **HELD}
every = pytest.mark.parametrize("name", WRAPPED)


def made(name):
    net = bare()
    return net, WRAPPED[name](copy.deepcopy(net))


def a_state(net):
    return sf.static(0.5, pattern=nm(2, 4), key=sf.random.key(3)).init(M.params_of(net))


@every
def test_names_values_and_draws_are_those_of_the_bare_module(name, group):
    net, wrapped = made(name)
    assert tree_equal(M.params_of(wrapped), M.params_of(net))
    assert tree_equal(M.buffers_of(wrapped), M.buffers_of(net))
    assert list(M.params_of(wrapped)) == list(M.params_of(net))
    state = sf.static(0.5, key=sf.random.key(3)).init(M.params_of(wrapped))
    assert tree_equal(
        state, sf.static(0.5, key=sf.random.key(3)).init(M.params_of(net))
    )


@pytest.mark.deep(but=["checkpointed*", "ddp", "dp*"])
@every
def test_bake_to_sparse_and_from_pruned_map_the_names_back(name, group):
    net, wrapped = made(name)
    state, x = a_state(net), torch.randn(3, 4)
    buffers = {path: b + 1 for path, b in M.buffers_of(net).items()}
    with torch.no_grad():
        want = M.bake(net, state, buffers=buffers)(x)
        baked = M.bake(wrapped, state, buffers=buffers)
        torch.testing.assert_close(baked(x), want)
        assert type(baked) is type(wrapped)
        assert tree_equal(M.params_of(baked), sf.effective(state))
        assert tree_equal(M.params_of(wrapped), M.params_of(net))
        # DistributedDataParallel wants a gradient to reduce
        if name not in PARALLEL and name not in HELD:
            sparse = M.to_sparse(wrapped, state, "csr", buffers=buffers)
            assert (
                sum(
                    isinstance(part, sf.modules.sparse_linear.SparseLinear)
                    for part in sparse.modules()
                )
                == 2
            )
            torch.testing.assert_close(sparse(x), want)
    inner = wrapped.get_submodule(
        own_tensors(wrapped, "parameters")["1.weight"][0].rpartition(".")[0]
    )
    prune.l1_unstructured(inner, "weight", amount=5)
    for checkpoint in (None, wrapped.state_dict()):
        params, masks = M.from_pruned(wrapped, checkpoint)
        assert sorted(params) == sorted(M.params_of(net))
        assert int(masks["1.weight"].sum()) == 11
        assert masks["0.0.weight"].shape == ()
    plain, pruned = made(name)[1].state_dict(), wrapped
    assert sorted(M.from_pruned(pruned, plain)[0]) == sorted(M.params_of(net))


@every
def test_axes_and_weights_are_found_by_the_bare_names(name, group):
    _, wrapped = made(name)
    assert M.check_pattern_axis(wrapped, "0.0.weight", nm(2, 4))
    assert not M.check_pattern_axis(wrapped, "0.0.weight", nm(2, 4, axis=0))
    assert M.pattern_axis(wrapped, "1.weight") == 1
    where = M.weights_of(wrapped, skip=["0.*"])
    assert [
        path for path, leaf in M.params_of(wrapped).items() if where(path, leaf)
    ] == ["1.weight"]


@pytest.mark.deep(but=["checkpointed*"])
@pytest.mark.parametrize("name", RUNS)
def test_call_runs_what_torch_compile_and_checkpointing_wrap(name):
    net, wrapped = made(name)
    state, x, buffers = a_state(net), torch.randn(3, 4), M.buffers_of(net)
    with torch.no_grad():
        torch.testing.assert_close(M.call(wrapped, state, x), M.call(net, state, x))
        wanted = M.call_with_buffers(net.train(), state, buffers, x)
        torch.testing.assert_close(
            M.call_with_buffers(wrapped.train(), state, buffers, x), wanted
        )
        net.eval(), wrapped.eval()
    if "check" in name or name == "both":
        return
    for model in (wrapped, net):
        grads = M.value_and_grad(
            lambda params, model=model: M.call(model, params, x).square().sum()
        )(state.params)
        wanted = torch.func.grad(lambda params: M.call(net, params, x).square().sum())(
            state.params
        )
        torch.testing.assert_close(grads[1], wanted)


@pytest.mark.parametrize("name", [*PARALLEL, *HELD])
def test_call_refuses_data_parallelism(name, group):
    net, wrapped = made(name)
    kind = {"dp": "DataParallel", "ddp": "DistributedDataParallel"}[name.split()[0]]
    place = "'0' in it" if "inside" in name else "it"
    text = (
        "expected a module without data parallelism, as gradients would not be "
        f"reduced over its copies, but {place} is a {kind}: to train it use "
        "sf.distributed.commit(model, state) and sf.distributed.grads_of(model, "
        "state), and to run it without gradients pass its `.module`"
    )
    for broken in (
        lambda: M.call(wrapped, M.params_of(net), torch.ones(2, 4)),
        lambda: M.call_with_buffers(
            wrapped, M.params_of(net), M.buffers_of(net), torch.ones(2, 4)
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            broken()


def test_a_child_that_is_called_like_a_wrappers_is_no_wrapper():
    net = nn.Module()
    net.module, net._orig_mod, net._checkpoint_wrapped_module = (
        nn.Linear(1, 1, bias=False) for _ in range(3)
    )
    net.my_module = nn.ModuleDict({"module": nn.Linear(1, 1, bias=False)})
    names = [name for name, _ in net.named_parameters()]
    assert names == [
        "module.weight",
        "_orig_mod.weight",
        "_checkpoint_wrapped_module.weight",
        "my_module.module.weight",
    ]
    assert list(M.params_of(net)) == names
    assert list(M.params_of(nn.DataParallel(net))) == names
    twice = nn.DataParallel(
        nn.ModuleDict({"module": nn.DataParallel(nn.Linear(1, 1, bias=False))})
    )
    assert list(M.params_of(twice)) == ["module.weight"]


def test_what_is_no_module_is_refused():
    with pytest.raises(
        TypeError,
        match=r"^expected a module first, as in call\(module, state, x\), got dict$",
    ):
        M.params_of({})


NAMES = {
    "module": nn.DataParallel,
    "_orig_mod": compiled,
    "_checkpoint_wrapped_module": checkpoint_wrapper,
}


@pytest.mark.parametrize("child", NAMES)
def test_names_with_a_wrapper_in_them_are_told_with_the_mend(child):
    net = bare()
    wrapped, inner = NAMES[child](net), inside(NAMES[child])(bare())
    added = {f"{child}.{name}": p.detach() for name, p in net.named_parameters()}
    deep = {
        f"0.{child}.{name.removeprefix('0.')}" if name[0] == "0" else name: p.detach()
        for name, p in net.named_parameters()
    }
    told = (
        f"; leave out '{child}.', which a wrapper adds: sf.modules.params_of(module) "
        f"and .{child}.named_parameters() do"
    )
    x = torch.ones(2, 4)
    for module, params in ((wrapped, added), (net, added), (inner, deep), (net, deep)):
        state = sf.dense().init(params)
        for act in (
            lambda module, params, state: M.call(module, params, x),
            lambda module, params, state: M.bake(module, params),
            lambda module, params, state: sf.distributed.commit(module, state),
            lambda module, params, state: sf.distributed.grads_of(module, state),
        ):
            with pytest.raises(ValueError, match=f"{re.escape(told)}$"):
                act(module, params, state)


def test_a_module_that_keeps_its_own_prefix_is_told_with_the_mend():
    average = torch.optim.swa_utils.AveragedModel(bare())
    with pytest.raises(
        ValueError,
        match=r"unknown \[.*\]; pass .module of the module, which has these names$",
    ):
        M.call(average, M.params_of(bare()), torch.ones(2, 4))
    M.call(average.module, M.params_of(bare()), torch.ones(2, 4))


def test_other_unknown_names_and_sequences():
    net = bare()
    with pytest.raises(
        ValueError,
        match="a sequence has no names: write dict\\(module.named_parameters\\(\\)\\)$",
    ):
        M.call(net, [p.detach() for p in net.parameters()], torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"unknown \['wieght'\]$"):
        M.call(nn.Linear(1, 1, bias=False), {"wieght": torch.ones(1, 1)}, torch.ones(1))


def test_parts_have_the_names_of_the_whole():
    model = nn.Sequential(compiled(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    model[1][0].weight = model[0].weight
    named = Named.of(model)
    assert list(named.own) == ["0.weight", "0.bias", "1.0.bias"]
    own = named.parts(["1"])["1"].own
    assert [(name, at) for name, (at, _) in own.items()] == [
        ("0.weight", "0.weight"),
        ("1.0.bias", "0.bias"),
    ]
