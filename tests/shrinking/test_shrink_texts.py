"""Smaller models: what stays is named with its reason; bad input and misuse are
refused, or right.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import sparsefn as sf
from tests.shrinking.small import Of
from tests.shrinking.test_shrink import X, checked, mlp, pruned, seeded, shapes  # noqa: F401

pytestmark = pytest.mark.filterwarnings(
    "ignore:shrink could not remove all:UserWarning"
)


def stayed(net, state, *xs):
    return list(sf.shrinking.smaller(net, state, xs).stays)


def lin(fn, **parts):
    return Of(fn, a=nn.Linear(3, 4), b=nn.Linear(4, 2), **parts).eval()


SUMS = "sums over it, and it is not 0 where it is masked"
STAYS = {
    "outputs": (
        lambda: mlp(),
        {"p4__weight": [1]},
        "'4.weight' keeps 1 of 1 pruned slices of dimension 0: it is an output of the "
        "model",
    ),
    "inputs": (
        lambda: mlp(),
        {"p0__weight/1": [1, 2]},
        "'0.weight' keeps 2 of 2 pruned slices of dimension 1: joined with what stays "
        "by linear at '0'",
    ),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)),
        {"p0__weight": [0, 1]},
        f"'0.weight' keeps 2 of 2 pruned slices of dimension 0: linear at '1' {SUMS}",
    ),
    "another branch": (
        lambda: lin(lambda net, x: net.b(net.a(x) + net.c(x)), c=nn.Linear(3, 4)),
        {"a__weight": [1]},
        f"'a.weight' keeps 1 of 1 pruned slices of dimension 0: linear at 'b' {SUMS}",
    ),
    "softmax": (
        lambda: lin(lambda net, x: net.b(net.a(x).softmax(1))),
        {"a__weight": [1], "a__bias": [1]},
        "'a.weight' keeps 1 of 1 pruned slices of dimension 0: softmax mixes its "
        "entries",
    ),
    "all units": (
        lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2)),
        {"p0__weight": [0, 1, 2, 3]},
        "'0.weight' keeps 1 of 4 pruned slices of dimension 0: one always stays",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_is_named_with_its_reason(name):
    build, gone, line = STAYS[name]
    net = build().eval()
    state = pruned(net, **gone)
    assert line in stayed(net, state, X)
    with pytest.warns(
        UserWarning, match="shrink could not remove all that is pruned:\n  '"
    ):
        sf.shrink(net, state, X)


def test_nothing_is_said_where_all_went_or_nothing_was_pruned():
    net = mlp()
    assert (
        stayed(net, pruned(net, p0__weight=[0], p2__weight=[1, 2]), X)
        == stayed(net, pruned(net), X)
        == []
    )
    net = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False))
    )
    (line,) = sf.shrinking.smaller(
        net.eval(), pruned(net, p1__0__weight=[0]), X, only="1"
    ).stays
    assert (
        line
        == "in '1': '0.weight' keeps 1 of 1 pruned slices of dimension 0: linear at "
        f"'1' {SUMS}"
    )


def test_a_state_is_expected():
    with pytest.raises(TypeError) as error:
        sf.shrink(mlp(), sf.modules.params_of(mlp()), X)
    assert str(error.value) == (
        "expected a State, got dict; of zeros in params make one by sf.State(params, "
        "sf.masks.from_zeros(params))"
    )


def refused(text, net=None, example=X, state=None, error=ValueError, **options):
    net = mlp() if net is None else net
    with pytest.raises(error) as raised:
        sf.shrink(net, pruned(net) if state is None else state, example, **options)
    assert text in str(raised.value)


def test_bad_arguments():
    refused("shrink: expected form None, 'class' or 'program', got 'onnx'", form="onnx")
    globs = "expected only to be globs of submodules such as 'layers.*.mlp', got"
    refused(
        f"{globs} channel(axis=0, norm=1); which units go is what the masks say",
        only=sf.patterns.channel(0),
        error=TypeError,
    )
    refused(f"{globs} [3]", only=[3], error=TypeError)
    refused(f"{globs} none", only=[])
    refused(
        "only: no path matches '7'; the paths are '0', '1', '2', '3', '4'", only="7"
    )


def test_groups_of_others():
    net = mlp()
    groups = sf.shrinking.groups(net, X)
    text = (
        "expected the groups of an example of these shapes, (('float32 (2, 3)',), "
        "{}), got groups of (('float32 (4, 3)',), {}): make them of the example that "
        "shrink gets"
    )
    refused(text, net, groups=sf.shrinking.groups(net, torch.ones(4, 3)))
    text = (
        "expected the groups of this model, whose '0.weight' is float32 (6, 3) on "
        "cpu, got groups of a model where it is float32 (5, 3) on cpu: make them of "
        "the model as it is"
    )
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).eval()
    refused(text, net, groups=sf.shrinking.groups(other, X))
    refused(
        "whose '2.weight' is no such tensor, got",
        nn.Sequential(nn.Linear(3, 6)).eval(),
        groups=groups,
    )
    refused(
        "expected groups of the whole module, without only=, got",
        net,
        groups=groups,
        only="0",
    )
    refused(
        "expected groups of the whole",
        net,
        groups=sf.shrinking.groups(net, X, only="0"),
    )
    text = "shrink: expected groups as sf.shrinking.groups makes them, got TiedPattern"
    refused(text, net, groups=groups.pattern(), error=TypeError)
    dropped = nn.Sequential(*net, nn.Dropout(0.5)).eval()
    groups = sf.shrinking.groups(dropped, X)
    refused("expected a model in eval mode", dropped.train(), groups=groups)


def test_states_of_other_models():
    other = nn.Linear(3, 2)
    refused(
        "expected the parameters of the Sequential, but missing are ['0.weight'",
        state=pruned(other),
    )
    wider = nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    refused(
        "expected parameters of shape (6, 3) at '0.weight', got (5, 3)",
        state=pruned(wider),
    )
    state = pruned(mlp())
    more = state._replace(
        params={**state.params, "w": X}, masks={**state.masks, "w": torch.tensor(True)}
    )
    refused(
        "expected the parameters of the Sequential, but missing are [] and unknown "
        "['w']",
        state=more,
    )


@pytest.mark.filterwarnings("ignore")
def test_examples_that_do_not_run():
    refused(
        "expected an example that the Sequential can be called with: it fails with "
        "RuntimeError: mat1",
        example=X.T,
    )
    refused("arguments, got list", example=[X], error=TypeError)
    text = "'0.weight' is on the meta device: load the weights of the model first"
    refused(text, net=mlp().to("meta"), example=X)


def test_models_in_train_mode():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
    refused(
        "expected a model in eval mode, as model.eval() sets it: in train mode the "
        "Dropout at '1' computes",
        net,
    )
    refused(
        "in train mode the BatchNorm1d at '1' computes otherwise",
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
    )
    checked(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU()),
        pruned(nn.Sequential(nn.Linear(3, 4), nn.ReLU())),
        X,
    )


def test_units_that_draw_numbers_are_refused_and_others_go():
    net = Of(
        lambda net, x: net.b(F.dropout(net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2)
    ).eval()
    refused(
        "gives another output than the masked one",
        net,
        state=pruned(net, a__weight=[0], a__bias=[0]),
    )
    net = lin(lambda net, x: net.b(net.a(x)) + torch.rand(2))
    rng = torch.get_rng_state()
    assert shapes(sf.shrink(net, pruned(net, a__weight=[0]), X)) == [(3, 3), (2, 3)]
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore")
def test_models_that_cannot_be_followed():
    net = lin(lambda net, x: net.b(net.a(x)) if x.sum() > 0 else net.b(net.a(-x)))
    refused("torch.export cannot follow the Of: ", net)
    refused(
        "to return floating-point tensors on the example",
        lin(lambda net, x: net.b(net.a(x)).argmax(1)),
    )


def test_a_forward_that_computes_with_sizes_becomes_a_program():
    net = lin(lambda net, x: net.b(net.a(x)) / net.a.out_features)
    state = pruned(net, a__weight=[0])
    assert shapes(checked(net, state, X)) == [(3, 3), (2, 3)]
    made = sf.shrinking.smaller(net, state, X)
    assert made.form == "program" and made.notes == ("the Of gives other outputs",)
    refused(
        "shrink: no smaller Of has the outputs of the masked one: the Of gives other",
        net,
        state=state,
        form="class",
    )


@pytest.mark.parametrize("form", ["class", "program"])
def test_shrinking_goes_on_from_a_smaller_model(form):
    small = checked(net := mlp(), pruned(net, p0__weight=[0, 1]), X, form=form)
    assert shapes(checked(small, pruned(small, p2__weight=[0]), X, form=form)) == [
        (4, 3),
        (3, 4),
        (2, 3),
    ]
    refused(
        "expected parameters of shape (4, 3) at '0.weight', got (6, 3)",
        small,
        state=pruned(net),
    )


HOOKS = {
    "after": lambda net: net[2].register_forward_hook(
        lambda module, args, out: out + 1
    ),
    "before": lambda net: net[2].register_forward_pre_hook(
        lambda module, args: (args[0] + 1,)
    ),
    "around": lambda net: net.register_forward_hook(lambda module, args, out: 2 * out),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_followed(name):
    HOOKS[name](net := mlp())
    assert shapes(checked(net, pruned(net, p0__weight=[0], p2__weight=[1]), X)) == [
        (5, 3),
        (3, 5),
        (2, 3),
    ]


def test_a_hook_that_knows_the_size():
    net = mlp()
    net[2].register_forward_hook(lambda module, args, out: out * torch.arange(4.0))
    assert shapes(checked(net, pruned(net, p0__weight=[0]), X)) == [
        (5, 3),
        (4, 5),
        (2, 4),
    ]
    line = (
        "'2.weight' keeps 1 of 1 pruned slices of dimension 0: joined with what stays "
        "by mul at '2'"
    )
    assert stayed(net, pruned(net, p2__weight=[1]), X) == [line]


def test_wrapped_models():
    net = mlp()
    state = pruned(net, p0__weight=[0])
    for wrap in (nn.DataParallel, lambda net: torch.compile(net, backend="eager")):
        small = sf.shrink(wrap(net), state, X)
        torch.testing.assert_close(
            small(X), sf.modules.call(net, state, X), atol=1e-6, rtol=1e-6
        )
        assert shapes(small) == [(5, 3), (4, 5), (2, 4)]


def test_parametrizations_and_pruned_modules_of_torch():
    net = mlp()
    parametrizations.weight_norm(net[2])
    checked(net, pruned(net, p0__weight=[0]), X)
    made = copy.deepcopy(net := mlp())
    prune.ln_structured(made[0], "weight", amount=2, n=2, dim=0)
    assert shapes(checked(net, sf.State(*sf.modules.from_pruned(made)), X))[0] == (4, 3)


def test_shared_weights_and_modules_called_twice():
    layer = nn.Linear(4, 4)
    shared = nn.Sequential(
        nn.Linear(3, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)
    ).eval()
    shared[3].weight = shared[1].weight
    twice = nn.Sequential(
        nn.Linear(3, 4), layer, nn.Tanh(), layer, nn.Linear(4, 2)
    ).eval()
    for net in (shared, twice):
        groups = sf.shrinking.groups(net, X)
        masks = groups.masks({0: [1]})
        assert list(masks) == list(sf.modules.params_of(net))
        small = checked(net, sf.State(sf.modules.params_of(net), masks), X)
        assert small[3].weight is small[1].weight and small[1].weight.shape == (3, 3)
        # Rows alone: what reads them elsewhere holds them.
        assert shapes(checked(net, pruned(net, p1__weight=[1]), X))[1] == (4, 4)


def test_groups_of_before_serve_a_state_after_training():
    net = mlp()
    groups = sf.shrinking.groups(net, X)
    algorithm, params = (
        sf.one_shot(0.5, pattern=groups.pattern()),
        sf.modules.params_of(net),
    )
    state = algorithm.update(algorithm.init(params), params, 0)
    state = state._replace(
        params={name: p + 0.1 * torch.randn_like(p) for name, p in params.items()}
    )
    assert [kept.sum().item() for kept in groups.alive(state.masks)] == [3, 2]
    assert shapes(checked(net, state, X)) == [(3, 3), (2, 3), (2, 2)]
