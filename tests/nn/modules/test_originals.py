"""The law of computed weights: what `summary` says is what the layers of a module
multiply with.
"""

import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization

import sparsefn as sf
from sparsefn.nn.modules.originals import computed_from

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


class Exp(nn.Module):
    def forward(self, original):
        return original.exp()


class Rounded(nn.Module):
    """Zeros stay zeros, which nobody can tell from outside."""

    def forward(self, original):
        return original + ((original * 64).round() / 64 - original).detach()


class Adapter(nn.Module):
    """LoRA as a parametrization."""

    def __init__(self, out, into, rank=2):
        super().__init__()
        self.lora_A, self.lora_B = (
            nn.Parameter(torch.randn(rank, into)),
            nn.Parameter(torch.randn(out, rank)),
        )

    def forward(self, original):
        return original + self.lora_B @ self.lora_A


def adapted(layer):
    layer.weight.requires_grad_(False)
    return parametrized(layer, Adapter(*layer.weight.shape))


def parametrized(layer, part):
    register_parametrization(layer, "weight", part)
    return layer


def dropped_out(layer):
    """A hook of one's own, as in AWD-LSTM: the parameter is `weight_raw`."""
    raw = nn.Parameter(layer.weight.detach())
    del layer.weight
    layer.register_parameter("weight_raw", raw)
    layer.weight = nn.functional.dropout(raw, 0.5)
    layer.register_forward_pre_hook(
        lambda part, args: setattr(
            part, "weight", nn.functional.dropout(part.weight_raw, 0.5)
        )
    )
    return layer


REMOVE = (
    "torch.nn.utils.parametrize.remove_parametrizations(model.get_submodule('0'), "
    "'weight')"
)
KINDS = {  # what computes the weight, and what the texts tell to call
    "plain": (lambda layer: layer, None),
    "weight norm": (parametrizations.weight_norm, REMOVE),
    "spectral norm": (parametrizations.spectral_norm, REMOVE),
    "orthogonal": (parametrizations.orthogonal, REMOVE),
    "elementwise": (lambda layer: parametrized(layer, Exp()), REMOVE),
    "keeps zeros": (lambda layer: parametrized(layer, Rounded()), REMOVE),
    "low rank": (adapted, REMOVE),
    "two": (
        lambda layer: parametrized(parametrizations.weight_norm(layer), Rounded()),
        REMOVE,
    ),
    "old weight norm": (
        nn.utils.weight_norm,
        "torch.nn.utils.remove_weight_norm(model.get_submodule('0'), 'weight')",
    ),
    "old spectral norm": (
        nn.utils.spectral_norm,
        "torch.nn.utils.remove_spectral_norm(model.get_submodule('0'), 'weight')",
    ),
    "pruned": (
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        "torch.nn.utils.prune.remove(model.get_submodule('0'), 'weight')",
    ),
    "hook": (dropped_out, "the call that takes its hook away"),
}
EVERY = sf.every(2)
ALGORITHMS = {
    "static": lambda where: sf.static(0.8, where=where),
    "rigl": lambda where: sf.rigl(0.8, when=EVERY, where=where),
    "set": lambda where: sf.set(0.8, when=EVERY, where=where),
    "gmp": lambda where: sf.gmp(
        sf.schedules.polynomial(0.0, 0.8, begin=0, end=6), when=EVERY, where=where
    ),
    "ste": lambda where: sf.ste(0.8, where=where),
    "supermask": lambda where: sf.supermask(0.8, where=where),
    "power": lambda where: sf.reparametrised(
        sf.reparam.power(2.0), sf.static(0.8, where=where), where=where
    ),
    "rows": lambda where: sf.static(0.5, pattern=sf.patterns.channel(0), where=where),
}
WHERES = {
    "default": lambda model: sf.default_where,
    "matrices": lambda model: lambda path, leaf: leaf.ndim == 2,
    "by type": sf.modules.weights_of,
    "the first": lambda model: "0.*weight*",
}


def network(kinds):
    torch.manual_seed(0)
    sizes = [(16, 24), (24, 8)]
    layers = [
        KINDS[kind][0](nn.Linear(*size))
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    return nn.Sequential(*layers)


def multiplied(model):
    """The weights that the layers of a model multiply with in one call."""
    seen = []
    linear = nn.functional.linear

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is linear:
                seen.append(args[1].detach().clone())
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        model(torch.randn(3, 16))
    return seen


def check_agrees(state, weights, moved):
    """What a summary says of a state holds of the weights that the layers multiply
    with; those that grew may be 0.
    """
    summary = sf.report.summary(state)
    masked = {row.path: row for row in summary.rows if row.path not in summary.dense}
    assert set(masked) <= {"0.weight", "1.weight"}
    for path, row in masked.items():
        weight, mask = weights[int(path[0])], state.masks[path]
        assert weight.shape == mask.shape
        assert not weight[~mask].any()
        assert bool(weight.isfinite().all())
        kept = int(weight.count_nonzero())
        assert kept <= row.kept if moved else kept == row.kept


def trained(model, algorithm, optimizer=torch.optim.Adam, steps=7):
    sparse = sf.attach(
        algorithm,
        model,
        optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2),
    )
    for step in range(steps):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        sparse.before_step()
        [one] = {
            id(r.optimizer): r.optimizer for r in sparse._module_state.records
        }.values()
        one.step()
        one.zero_grad()
        sparse.after_step(step)
    return sparse


