import copy
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sparsefn as sf
from sparsefn.nn.attach.attach import check_unowned, owned_parameters
from tests.nn.distributed.harness import Cases, on_ranks

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


def rigl():
    return sf.rigl(0.75, when=sf.every(2), steps=100)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_the_module_gets_the_effective_weights_at_once():
    model = net()
    sparse = sf.attach(
        sf.static(0.75, init="magnitude", where="0.weight"), model, adam(model)
    )
    assert int(model[0].weight.count_nonzero()) == 24
    assert model[0].weight.is_leaf and model[0].weight.requires_grad
    assert sf.masks.sparsity(sparse.state.masks) == 0.75


def test_moments_of_an_optimizer_that_has_stepped_are_masked_before_the_next_step():
    model = net()
    optimizer = adam(model)
    cross_entropy(model(X), Y).backward()
    optimizer.step()
    sparse = sf.attach(rigl(), model, optimizer)
    sparse.before_step()
    optimizer.step()
    pruned = ~sparse.state.masks["0.weight"]
    assert not optimizer.state[model[0].weight]["exp_avg"][pruned].any()


def test_hooks_count_the_steps_themselves():
    states = []
    for hooks in (False, True):
        model = net()
        optimizer = adam(model)
        sparse = sf.attach(rigl(), model, optimizer, hooks=hooks)
        for step in range(5):
            optimizer.zero_grad()
            cross_entropy(model(X), Y).backward()
            if not hooks:
                sparse.before_step()
            optimizer.step()
            if not hooks:
                sparse.after_step(step)
        states.append(sparse.state)
    for a, b in zip(*map(sf.tree.leaves_of, states), strict=True):
        assert torch.equal(a, b)
    sparse.detach()
    assert (
        not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
    )


class AcceleratedOptimizer(torch.optim.Optimizer):
    """As accelerate's: no `super().__init__()`, so no hooks, and a step that it may
    leave out.
    """

    def __init__(self, optimizer):
        self.optimizer, self.sync = optimizer, True

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        if self.sync:
            self.optimizer.step(closure)


def test_hooks_go_into_the_optimizer_that_accelerate_wraps():
    model = net()
    optimizer = AcceleratedOptimizer(adam(model))
    sparse = sf.attach(rigl(), model, optimizer, hooks=True)
    for step in range(6):  # gradients of two batches a step
        cross_entropy(model(X), Y).backward()
        optimizer.sync = step % 2 == 1
        optimizer.step()
    assert sparse.state_dict()["step"] == 2
    assert optimizer.optimizer._optimizer_step_pre_hooks
    assert torch.equal(model[0].weight != 0, sparse.state.masks["0.weight"])


def test_hooks_take_a_closure():
    states = []
    for closes in (False, True):
        model = net()
        optimizer = adam(model)
        sparse = sf.attach(rigl(), model, optimizer, hooks=True)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = cross_entropy(model(X), Y)
            loss.backward()
            return loss

        for _ in range(5):
            loss = (
                optimizer.step(closure) if closes else (closure(), optimizer.step())[0]
            )
        assert loss.item() > 0
        states.append(sparse.state)
    for a, b in zip(*map(sf.tree.leaves_of, states), strict=True):
        assert torch.equal(a, b)


def test_hooks_refuse_several_optimizers():
    other = net()
    parts = [
        torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (other[0], other[2])
    ]
    with pytest.raises(
        ValueError,
        match="attach: hooks go with one optimizer, got 2: call the two methods "
        "instead",
    ):
        sf.attach(rigl(), other, parts, hooks=True)


def test_without_hooks_the_optimizer_still_pickles():
    model = net()
    optimizer = adam(model)
    sparse = sf.attach(rigl(), model, optimizer)
    pickle.loads(pickle.dumps(optimizer))
    copied = copy.deepcopy(model)
    sf.attach(rigl(), copied, adam(copied))
    assert sparse.is_attached


def test_scores_get_options_of_their_own():
    model = net()
    optimizer = adam(model)
    sf.attach(
        sf.supermask(0.5, mode="joint"),
        model,
        optimizer,
        extra_group={"lr": 0.5, "weight_decay": 0.0},
    )
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 0.5]
    assert [p.shape for p in optimizer.param_groups[1]["params"]] == [(12, 8), (4, 12)]


