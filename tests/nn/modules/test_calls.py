"""Calls with other weights: what is missing, what is dropped, what is refused, and a
module that stays as it was.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import sparsefn as sf
import sparsefn.nn.modules as M
from sparsefn._engine.torch_limits import OLD
from sparsefn.nn.checkpoint import tree_equal


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def normed(**kwargs):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **kwargs))


# ---- frozen parameters ---------------------------------------------------------------


def frozen():
    net = mlp()
    net[0].requires_grad_(False)
    return net


def test_trainable_params_are_those_that_require_a_gradient():
    net = frozen()
    assert list(M.params_of(net, trainable=True)) == ["2.weight", "2.bias"]
    assert list(M.params_of(net)) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert tree_equal(
        M.params_of(net, trainable=True),
        {k: M.params_of(net)[k] for k in ("2.weight", "2.bias")},
    )


def test_what_is_missing_is_read_from_the_module_when_told_so():
    net, x = frozen(), torch.randn(5, 3)
    whole = M.params_of(net)
    algorithm = sf.with_optimizer(
        sf.rigl(0.5, where="2.weight"), sf.optimizers.sgd(0.5)
    )
    state = algorithm.init(M.params_of(net, trainable=True))
    differentiate = M.value_and_grad(
        lambda params: M.call(net, params, x, partial=True).square().mean()
    )
    state = algorithm.update(state, differentiate(sf.effective(state))[1], 0)
    assert list(state.params) == ["2.weight", "2.bias"]
    merged = {**whole, **sf.effective(state)}
    with torch.no_grad():
        want = M.call(net, merged, x)
        assert torch.equal(M.call(net, state, x, partial=True), want)
        assert torch.equal(
            M.call_with_buffers(net, state, {}, x, partial=True)[0], want
        )
        baked = M.bake(net, state, partial=True)
        torch.testing.assert_close(baked(x), want)
        torch.testing.assert_close(
            M.to_sparse(net, state, "csr", partial=True)(x), want
        )
    assert torch.equal(baked[0].weight, net[0].weight)
    assert baked[0].weight.data_ptr() != net[0].weight.data_ptr()
    assert tree_equal(M.params_of(net), whole)


def test_the_modules_own_parameters_are_constants_in_a_partial_call():
    net, x = mlp(), torch.randn(5, 3)
    weights = {"2.weight": net[2].weight.detach().clone().requires_grad_()}
    M.call(net, weights, x, partial=True).square().mean().backward()
    assert weights["2.weight"].grad is not None
    assert all(param.grad is None for param in net.parameters())


def test_partial_still_refuses_what_is_unknown_or_of_another_shape():
    net, x = mlp(), torch.randn(5, 3)
    text = (
        r"expected the parameters of the Sequential, but missing are \[\] and unknown "
        r"\['2.wieght'\]$"
    )
    for broken in (
        lambda: M.call(net, {"2.wieght": torch.ones(2, 4)}, x, partial=True),
        lambda: M.call_with_buffers(
            net, {"2.wieght": torch.ones(2, 4)}, {}, x, partial=True
        ),
        lambda: M.bake(net, {"2.wieght": torch.ones(2, 4)}, partial=True),
    ):
        with pytest.raises(ValueError, match=text):
            broken()
    with pytest.raises(
        ValueError, match=r"expected parameters of shape \(2,\) at '2.bias', got \(3,\)"
    ):
        M.call(net, {"2.bias": torch.ones(3)}, x, partial=True)
    with pytest.raises(
        ValueError,
        match=r"missing are \['0.weight', '0.bias', '2.weight'\] and unknown \[\]",
    ):
        M.call(net, {"2.bias": torch.ones(2)}, x)


# ---- what is given in the wrong place ------------------------------------------------


def test_arguments_in_the_wrong_places_are_named():
    net, x = mlp(), torch.randn(5, 3)
    state = sf.dense().init(M.params_of(net))
    module_first = r"^expected a module first, as in call\(module, state, x\), got {}$"
    with pytest.raises(TypeError, match=module_first.format("State")):
        M.call(state, net)
    with pytest.raises(TypeError, match=module_first.format("dict")):
        M.call_with_buffers(state.params, net, {}, x)
    with pytest.raises(TypeError, match=module_first.format("State")):
        M.bake(state, net)
    wanted = r"^expected the parameters as a State or a tree of tensors, got {}$"
    with pytest.raises(TypeError, match=wanted.format("str")):
        M.call(net, "x")
    with pytest.raises(TypeError, match=wanted.format("Tensor")):
        M.call(net, x)
    with pytest.raises(TypeError, match=wanted.format("float at '0.weight'")):
        M.bake(net, {"0.weight": 1.0})
    with pytest.raises(ValueError, match="missing are .*'0.weight'"):
        M.call(net, None, x)
    with pytest.raises(
        TypeError, match=r"^expected the buffers as a dict of tensors, got Tensor$"
    ):
        M.call_with_buffers(net, state, x)


# ---- buffers -------------------------------------------------------------------------

DROPPING = {
    "batch norm": (normed, (5, 3), "'1.num_batches_tracked'"),
    "instance norm": (
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        (5, 3, 4),
        "'running_mean', ",
    ),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
        (5, 3),
        "'parametrizations.weight.0._u",
    ),
    "old spectral norm": (
        lambda: spectral_norm(nn.Linear(3, 2)),
        (5, 3),
        "'weight_u', 'weight_v'",
    ),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_call_in_train_mode_warns_of_changes_to_buffers_that_it_drops(name):
    make, shape, names = DROPPING[name]
    module, x = make().train(), torch.randn(shape)
    params, buffers = M.params_of(module), M.buffers_of(module)
    text = (
        f"the forward changed buffers, {names}.*sf.modules.call drops the changes: "
        "use sf.modules.call_with_buffers"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        M.call(module, params, x)
    assert caught[0].filename == __file__  # the line that calls
    with pytest.warns(UserWarning, match=text):
        torch.func.grad(
            lambda params: M.call(module, params, x, buffers=buffers).square().sum()
        )(params)
    # A forward that loses no buffer does not warn: warnings are errors here.
    M.call_with_buffers(module, params, buffers, x)
    M.call(module.eval(), params, x)
    assert tree_equal(M.buffers_of(module), buffers)


@pytest.mark.parametrize("kwargs", [{"track_running_stats": False}, {}])
def test_a_call_does_not_warn_where_no_buffer_changes(kwargs):
    module, x = normed(**kwargs).train(), torch.randn(5, 3)
    if not kwargs:
        module[1].eval()
    M.call(module, M.params_of(module), x)


def test_a_call_warns_once_a_line_and_not_where_values_cannot_be_compared():
    module, x = normed().train(), torch.randn(5, 3)
    params = M.params_of(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            M.call(module, params, x)
    assert len(caught) == 1
    torch.compile(lambda x: M.call(module, params, x), backend="eager", fullgraph=True)(
        x
    )
    with torch.inference_mode():
        M.call(module, params, x)


def test_bake_takes_the_buffers_that_a_run_left():
    module, x = normed().train(), torch.randn(50, 3)
    params, first = M.params_of(module), M.buffers_of(module)
    _, buffers = M.call_with_buffers(module, params, first, x)
    baked = M.bake(module, params, buffers=buffers)
    assert tree_equal(M.buffers_of(baked), buffers)
    assert tree_equal(M.buffers_of(module), first)
    assert tree_equal(M.buffers_of(M.bake(module, params)), first)
    with torch.no_grad():
        want = M.call(module.eval(), params, x, buffers=buffers)
        torch.testing.assert_close(baked.eval()(x), want)
        state = sf.State(params, {path: torch.tensor(True) for path in params})
        torch.testing.assert_close(M.to_sparse(module, state, buffers=buffers)(x), want)
    baked[1].running_mean.zero_()
    assert buffers["1.running_mean"].any()
    with pytest.raises(
        ValueError,
        match=r"expected the buffers of the Sequential, .* unknown \['mean'\]",
    ):
        M.bake(module, params, buffers={**buffers, "mean": torch.ones(1)})
    with pytest.raises(
        ValueError,
        match=r"expected buffers of shape \(4,\) at '1.running_var', got \(2,\)",
    ):
        M.bake(module, params, buffers={**buffers, "1.running_var": torch.ones(2)})


# ---- the module stays as it was ------------------------------------------------------


class Writing(nn.Module):
    """Sets, replaces and deletes attributes as it runs."""

    def __init__(self):
        super().__init__()
        self.lin, self.calls, self.last, self.first = nn.Linear(3, 2), 0, None, True

    def forward(self, x):
        self.calls += 1
        self.last = self.lin(x)
        self.new = self.last * 2
        if hasattr(self, "first"):
            del self.first
        return self.new


def hooked():
    layer = nn.Linear(3, 2)
    layer.register_forward_pre_hook(lambda layer, args: setattr(layer, "seen", args[0]))
    return nn.Sequential(layer)


WRITERS = {
    "weight_norm": lambda: weight_norm(nn.Linear(3, 2)),
    "weight_norm inside": lambda: nn.Sequential(
        nn.Tanh(), weight_norm(nn.Linear(3, 2), dim=1)
    ),
    "spectral_norm": lambda: spectral_norm(nn.Linear(3, 2)),
    "forward": Writing,
    "hook": hooked,
}


def attributes(module):
    return [
        {
            **vars(part),
            **{
                kind: dict(getattr(part, kind))
                for kind in ("_parameters", "_buffers", "_modules")
            },
        }
        for part in module.modules()
    ]


@pytest.mark.deep(but=["*-call", "*-grad", "*-raises"])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.filterwarnings("ignore:the forward changed buffers:UserWarning")
# torch's compiler hides it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("how", ["call", "grad", "compile", "raises"])
@pytest.mark.parametrize("name", WRITERS)
def test_the_module_is_as_it_was_after_a_call(name, how):
    if (name, how) == ("forward", "compile"):
        return  # compiled code keeps what a forward sets
    if OLD and how == "compile":
        pytest.skip("the compiler of torch 2.11 refuses modules with hooks")
    module, x = WRITERS[name](), torch.randn(4, 3)
    params = {path: p + 1 for path, p in M.params_of(module).items()}
    tensors = [
        value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, torch.Tensor)
    ]
    before, values = (
        attributes(module),
        [tensor.clone() for tensor in [*tensors, *module.buffers()]],
    )
    if how == "call":
        out = M.call(module, params, x)
        module(x)  # which writes, with the module's own weights
        if name == "weight_norm":
            assert not torch.equal(module(x), out)
        return_to = attributes(module)
        assert torch.equal(M.call(module, params, x), out) or "spectral" in name
        before = return_to
    elif how == "grad":
        torch.func.grad(lambda params: M.call(module, params, x).sum())(params)
    elif how == "compile":
        torch.compile(
            lambda params, x: M.call(module, params, x), backend="eager", fullgraph=True
        )(params, x)
    else:
        with pytest.raises(RuntimeError):
            M.call(module, params, torch.zeros(4, 7))
    after = attributes(module)
    assert [list(part) for part in after] == [list(part) for part in before]
    for new, old in zip(after, before, strict=True):
        for key in old:
            assert new[key] is old[key] or (
                isinstance(old[key], dict) and new[key] == old[key]
            ), key
    if how != "call":
        assert tree_equal([*tensors, *module.buffers()], values)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_bake_of_a_module_whose_hook_has_computed_a_tensor():
    module, x = weight_norm(nn.Linear(3, 2)), torch.randn(4, 3)
    params = {path: p + 1 for path, p in M.params_of(module).items()}
    with torch.no_grad():
        baked = M.bake(module, params)
        assert torch.equal(baked(x), M.call(module, params, x))
        assert not torch.equal(baked(x), module(x))


# ---- checkpointing -------------------------------------------------------------------


class Checkpointing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(
            checkpoint(
                lambda x: torch.tanh(self.body(x)).square(), x, use_reentrant=False
            )
        )


def test_activation_checkpointing_is_refused_where_it_recomputes_with_other_weights():
    net, x = Checkpointing(), torch.randn(4, 3)
    params = {path: p + 1 for path, p in M.params_of(net).items()}
    text = (
        "^sf.modules.call cannot run a forward with activation checkpointing, or "
        "other hooks on saved tensors, as it would run again in the backward with the "
        "module's own weights: turn it off, or call under torch.no_grad\\(\\)$"
    )

    def loss(params):
        return M.call(net, params, x).square().mean()

    for differentiate in (M.value_and_grad(loss), torch.func.grad(loss), loss):
        with pytest.raises(RuntimeError, match=text):
            differentiate(params)
    with torch.no_grad():
        torch.testing.assert_close(M.call(net, params, x), M.bake(net, params)(x))
    net(x).sum().backward()  # the module's own runs are free of it afterwards
    assert net.body.weight.grad is not None


def test_hooks_on_saved_tensors_around_a_call_work():
    net, x, saved = mlp(), torch.randn(4, 3), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(1) or t, lambda t: t
    ):
        grads = M.value_and_grad(lambda params: M.call(net, params, x).square().mean())(
            M.params_of(net)
        )[1]
    assert saved
    assert tree_equal(
        grads,
        M.value_and_grad(lambda p: M.call(net, p, x).square().mean())(M.params_of(net))[
            1
        ],
    )


def test_a_module_under_two_names_keeps_its_own_parameters_and_buffers():
    norm = torch.nn.BatchNorm1d(2).eval()
    net = torch.nn.Sequential(norm, torch.nn.ReLU(), norm)
    before = [*net.parameters(), *net.buffers()]
    sf.modules.call(net, sf.dense().init(sf.modules.params_of(net)), torch.ones(3, 2))
    assert [id(x) for x in (*net.parameters(), *net.buffers())] == [
        id(x) for x in before
    ]


# ---- weights that a forward writes ---------------------------------------------------


class Limited(nn.Module):
    """An embedding with max_norm, and a product with its table where the two are
    tied.
    """

    def __init__(self, tied: bool = False, bag: bool = False) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.table, self.head = kind(6, 4, max_norm=0.5), nn.Linear(4, 6)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x))


LIMITED = {
    "embedding": Limited,
    "bag": lambda: Limited(bag=True),
    "tied": lambda: Limited(tied=True),
}


@pytest.mark.parametrize("name", LIMITED)
def test_a_table_with_max_norm_stays_as_it_was_and_rows_are_those_of_the_module(name):
    torch.manual_seed(0)
    module, x = LIMITED[name]().eval(), torch.tensor([[0, 1], [5, 1]])
    params, own = M.params_of(module), M.params_of(module)
    state = sf.dense().init(params)
    out, of_state = M.call(module, params, x), M.call(module, state, x)
    of_own = M.call(module, {}, x, partial=True)
    gradient = torch.func.grad(lambda params: M.call(module, params, x).square().sum())(
        params
    )
    members = torch.vmap(lambda params: M.call(module, params, x))
    with warnings.catch_warnings(action="ignore"):  # torch has no fast way for this
        stacked = members(sf.ensemble.stack([params] * 2))
    assert (
        tree_equal(params, own)
        and tree_equal(state.params, own)
        and tree_equal(M.params_of(module), own)
    )
    module(x).square().sum().backward()  # which scales rows of the module's own table
    assert not torch.equal(module.table.weight, own["table.weight"])
    for got in (out, of_state, of_own, stacked[0], stacked[1]):
        torch.testing.assert_close(got, module(x))
    torch.testing.assert_close(gradient["table.weight"], module.table.weight.grad)


def test_rows_that_are_scaled_in_training_are_told_as_the_change_is_dropped():
    module, x = Limited().train(), torch.tensor([0, 1])
    params = M.params_of(module)
    text = (
        "scaled rows of 'table.weight' down to max_norm, and sf.modules.call drops "
        "that: .* torch.renorm"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        M.call(module, params, x)
    assert caught[0].filename == __file__
    M.call(module.eval(), params, x)
    module.train().table.eval()
    params["table.weight"] = torch.renorm(params["table.weight"], 2, 0, 0.5)
    with pytest.warns(UserWarning, match=text):
        out = M.call(module, params, x)
    torch.testing.assert_close(
        out,
        torch.nn.functional.linear(
            params["table.weight"][x], *M.params_of(module.head).values()
        ),
    )


def test_under_vmap_over_inputs_a_table_with_max_norm_is_refused_by_name():
    module, x = Limited().eval(), torch.arange(6).reshape(2, 3)
    params = M.params_of(module)
    with pytest.raises(
        RuntimeError,
        match="under vmap over inputs, a table with max_norm needs a copy for each "
        "member",
    ):
        torch.vmap(lambda x: M.call(module, params, x))(x)


class Written(nn.Module):
    """Writes into its weight in one of several ways, and multiplies by it."""

    def __init__(self, write) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(3, 3), write

    def forward(self, x):
        self.write(self.layer)
        return self.layer(x)


def centred(layer):
    with torch.no_grad():
        layer.weight.sub_(1.0)


def limited(layer):  # as models of EEG signals do
    layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.01)


def assigned(layer):
    with torch.no_grad():
        layer.weight -= (
            1.0  # which torch refuses in a functional call, when it has written
        )


def looked_up(layer):
    torch.nn.functional.embedding(torch.arange(3), layer.weight, max_norm=0.01)


@pytest.mark.parametrize("write", [centred, limited, assigned, looked_up])
def test_a_forward_that_writes_into_another_parameter_is_refused_by_name(write):
    module, x = Written(write), torch.ones(2, 3)
    with pytest.raises(
        RuntimeError,
        match=r"the forward of the Written wrote into 'layer.weight', which changed "
        r"the",
    ):
        M.call(module, M.params_of(module), x)
    with pytest.raises(RuntimeError, match=r"wrote into 'layer.weight'|\.data"):
        torch.func.grad(lambda params: M.call(module, params, x).sum())(
            M.params_of(module)
        )


def test_codebooks_that_are_buffers_may_be_written():
    # its codes follow the data, as those of vector quantization
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.ones(2, 3))
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            with torch.no_grad():
                self.codes.data.mul_(0.5).add_(x.mean(0), alpha=0.5)
            return self.layer(x) + self.codes[0]

    module, x = Codebook(), torch.zeros(4, 3)
    params, before = M.params_of(module), M.buffers_of(module)
    _, after = M.call_with_buffers(module, params, before, x)
    assert torch.equal(after["codes"], torch.full((2, 3), 0.5))
    assert torch.equal(module.codes, torch.ones(2, 3)) and torch.equal(
        before["codes"], torch.ones(2, 3)
    )
