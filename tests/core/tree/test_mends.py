"""A module, its parameters or lazy layers in the place of a tree of tensors: errors
that say what to write.
"""

import re
import warnings

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.core.tree.mends import (
    check_not_lazy,
    check_tree,
    mend_of,
    no_tree,
    warn_without_names,
)

NAMED = "write dict(module.named_parameters())"
GIVEN = {
    "module": lambda net: net,
    "parameters": lambda net: net.parameters(),
    "named_parameters": lambda net: net.named_parameters(),
    "pairs": lambda net: list(net.named_parameters()),
    "optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
}
ALGORITHMS = {
    "dense": sf.dense(),
    "rigl": sf.rigl(0.5),
    "one_shot": sf.one_shot(0.5),
    "partition": sf.partition([("*.weight", sf.rigl(0.5))]),
    "phases": sf.phases([(0, sf.dense())]),
    "with_optimizer": sf.with_optimizer(sf.rigl(0.5), sf.optimizers.sgd(0.1)),
    "reparametrised": sf.reparametrised(sf.reparam.power(2.0), sf.static(0.5)),
}


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def lazy_net():
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_init_names_the_mend(name, given):
    kind = {
        "module": "Sequential",
        "pairs": "(name, tensor) pairs",
        "optimizer": "SGD",
    }.get(given, "generator")
    told = f"expected params to be a tree of tensors, got {kind}; {NAMED}"
    with pytest.raises(TypeError, match=f"^{re.escape(told)}$"):
        ALGORITHMS[name].init(GIVEN[given](net()))


@pytest.mark.parametrize("given", GIVEN)
def test_what_else_takes_params_or_a_state_names_the_mend(given):
    model = net()
    state = sf.rigl(0.5).init(sf.modules.params_of(model))
    value = lambda: GIVEN[given](model)  # noqa: E731 (a generator is read once)
    for act in (
        lambda: sf.optimizers.sgd(0.1).init(value()),
        lambda: sf.optimizers.adamw(0.1).init(value()),
        lambda: sf.report.plan(sf.rigl(0.5), value()),
        lambda: sf.masks.from_zeros(value()),
        lambda: sf.with_params(state, value()),
        lambda: sf.apply_masks(value(), state.masks),
        lambda: sf.modules.call(model, value(), torch.ones(1, 4)),
        lambda: sf.modules.bake(model, value()),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(NAMED)):
            act()
    for act in (
        lambda: sf.effective(value()),
        lambda: sf.rigl(0.5).update(value(), state.params, 0),
        lambda: sf.report.summary(value()),
        lambda: sf.report.observe(value()),
        lambda: sf.report.changed(state, value()),
        lambda: sf.distributed.commit(model, value()),
    ):
        with pytest.raises(
            TypeError,
            match=re.escape("write algorithm.init(dict(module.named_parameters()))"),
        ):
            act()
    with pytest.raises(
        ValueError,
        match=re.escape(
            "write {name: p.grad for name, p in module.named_parameters()}"
        ),
    ):
        sf.rigl(0.5).update(state, value(), 0)


def test_a_state_dict_has_buffers():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    told = (
        "got torch.int64 at '1.num_batches_tracked', a buffer, which a state_dict() "
        f"has, too; {NAMED}"
    )
    with pytest.raises(TypeError, match=re.escape(told)):
        sf.rigl(0.5).init(model.state_dict())


def test_a_state_dict_beside_a_dict_names_the_types():
    model = net()
    state = sf.rigl(0.5).init(model.state_dict())
    told = (
        "the containers differ: grads are of type dict and params of type "
        "OrderedDict; write dict(...) around both"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        sf.rigl(0.5).update(state, dict(model.named_parameters()), 0)


def test_gradients_without_names():
    model = net()
    state = sf.rigl(0.5).init(dict(model.named_parameters()))
    grads = torch.autograd.grad(model(torch.ones(1, 4)).sum(), model.parameters())
    with pytest.raises(ValueError, match=re.escape("write dict(zip(params, ...))")):
        sf.rigl(0.5).update(state, grads, 0)
    named = dict(zip(state.params, grads, strict=True))
    assert sf.rigl(0.5).update(state, named, 0).masks.keys() == state.masks.keys()


def test_step_and_gradients_in_the_other_order():
    state = sf.rigl(0.5).init({"w": torch.ones(2, 2)})
    with pytest.raises(
        ValueError, match=re.escape("got int; write update(state, grads, step)")
    ):
        sf.rigl(0.5).update(state, 0, state.params)


def test_a_module_in_the_place_of_a_sparsity():
    told = "got Sequential; a module goes into sf.attach(algorithm, model, optimizer)"
    for make in (sf.rigl, sf.one_shot, sf.gmp, sf.static):
        with pytest.raises(TypeError, match=re.escape(told)):
            make(net())


def test_a_list_of_parameters_has_no_names():
    model = net()
    told = (
        "init: a list of parameters has no names, which tell embeddings, norms and "
        f"layers apart; {NAMED}"
    )
    with pytest.warns(UserWarning, match=re.escape(told)):
        sf.rigl(0.5).init(list(model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # a list of plain tensors is a tree like others
        sf.rigl(0.5).init([p.detach() for p in model.parameters()])
        sf.rigl(0.5).init(dict(model.named_parameters()))
        warn_without_names([])


def test_lazy_layers_are_named_with_the_mend():
    x = torch.ones(3, 4)
    state = sf.rigl(0.5).init({"w": torch.ones(2, 2)})
    told = r"lazy layers have not made '0.\w+', .*: run the module on a batch first$"
    for act in (
        lambda lazy: sf.rigl(0.5).init(dict(lazy.named_parameters())),
        lambda lazy: sf.partition([("*", sf.rigl(0.5))]).init(
            dict(lazy.named_parameters())
        ),
        lambda lazy: sf.report.plan(sf.rigl(0.5), dict(lazy.named_parameters())),
        lambda lazy: sf.attach(
            sf.rigl(0.5), lazy, torch.optim.SGD(lazy.parameters(), lr=0.1)
        ),
        lambda lazy: sf.modules.params_of(lazy),
        lambda lazy: sf.modules.call(lazy, state, x),
        lambda lazy: sf.modules.bake(lazy, state),
        lambda lazy: sf.modules.weights_of(lazy),
        lambda lazy: sf.calibration.inputs(lazy, None, x),
        lambda lazy: sf.shrinking.groups(lazy, x),
        lambda lazy: sf.shrinking.weights(lazy, x),
        lambda lazy: sf.shrink(lazy, state, x),
        lambda lazy: sf.distributed.commit(lazy, state),
    ):
        with pytest.raises(ValueError, match=told):
            act(lazy_net())
    with pytest.raises(
        ValueError,
        match="buffers of the Sequential .* '1.running_mean', '1.running_var' yet",
    ):
        sf.modules.buffers_of(lazy_net())


def test_a_lazy_module_serves_after_a_batch():
    lazy = lazy_net()
    optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1)
    lazy(torch.ones(3, 4))
    sparse = sf.attach(sf.rigl(0.5, where="*.weight"), lazy, optimizer)
    assert sf.masks.sparsity(sparse.masks) > 0


def test_trees_pass():
    for value in (
        {"w": torch.ones(1)},
        [torch.ones(1)],
        (),
        torch.ones(1),
        sf.State({}, {}),
        None,
    ):
        assert no_tree("params", value) == mend_of("params", value) == ""
        check_tree("params", value)
    check_not_lazy("params", {"w": torch.ones(1), "n": 1.0}.items())