def test_a_second_algorithm_is_refused_until_the_first_is_detached_or_gone():
    model = net()
    optimizer = adam(model)
    first = sf.attach(rigl(), model, optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(
        ValueError,
        match=r"attach: '0.weight' has an algorithm attached already: call its "
        r"detach\(\) first",
    ):
        sf.attach(sf.static(0.9), model, optimizer)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    first.detach()
    second = sf.attach(rigl(), model, optimizer)
    del second
    gc.collect()
    sf.attach(rigl(), model, optimizer)


def test_an_algorithm_with_an_optimizer_is_refused():
    model = net()
    optimizer = adam(model)
    before = model[0].weight.detach().clone()
    with pytest.raises(
        ValueError,
        match="attach: expected an algorithm without with_optimizer: torch's own takes "
        "its place",
    ):
        sf.attach(sf.with_optimizer(rigl(), sf.optimizers.sgd(0.1)), model, optimizer)
    assert torch.equal(before, model[0].weight)
    sf.attach(rigl(), model, optimizer)


def test_other_arguments_are_refused():
    model = net()
    optimizer = adam(model)
    with pytest.raises(
        TypeError,
        match=r"attach: expected an Algorithm first, such as sf.rigl\(0.9\), got "
        r"Sequential",
    ):
        sf.attach(model, rigl(), optimizer)
    with pytest.raises(
        TypeError, match="attach: expected a torch.nn.Module second, got dict"
    ):
        sf.attach(rigl(), dict(model.named_parameters()), optimizer)
    with pytest.raises(
        TypeError,
        match=r"several, got sf.optimizers.sgd\(0.1\): it goes into with_optimizer",
    ):
        sf.attach(rigl(), model, sf.optimizers.sgd(0.1))
    with pytest.raises(
        TypeError,
        match=r"several, got sf.optimizers.adamw: it goes into with_optimizer",
    ):
        sf.attach(rigl(), model, sf.optimizers.adamw)
    with pytest.raises(
        TypeError,
        match="attach: expected a torch optimizer third, or several, got the class "
        "SGD: call",
    ):
        sf.attach(rigl(), model, torch.optim.SGD)
    with pytest.raises(
        TypeError,
        match="attach: expected a torch optimizer third, or several, got Parameter",
    ):
        sf.attach(rigl(), model, list(model.parameters()))
    with pytest.raises(
        TypeError,
        match="attach: expected a torch optimizer third, or several, got float",
    ):
        sf.attach(rigl(), model, 0.1)
    order = r"; write sf.attach\(algorithm, model, optimizer\)$"
    with pytest.raises(
        TypeError, match="expected a torch.nn.Module second, got SGD" + order
    ):
        sf.attach(rigl(), torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(
        TypeError,
        match=r"expected an Algorithm first, .*, got rigl itself; call it: "
        r"rigl\(sparsity\)",
    ):
        sf.attach(sf.rigl, model, optimizer)
    make = r": make one, as torch.optim.AdamW\(model.parameters\(\), lr=1e-3\) does$"
    for given, kind in ((model, "Sequential"), (model.parameters(), "generator")):
        with pytest.raises(
            TypeError,
            match=f"expected a torch optimizer third, or several, got {kind}{make}",
        ):
            sf.attach(rigl(), model, given)


def test_muon_for_matrices_alone():
    torch.manual_seed(0)
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    before = [p.detach().clone() for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.Muon(matrices, lr=1e-2)
    sparse = sf.attach(rigl(), model, optimizer)
    for step in range(3):
        model(torch.ones(2, model[0].in_features)).square().sum().backward()
        sparse.before_step()
        optimizer.step()
        model.zero_grad()
        sparse.after_step(step)
    sparse.check()
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            before, (p for p in model.parameters() if p.ndim < 2), strict=True
        )
    )
    # a loop of the user's own may move the others
    model(torch.ones(2, model[0].in_features)).sum().backward()
    sparse.before_step()
    assert all(bool(p.grad.any()) for p in model.parameters() if p.ndim < 2)
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.ndim < 2):
            p -= 0.1 * p.grad
    optimizer.step()
    sparse.after_step(3)
    sparse.check()


@pytest.mark.parametrize("frozen", [False, True])
def test_masks_of_a_whole_model_where_a_part_trains(frozen):
    model = net()
    masks = sf.one_shot(0.5).init(sf.modules.params_of(model)).masks
    assert masks["0.bias"].ndim == 0
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.AdamW(matrices, lr=1e-2)
    for p in model.parameters():
        p.requires_grad_(p.ndim == 2 or not frozen)
    sparse = sf.attach(sf.from_masks(masks), model, optimizer)
    model(torch.ones(2, model[0].in_features)).square().sum().backward()
    sparse.before_step()
    optimizer.step()
    sparse.after_step(0)
    sparse.check()
    assert sparse.masks.keys() == {n for n, p in model.named_parameters() if p.ndim > 1}
    assert all(torch.equal(mask, masks[name]) for name, mask in sparse.masks.items())


def test_a_mask_of_dimensions_for_a_frozen_weight_is_refused():
    model = net()
    masks = sf.one_shot(0.5).init(sf.modules.params_of(model)).masks
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match="an unknown leaf at '0.weight' in masks"):
        sf.attach(sf.from_masks(masks), model, adam(model))