@pytest.mark.deep
@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.sampled_from([*KINDS]), st.sampled_from([*KINDS])),
    st.sampled_from([*ALGORITHMS]),
    st.sampled_from([*WHERES]),
)
def test_a_summary_says_what_the_layers_multiply_with(kinds, name, where):
    model = network(kinds)
    before = {path: p.detach().clone() for path, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            algorithm = ALGORITHMS[name](WHERES[where](model))
            state = algorithm.init(sf.modules.params_of(model))
            baked = sf.modules.bake(model, state)
            sf.modules.call(model, state, torch.randn(3, 16))
            sparse = trained(model, algorithm)
        except ValueError as error:
            assert kinds != ("plain", "plain")
            assert "is computed" in str(error) or "'0.*'" in str(error)
            assert sf.checkpoint.tree_equal(dict(model.named_parameters()), before)
            return
    check_agrees(state, multiplied(baked), moved=False)
    check_agrees(sparse.in_module(), multiplied(model), moved=True)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "plain"])
def test_every_consumer_names_the_tensor_and_the_mend(name):
    make, call = KINDS[name]
    torch.manual_seed(0)
    model = nn.Sequential(make(nn.Linear(6, 8)), nn.Linear(8, 3)).eval()
    params = sf.modules.params_of(model)
    path = next(
        path
        for path, leaf in params.items()
        if leaf.ndim == 2 and path.startswith("0.")
    )
    assert computed_from(model, path) == ("0.weight", call)
    assert computed_from(model, "0.bias") is computed_from(model, "1.weight") is None
    masks = {name: torch.tensor(True) for name in params}
    masks[path] = torch.rand(params[path].shape) < 0.5
    state, x = sf.State(params, masks), torch.randn(2, 6)
    text = re.escape(
        f"{path!r} is no weight: '0.weight' is computed from it, and zeros in it need "
        "not be zeros in '0.weight'. Make '0.weight' a parameter, before the "
        f"optimizer is made, with {call}, or leave {path!r} out of `where`"
    )
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1
    )
    before = {path: p.detach().clone() for path, p in model.named_parameters()}
    consumers = {
        "call": lambda: sf.modules.call(model, state, x),
        "call_with_buffers": lambda: sf.modules.call_with_buffers(
            model, state, sf.modules.buffers_of(model), x
        ),
        "bake": lambda: sf.modules.bake(model, state),
        "to_sparse": lambda: sf.modules.to_sparse(model, state),
        "commit": lambda: sf.distributed.commit(model, state),
        "inputs": lambda: sf.calibration.inputs(model, state, x),
        "in_order": lambda: sf.calibration.in_order(
            model, state, ["1.*"], lambda stats: sf.dense(), x
        ),
        "shrink": lambda: sf.shrink(model, state, x),
    }
    for consumer, run in consumers.items():
        with pytest.raises(ValueError, match=text):
            run()
            pytest.fail(consumer)
    if model.get_parameter(path).requires_grad:
        with pytest.raises(
            ValueError, match=f"{path!r} is no weight: '0.weight' is computed from it"
        ):
            sf.attach(sf.static(0.5, where=path), model, optimizer)
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"'0.weight' is computed from it: make it a parameter with {call}"
        ),
    ):
        sf.calibration.inputs(model, None, x, paths=path)
    assert sf.checkpoint.tree_equal(dict(model.named_parameters()), before)


@pytest.mark.parametrize(
    "name", ["weight norm", "spectral norm", "old spectral norm", "pruned"]
)
def test_the_mend_mends(name):
    model = network([name, "plain"])
    x = torch.randn(3, 16)
    model.eval()
    wanted = model(x)
    exec(KINDS[name][1], {"torch": torch, "model": model})
    torch.testing.assert_close(model(x), wanted)
    sparse = trained(model, sf.rigl(0.8, when=EVERY))
    assert sf.report.summary(sparse).sparsified.sparsity == pytest.approx(0.8, abs=0.01)
    check_agrees(sparse.in_module(), multiplied(model), moved=True)