def two_ranks(folder: Path) -> Cases:
    yield "train", lambda: train_as_a_rank(torch.distributed.get_rank(), folder)


def train_as_a_rank(rank: int, folder: Path) -> None:
    """Six steps of data parallelism with half of the batch; the state goes to a
    file.
    """
    inner = net()
    model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True)
    optimizer = adam(model)
    sparse = sf.attach(rigl(), model, optimizer)
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        cross_entropy(model(X[rank::2]), Y[rank::2]).backward()
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
    torch.save(sf.checkpoint.state_dict(sparse.state), folder / f"{rank}.pt")


def test_ranks_of_data_parallelism_have_the_masks_of_one_process(tmp_path):
    on_ranks(2, two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[path], second[path]) for path in first)
    model = net()
    optimizer = adam(model)
    sparse = sf.attach(rigl(), model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
    alone = sf.checkpoint.state_dict(sparse.state)
    assert list(alone) == list(first)
    for path, leaf in alone.items():
        assert (
            torch.equal(leaf, first[path])
            if leaf.dtype == torch.bool
            else torch.allclose(leaf, first[path], atol=1e-5)
        )


def test_extra_group_is_for_algorithms_that_add_parameters():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError,
        match="attach: extra_group is for new parameters, such as scores, and this "
        "algor",
    ):
        sf.attach(sf.static(0.5), model, optimizer, extra_group={"lr": 1.0})
    assert len(optimizer.param_groups) == 1
    sf.attach(sf.static(0.5), model, optimizer)


@pytest.mark.parametrize("hooks", [False, True])
def test_module_and_optimizer_become_garbage_with_it(hooks):
    model = net()
    optimizer = adam(model)
    sparse = sf.attach(rigl(), model, optimizer, hooks=hooks)
    seen = [weakref.ref(one) for one in (model, optimizer, sparse, model[0].weight)]
    del model, optimizer, sparse
    gc.collect()
    assert not any(one() is not None for one in seen)


def test_a_mask_that_keeps_nothing_warns():
    model = net()
    masks = {
        "0.weight": torch.zeros(12, 8, dtype=torch.bool),
        "2.weight": torch.ones(4, 12, dtype=torch.bool),
    }
    with pytest.warns(
        UserWarning, match="attach: the mask of '0.weight' keeps none of its 96 weights"
    ):
        sf.attach(
            sf.from_masks(sf.masks.from_dict(sf.modules.params_of(model), masks)),
            model,
            adam(model),
        )


class Adapted(nn.Module):
    """A frozen layer and an adapter that changes nothing yet."""

    def __init__(self, zeros=True):
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(64, 64),
            nn.Linear(64, 2, bias=False),
            nn.Linear(2, 64, bias=False),
        )
        self.base.requires_grad_(False)
        if zeros:
            nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize("zeros", [False, True])
def test_adapters_warn(zeros):
    model = Adapted(zeros)
    with pytest.warns(
        UserWarning,
        match=r"attach: masks go to 256 weights that train, and 4,096 frozen weights "
        r"stay .*LoRA",
    ):
        sf.attach(sf.rigl(0.5), model, adam(model))


@pytest.mark.parametrize(
    "algorithm",
    [
        sf.static(None, init="from_zeros"),
        sf.static(0.6, init="magnitude", distribution=sf.budgets.global_()),
    ],
    ids=["from_zeros", "global"],
)
def test_adapters_that_nothing_would_pass_are_refused(algorithm):
    model = Adapted()
    before, optimizer = copy.deepcopy(model.state_dict()), adam(model)
    with pytest.raises(
        ValueError,
        match=r"the mask of 'b.weight' keeps none of its 128 weights.*peft.keep_zeros",
    ):
        sf.attach(algorithm, model, optimizer)
    assert sf.checkpoint.tree_equal(dict(model.state_dict()), dict(before))
    assert not optimizer._optimizer_step_pre_hooks
    trains = sf.static(None, init="from_zeros", where="a.weight")
    with pytest.warns(UserWarning, match="LoRA"):
        sf.attach(trains, model, optimizer)


def test_a_layer_that_is_pruned_whole_is_no_adapter():
    model = net()
    nn.init.zeros_(model[0].weight)
    with pytest.warns(
        UserWarning, match="attach: the mask of '0.weight' keeps none of its 96 weights"
    ):
        sf.attach(sf.static(None, init="from_zeros"), model, adam(model))


def test_sparse_adam_on_masked_leaves_is_refused():
    model = nn.Embedding(10, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    before = model.weight.detach().clone()
    with pytest.raises(
        ValueError,
        match="attach: SparseAdam takes no masks: leave 'weight' out of `where`",
    ):
        sf.attach(sf.static(0.5, where="weight"), model, optimizer)
    assert torch.equal(model.weight, before) and not optimizer._optimizer_step_pre_hooks


@pytest.mark.deep
def test_a_compiled_step_is_watched():
    model = net()
    optimizer = adam(model)
    sparse = sf.attach(rigl(), model, optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    cross_entropy(model(X), Y).backward()
    with pytest.raises(RuntimeError, match="step: call before_step before it"):
        step()
    sparse.before_step()
    step()
    sparse.after_step(0)
    sparse.check()


def test_what_goes_on_after_the_run_warns():
    model = net()
    gmp = sf.gmp(sf.schedules.polynomial(0.0, 0.9, begin=0, end=1000))
    with pytest.warns(
        UserWarning,
        match="attach: polynomial.* ends at step 1000, after the run of 200 steps: its "
        "last",
    ):
        sf.attach(gmp, model, adam(model), steps=200)
    other = net()
    kept = sf.attach(gmp, other, adam(other), steps=1001)
    assert kept.is_attached
    with pytest.raises(ValueError, match="unfinished: expected steps >= 1, got 0"):
        sf.attach(gmp, model := net(), adam(model), steps=0)


def test_the_summary_shows_what_is_in_the_module():
    model = net()
    sparse = sf.attach(rigl(), model, adam(model))
    assert str(sf.report.summary(sparse)) == str(sf.report.summary(sparse.state))
    model[0].weight.data.fill_(1.0)
    assert (
        sf.report.summary(sparse).sparsified.kept
        == 96 + 12
        > sf.masks.n_kept(sparse.masks)
    )


# ---- which parameters ----------------------------------------------------------------


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def test_parameters_are_found_by_name_with_their_optimizers():
    model = two_layers()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    records = owned_parameters(model, [first, second])
    assert list(records) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [record.optimizer is first for record in records.values()] == [
        True,
        True,
        False,
        False,
    ]
    assert records["1.bias"].parameter is model[1].bias


def test_wrappers_do_not_change_names():
    model = torch.compile(torch.nn.DataParallel(two_layers()), backend="eager")
    assert (
        next(
            iter(owned_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
        )
        == "0.weight"
    )


def test_frozen_parameters_are_left_out_and_tied_ones_are_there_once():
    model = two_layers()
    model[1] = torch.nn.Linear(3, 2)
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert list(owned_parameters(model, [optimizer])) == ["0.weight", "1.bias"]


def test_parameters_in_two_optimizers_are_refused_all_at_once():
    model = two_layers()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    told = (
        "expected one optimizer to have '0.weight', '0.bias', got several: take it "
        "out of all but one"
    )
    with pytest.raises(ValueError, match=told):
        owned_parameters(model, [first, both])


@pytest.mark.parametrize(
    "algorithm",
    [
        sf.rigl(0.5),
        sf.one_shot(0.5, when=sf.at([100])),  # dense until then
        sf.phases([(0, sf.dense()), (100, sf.one_shot(0.5, when=sf.at([100])))]),
        sf.supermask(0.5),
        sf.reparametrised(sf.reparam.power(2.0)),  # whose weights follow from latents
        sf.partition([("*.bias", sf.dense()), ("*", sf.rigl(0.5))]),
    ],
    ids=repr,
)
def test_parameters_that_stay_dense_need_no_optimizer(algorithm):
    model = two_layers()
    weights = owned_parameters(
        model, [torch.optim.SGD([model[0].weight, model[1].weight], lr=0.1)]
    )
    assert list(weights) == ["0.weight", "1.weight"]
    check_unowned(algorithm, model, weights)
    biases = owned_parameters(
        model, [torch.optim.SGD([model[0].bias, model[1].bias], lr=0.1)]
    )
    told = (
        "expected an optimizer to have '0.weight', '1.weight', which the algorithm "
        "sparsifies: give it to one, freeze"
    )
    with pytest.raises(ValueError, match=told):
        check_unowned(algorithm, model, biases)


def test_nothing_is_made_where_each_parameter_has_an_optimizer():
    def refused(params):
        raise AssertionError(params)

    model = two_layers()
    weights = owned_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    check_unowned(sf.Algorithm(refused, refused), model, weights)


def test_the_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(two_layers().parameters(), lr=0.1)
    with pytest.raises(
        ValueError,
        match="expected an optimizer of this Sequential, got one that has none of its "
        "param",
    ):
        owned_parameters(two_layers(), [optimizer])


def test_a_model_without_parameters_that_require_a_gradient_is_refused():
    model = two_layers().requires_grad_(False)
    with pytest.raises(
        ValueError,
        match="expected a model with parameters that require a gradient, got a "
        r"Sequential without: unfreeze what trains, as model.requires_grad_\(True\) ",
    ):
        owned_parameters(model, [torch.optim.SGD(two_layers().parameters(), lr=0.1)])