def test_rows_without_an_entry_do_not_make_nan():
    """A direction without an entry has no norm: 0 / 0."""
    model = parametrizations.weight_norm(nn.Linear(16, 64))
    with pytest.warns(UserWarning, match="'weight' is computed, so it stays dense"):
        sparse = trained(model, sf.rigl(0.8, when=EVERY), steps=12)
    assert bool(model.weight.isfinite().all())
    assert sf.report.summary(sparse).sparsified.total == 0


@pytest.mark.parametrize(
    "name",
    ["weight norm", "spectral norm", "old weight norm", "old spectral norm", "pruned"],
)
def test_a_weight_that_is_computed_since_attach_is_told(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    sparse = sf.attach(
        sf.static(0.5), model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    KINDS[name][0](model[0])
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(
        RuntimeError,
        match="'0.weight', or a layer that holds it, was replaced since attach: call "
        "detach",
    ):
        sparse.before_step()


def test_groups_leave_computed_weights_whole():
    torch.manual_seed(0)
    x = torch.randn(2, 6)
    normed = parametrizations.spectral_norm(nn.Linear(8, 5))
    layers = [
        nn.Linear(6, 8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.ReLU(),
        normed,
        nn.ReLU(),
        nn.Linear(5, 2),
    ]
    made = nn.Sequential(*layers).eval()
    groups = sf.shrinking.groups(made, x)
    dims = {(member.leaf, member.dim) for group in groups for member in group.members}
    assert dims == {("0.weight", 0), ("0.bias", 0), ("2.weight", 1)}
    assert "'4.weight' is computed, so it stays dense" in groups.stays["6.weight", 1]
    state = sf.State(sf.modules.params_of(made), groups.masks({0: [1, 2]}))
    assert not any(
        mask.ndim for path, mask in state.masks.items() if "parametrizations" in path
    )
    small = sf.shrink(made, state, x)
    torch.testing.assert_close(small(x), sf.modules.call(made, state, x))
    halved = sf.static(0.5, pattern=groups.pattern(), where="*.weight").init(
        state.params
    )
    half = sf.shrink(made, halved, x)
    assert half[0].out_features == 4
    torch.testing.assert_close(half(x), sf.modules.call(made, halved, x))
    torch.nn.utils.parametrize.remove_parametrizations(made[4], "weight")
    assert len(sf.shrinking.groups(made, x)) == 3


@pytest.mark.parametrize("name", ["old weight norm", "old spectral norm", "pruned"])
def test_groups_of_submodules_beside_a_weight_that_a_hook_has_computed(name):
    torch.manual_seed(0)
    layers = [
        KINDS[name][0](nn.Linear(6, 8)),
        nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2)),
    ]
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 6)
    model(x).sum().backward()  # the hook's weight is part of a graph now
    groups = sf.shrinking.groups(model, x, only="1")
    assert [group.size for group in groups] == [5]
    params = sf.modules.params_of(model)
    masks = {path: torch.tensor(True) for path in params} | groups.masks({0: [0, 3]})
    state = sf.State(params, masks)
    small = sf.shrink(model, state, x, only="1")
    assert small[1][0].out_features == 3
    torch.testing.assert_close(small(x), sf.modules.call(model, state, x))


@pytest.mark.parametrize("make", [parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_unit_that_nothing_reads_goes_from_a_computed_weight_too(make):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(make(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 2)).eval(),
        torch.randn(2, 6),
    )
    params = sf.modules.params_of(model)
    masks = {path: torch.tensor(True) for path in params}
    masks["2.weight"] = torch.ones(2, 8, dtype=torch.bool)
    masks["2.weight"][:, [1, 4]] = False
    state = sf.State(params, masks)
    small = sf.shrink(model, state, x)
    assert small[2].in_features == 6
    assert all(
        p.shape[0] == 6 for path, p in small.named_parameters() if path.startswith("0.")
    )
    torch.testing.assert_close(small(x), sf.modules.call(model, state, x))


def test_names_that_only_look_like_it():
    layer = nn.Linear(4, 4)
    layer.weight_orig, layer.weight_v = (
        nn.Parameter(torch.ones(4, 4)),
        nn.Parameter(torch.ones(4, 4)),
    )
    layer.cached = torch.ones(3)
    layer.cached_matrix = nn.Parameter(torch.ones(4, 4))
    assert not any(computed_from(layer, path) for path, _ in layer.named_parameters())
    assert not any(
        computed_from(nn.LSTM(3, 4, 2), path)
        for path, _ in nn.LSTM(3, 4, 2).named_parameters()
    )


def test_recurrent_layers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.utils.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    assert computed_from(layer, "weight_hh_l0_v") == (
        "weight_hh_l0",
        "torch.nn.utils.remove_weight_norm(model, 'weight_hh_l0')",
    )
    assert computed_from(layer, "weight_hh_l0_g") is not None
    assert computed_from(layer, "weight_ih_l0") is None
