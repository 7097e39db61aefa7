import copy
import gc
import io
import pickle
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sparsefn as sf

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


def rigl(**options):
    return sf.rigl(0.75, when=sf.every(2), steps=100, **options)


def backward(model):
    cross_entropy(model(X), Y).backward()


def train(sparse, model, optimizer, steps, clip=None):
    for step in steps:
        optimizer.zero_grad()
        backward(model)
        sparse.before_step()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        sparse.after_step(step)


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def same(a, b):
    leaves = zip(sf.tree.leaves_of(a), sf.tree.leaves_of(b), strict=True)
    return all(torch.equal(x, y) for x, y in leaves)


def check_zeros(sparse, model, optimizer):
    masks = sparse.state.masks
    for name, weight in model.named_parameters():
        if name not in masks:
            continue
        mask = masks[name].expand_as(weight)
        assert not weight[~mask].any(), name
        for key, moment in optimizer.state[weight].items():
            if torch.is_tensor(moment) and moment.shape == weight.shape:
                # Rprop starts at the learning rate
                first = 0.01 if key == "step_size" else 0.0
                assert (moment[~mask] == first).all(), (name, key)


# ---- optimizers ----------------------------------------------------------------------

OPTIMIZERS = {
    **{
        name: (name, {})
        for name in (
            "SGD",
            "NAdam",
            "RAdam",
            "Adamax",
            "Adagrad",
            "Adadelta",
            "RMSprop",
            "Rprop",
            "ASGD",
        )
    },
    "Adafactor": ("Adafactor", {}),
    "momentum": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "foreach": ("Adam", {"foreach": True, "amsgrad": True, "weight_decay": 0.1}),
    "one by one": ("AdamW", {"foreach": False}),
    "fused": ("AdamW", {"fused": True}),
    "a tensor as rate": ("Adam", {"lr": torch.tensor(0.01)}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_weights_and_their_moments_stay_zero(name):
    kind, options = OPTIMIZERS[name]
    model = net()
    optimizer = getattr(torch.optim, kind)(
        model.parameters(), **{"lr": 0.01, **options}
    )
    sparse = sf.attach(rigl(), model, optimizer)
    first = sparse.state
    train(sparse, model, optimizer, range(7))
    check_zeros(sparse, model, optimizer)
    assert sf.masks.sparsity(sparse.state.masks) == sf.masks.sparsity(first.masks)
    assert not same(first.masks, sparse.state.masks)


def test_an_optimizer_that_mixes_entries_moves_none_that_is_pruned():
    model = nn.Sequential(
        nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 4, bias=False)
    )
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    sparse = sf.attach(rigl(), model, optimizer)
    train(sparse, model, optimizer, range(5))
    check_zeros(sparse, model, optimizer)


def test_a_closure_calls_before_step_itself():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    sparse = sf.attach(rigl(), model, optimizer)
    before = cross_entropy(model(X), Y).item()

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(X), Y)
        loss.backward()
        sparse.before_step()
        return loss

    for step in range(4):
        optimizer.step(closure)
        sparse.after_step(step)
        assert not any(
            w[~sparse.state.masks[n]].any()
            for n, w in model.named_parameters()
            if w.ndim > 1
        )
    assert cross_entropy(model(X), Y).item() < before


def test_parameter_groups_and_several_optimizers():
    model = net()
    body = torch.optim.SGD(
        [{"params": [model[0].weight], "lr": 0.0}, {"params": [model[0].bias]}],
        lr=0.1,
        momentum=0.9,
    )
    head = torch.optim.Adam(model[2].parameters(), lr=0.01)
    sparse = sf.attach(rigl(), model, [body, head])
    start = model[0].weight.detach().clone()
    for step in range(5):
        body.zero_grad()
        head.zero_grad()
        backward(model)
        sparse.before_step()
        body.step()
        head.step()
        sparse.after_step(step)
    mask = sparse.state.masks["0.weight"]
    # a rate of zero
    assert not (model[0].weight[mask] - start[mask])[start[mask] != 0].any()
    check_zeros(sparse, model, _Both(body, head))


class _Both:
    def __init__(self, *optimizers):
        self.state = {
            p: s for optimizer in optimizers for p, s in optimizer.state.items()
        }


def test_a_schedule_of_rates_and_clipping_leave_the_dense_gradient_to_the_algorithm():
    states = []
    for clip in (None, 1e9):
        model = net()
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        sparse = sf.attach(rigl(), model, optimizer)
        for step in range(6):
            train(sparse, model, optimizer, [step], clip)
            scheduler.step()
        states.append(sparse.state)
    assert same(states[0], states[1])
    model = net()
    sparse = sf.attach(
        rigl(), model, optimizer := torch.optim.SGD(model.parameters(), lr=0.0)
    )
    seen = sparse.state
    # growth goes by the dense gradient, whatever is clipped
    train(sparse, model, optimizer, [0], clip=1e-6)
    grads = sf.modules.value_and_grad(
        lambda p: cross_entropy(sf.modules.call(net(), p, X), Y)
    )(sf.effective(seen))[1]
    assert same(sparse.state.masks, rigl().update(seen, grads, 0).masks)


def test_gradients_of_several_batches_add_up():
    model = net()
    optimizer = adam(model)
    sparse = sf.attach(rigl(), model, optimizer)
    other = copy.deepcopy(model)
    second = adam(other)
    sparse_second = sf.attach(rigl(), other, second)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(4):
            (cross_entropy(model(X[part::4]), Y[part::4]) / 4).backward()
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
        train(sparse_second, other, second, [step])
    assert same(sparse.state.masks, sparse_second.state.masks)
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


# ---- gradients that are missing, scaled, not finite ----------------------------------


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = (
            nn.Linear(8, 4),
            nn.Linear(8, 4),
            nn.Linear(4, 4),
        )
        self.frozen.requires_grad_(False)
        self.frozen.weight.data.fill_(0.5)

    def forward(self, x):
        return self.frozen(self.used(x))


def test_parameters_without_a_gradient_do_not_move_and_frozen_ones_are_left_alone():
    model = Unused()
    optimizer = adam(model)
    sparse = sf.attach(rigl(), model, optimizer)
    assert "frozen.weight" not in sparse.state.params
    train(sparse, model, optimizer, range(3))
    assert (
        model.unused.weight.grad is None and model.unused.weight not in optimizer.state
    )
    assert bool((model.frozen.weight == 0.5).all())
    check_zeros(sparse, model, optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_changes_no_mask(fused):
    model = net()
    optimizer = adam(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    sparse = sf.attach(rigl(), model, optimizer)
    for step, bad in enumerate([False, False, True, False, False]):
        before, weights = sparse.state, [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(
            cross_entropy(model(X), Y) * (float("inf") if bad else 1.0)
        ).backward()
        scaler.unscale_(optimizer)
        sparse.before_step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        sparse.after_step(step)
        if bad:
            assert same(before, sparse.state)
            assert all(
                torch.equal(a, b)
                for a, b in zip(weights, model.parameters(), strict=True)
            )
    assert scaler.get_scale() == 2.0
    check_zeros(sparse, model, optimizer)


def test_gradients_of_a_sparse_layout():
    model = nn.Sequential(nn.Embedding(6, 8, sparse=True), nn.Linear(8, 4))
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sf.attach(
        sf.rigl(0.5, when=sf.always(), steps=9, where="1.weight"), model, dense
    )
    cross_entropy(model(torch.tensor([0, 1, 1])), torch.tensor([0, 1, 2])).backward()
    sparse.before_step()
    assert model[0].weight.grad.layout == torch.sparse_coo
    dense.step()
    sparse.after_step(0)


# ---- modules -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rigl", "ste", "keep", "supermask"])
def test_gradients_that_have_a_graph_of_their_own_train_the_same(name):
    runs = []
    for create_graph in (False, True):
        model, optimizer, sparse = trio(name)
        for step in range(1, 5):
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "Using backward\\(\\) with create_graph=True"
                )
                cross_entropy(model(X), Y).backward(create_graph=create_graph)
            sparse.before_step()
            optimizer.step()
            sparse.after_step(step)
        assert not any(leaf.requires_grad for leaf in sf.tree.leaves_of(sparse.state))
        runs.append(sparse.state)
        for parameter in model.parameters():
            parameter.grad = None  # it and its graph hold each other
    assert same(*runs)


def test_tied_weights_share_a_mask():
    model = nn.Sequential(
        nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False)
    )
    model[2].weight = model[0].weight
    sparse = sf.attach(rigl(), model, optimizer := adam(model))
    train(sparse, model, optimizer, range(3))
    assert list(sparse.state.masks) == ["0.weight"]
    assert (
        model[2].weight is model[0].weight
        and int(sparse.state.masks["0.weight"].sum()) == 16
    )


def test_a_compiled_model_and_a_checkpointed_one_train_the_same():
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    states = []
    for wrap in (
        lambda m: m,
        lambda m: torch.compile(m, backend="eager"),
        Checkpointed,
    ):
        inner = net()
        model = wrap(inner)
        sparse = sf.attach(rigl(), inner, optimizer := adam(inner))
        train(sparse, model, optimizer, range(4))
        states.append(sparse.state)
    assert same(states[0], states[1]) and same(states[0], states[2])


def test_bfloat16_weights():
    model = net().bfloat16()
    sparse = sf.attach(rigl(), model, optimizer := adam(model))
    for step in range(3):
        optimizer.zero_grad()
        cross_entropy(model(X.bfloat16()), Y).backward()
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
    assert sparse.state.params["0.weight"].dtype == torch.bfloat16
    check_zeros(sparse, model, optimizer)


# ---- the state -----------------------------------------------------------------------


def test_the_state_is_a_snapshot():
    model = net()
    sparse = sf.attach(rigl(), model, optimizer := adam(model))
    for steps in (range(2), range(2, 4)):
        state = sparse.state
        copied = sf.tree.copied(state)
        train(sparse, model, optimizer, steps)
        assert same(state, copied)
    for leaf in sf.tree.leaves_of(sparse.state.params):
        leaf.fill_(7.0)
    assert not any((p == 7.0).any() for p in model.parameters())


@pytest.mark.parametrize("name", ["rigl", "gmp", "static"])
def test_weights_are_held_once(name):
    algorithm = {
        "rigl": rigl(),
        "gmp": sf.gmp(sf.schedules.polynomial(0.0, 0.9, begin=0, end=4)),
        "static": sf.static(0.5),
    }[name]
    model = net()
    sparse = sf.attach(algorithm, model, optimizer := adam(model))
    for step in range(6):
        train(sparse, model, optimizer, [step])
        held = {p.data_ptr() for p in model.parameters()}
        assert {
            leaf.data_ptr()
            for leaf in sf.tree.leaves_of(sparse._module_state.state.params)
        } == held


def test_weights_may_get_other_memory():
    states = []
    for moves in (False, True):
        model = net()
        sparse = sf.attach(rigl(), model, optimizer := adam(model))
        for step in range(5):
            train(sparse, model, optimizer, [step])
            for p in model.parameters() if moves else ():
                p.data = p.data.clone()
        states.append(sparse.state)
    assert same(*states)


def test_no_gradient_is_held_between_steps():
    model = net()
    sparse = sf.attach(rigl(), model, optimizer := adam(model))
    train(sparse, model, optimizer, range(2))
    grads = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    gc.collect()
    assert not any(grad() is not None for grad in grads)


@pytest.mark.parametrize("name", ["rigl", "ste", "supermask", "reparametrised", "keep"])
def test_a_run_goes_on_from_its_files_bit_for_bit(name):
    algorithm = {
        "rigl": rigl(),
        "ste": sf.ste(0.75),
        "supermask": sf.supermask(0.5, mode="joint"),
        "reparametrised": sf.reparametrised(sf.reparam.power(2.0), rigl()),
        "keep": sf.gmp(
            sf.schedules.polynomial(0.0, 0.9, begin=0, end=6), pruned="keep"
        ),
    }[name]
    model = net()
    whole = sf.attach(algorithm, model, optimizer := adam(model))
    train(whole, model, optimizer, range(3))
    file = io.BytesIO()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "sparse": whole.state_dict(),
        },
        file,
    )
    train(whole, model, optimizer, range(3, 7))
    orders = [
        "attach sparse model optimizer",
        "attach model optimizer sparse",
        "model attach sparse optimizer",
    ]
    # whose optimizer gets parameters from attach
    if name not in ("supermask", "reparametrised"):
        orders += ["model optimizer attach sparse", "optimizer attach sparse model"]
    for order in orders:
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        parts = {"model": (other := net()), "optimizer": (second := adam(other))}
        for part in order.split():
            if part == "attach":
                again = parts["sparse"] = sf.attach(algorithm, other, second)
            else:
                parts[part].load_state_dict(saved[part])
        assert all(
            torch.equal(leaf, other.state_dict()[path])
            for path, leaf in saved["model"].items()
        )
        train(again, other, second, range(3, 7))
        assert same(whole.state, again.state)
        assert all(
            torch.equal(a, b)
            for a, b in zip(model.parameters(), other.parameters(), strict=True)
        )


def test_weights_found_by_attach_are_held_until_the_first_step_only():
    model = net()
    sparse = sf.attach(rigl(), model, optimizer := adam(model))
    assert list(sparse._module_state.found) == ["0.weight", "2.weight"]
    train(sparse, model, optimizer, [0])
    saved = sparse.state_dict()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    sparse.load_state_dict(saved)
    assert not sparse._module_state.found
    assert torch.equal(model[0].weight, 2.0 * sparse.state.masks["0.weight"])


def test_weights_that_the_module_has_are_not_saved_twice():
    model = net()
    sparse = sf.attach(rigl(), model, adam(model))
    assert set(sparse.state_dict()) == {"algorithm", "arguments", "step", "tensors"}
    assert not [
        path for path in sparse.state_dict()["tensors"] if path.startswith("params.")
    ]
    other = net()
    kept = sf.attach(sf.ste(0.5), other, adam(other)).state_dict()["tensors"]
    assert [path for path in kept if path.startswith("params.")] == [
        "params.0.weight",
        "params.2.weight",
    ]


def test_a_state_of_another_algorithm_is_refused_and_nothing_changes():
    model, other = net(), net()
    sparse = sf.attach(rigl(), model, adam(model))
    saved = sf.attach(sf.gmp(0.5), other, adam(other)).state_dict()
    before = sparse.state
    with pytest.raises(
        ValueError, match=r"expected a state of rigl\(0.75, .*, got one of gmp\(0.5\)"
    ):
        sparse.load_state_dict(saved)
    tensors = dict(sparse.state_dict()["tensors"])
    tensors["masks.0.weight"] = torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(
        ValueError,
        match=r"a state of rigl\(0.75, .* does not fit rigl\(.*'masks.0.weight'",
    ):
        sparse.load_state_dict({**sparse.state_dict(), "tensors": tensors})
    with pytest.raises(
        ValueError, match=r"expected the state_dict\(\) of what attach returned"
    ):
        sparse.load_state_dict(model.state_dict())
    assert same(before, sparse.state)


# ---- calls in another order ----------------------------------------------------------


def test_after_step_needs_before_step_and_a_later_step():
    model = net()
    sparse = sf.attach(rigl(), model, optimizer := adam(model))
    with pytest.raises(
        RuntimeError,
        match="after_step: call before_step first, between backward and the "
        "optimizer's step",
    ):
        sparse.after_step(0)
    train(sparse, model, optimizer, [5])
    backward(model)
    sparse.before_step()
    with pytest.raises(ValueError, match="after_step: expected a step after 5, got 5"):
        sparse.after_step(5)
    with pytest.raises(
        TypeError, match="after_step: expected step to be an int, got 6.0"
    ):
        sparse.after_step(6.0)
    optimizer.step()
    sparse.after_step(6)


@pytest.mark.parametrize("algorithm", [rigl(), sf.ste(0.5)], ids=["rigl", "ste"])
def test_before_step_twice_is_refused(algorithm):
    model = net()
    sparse = sf.attach(algorithm, model, adam(model))
    backward(model)
    sparse.before_step()
    with pytest.raises(
        RuntimeError,
        match=r"before_step: called between.*call after_step after every before_step",
    ):
        sparse.before_step()


def test_an_update_that_fails_leaves_the_effective_weights():
    def failing(state, grads, step):
        if step == 1:
            raise RuntimeError("no scores today")
        return state.params

    model = net()
    sparse = sf.attach(
        sf.drop_grow(
            0.5,
            drop=sf.scores.magnitude,
            grow=failing,
            when=sf.always(),
            pruned="train",
        ),
        model,
        optimizer := adam(model),
    )
    train(sparse, model, optimizer, [0])
    with pytest.raises(RuntimeError, match="no scores today"):
        train(sparse, model, optimizer, [1])
    shown = sf.effective(sparse.state)
    assert all(
        torch.equal(shown[name], weight) for name, weight in model.named_parameters()
    )
    train(sparse, model, optimizer, [2])


def test_detach_leaves_an_ordinary_module_and_optimizer():
    model = net()
    optimizer = adam(model)
    keys = list(model.state_dict())
    sparse = sf.attach(sf.supermask(0.5, mode="joint"), model, optimizer)
    assert len(optimizer.param_groups[0]["params"]) == 6
    train(sparse, model, optimizer, range(3))
    shown = sf.effective(sparse.state)
    sparse.detach()
    assert same(sf.effective(sparse.state), shown)
    assert list(model.state_dict()) == keys and not model._forward_pre_hooks
    assert all(
        torch.equal(shown[name], weight) for name, weight in model.named_parameters()
    )
    assert len(optimizer.param_groups[0]["params"]) == 4 and len(optimizer.state) == 4
    for call in (
        sparse.before_step,
        lambda: sparse.after_step(9),
        sparse.detach,
        lambda: sparse.load_state_dict({}),
    ):
        with pytest.raises(
            RuntimeError, match="this algorithm was detached: attach it again"
        ):
            call()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    sf.attach(rigl(), model, optimizer)


def test_detach_between_the_calls_leaves_effective_weights():
    model = net()
    sparse = sf.attach(sf.ste(0.5), model, optimizer := adam(model))
    backward(model)
    sparse.before_step()
    optimizer.step()
    masks = sparse.masks
    sparse.detach()
    assert all(
        not model.get_parameter(name)[~masks[name]].any()
        for name in ("0.weight", "2.weight")
    )
    assert same(sf.effective(sparse.state), dict(model.named_parameters()))


# ---- lines that were forgotten, or stand in another place ----------------------------

ALGORITHMS = {
    "rigl": rigl,
    "ste": lambda: sf.ste(0.75),
    "keep": lambda: sf.gmp(
        sf.schedules.polynomial(0.0, 0.9, begin=0, end=6), pruned="keep"
    ),
    "supermask": lambda: sf.supermask(0.5, mode="joint"),
    "latents": lambda: sf.reparametrised(sf.reparam.power(2.0), rigl()),
}


def trio(name="rigl", steps=1, **options):
    model = net()
    optimizer = adam(model)
    sparse = sf.attach(ALGORITHMS[name](), model, optimizer, **options)
    train(sparse, model, optimizer, range(steps))
    optimizer.zero_grad()
    return model, optimizer, sparse


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_forgotten_line_raises_at_the_next_call(name):
    model, optimizer, sparse = trio(name)
    whole, weights = trio(name), weights_of(model)
    backward(model)
    with pytest.raises(
        RuntimeError,
        match=r"step: call before_step before it, .*hooks=True\) has step\(\) call "
        r"both",
    ):
        optimizer.step()
    with pytest.raises(
        RuntimeError,
        match="after_step: call before_step first, between backward and the "
        "optimizer's",
    ):
        sparse.after_step(1)
    assert all(
        torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True)
    )
    sparse.before_step()
    optimizer.step()
    with pytest.raises(
        RuntimeError,
        match="step: the optimizer has stepped since before_step: call after_step "
        "before",
    ):
        optimizer.step()
    with pytest.raises(
        RuntimeError,
        match="before_step: called between before_step and after_step: call after_step",
    ):
        sparse.before_step()
    for call in (sparse.check, sparse.state_dict, lambda: copy.deepcopy(sparse)):
        with pytest.raises(
            RuntimeError,
            match=r": called between before_step and after_step: call after_step after",
        ):
            call()
    sparse.after_step(1)
    optimizer.zero_grad()
    with pytest.raises(
        RuntimeError,
        match=r"before_step: no parameter has a new gradient: call it after "
        r"backward\(\) and",
    ):
        sparse.before_step()
    train(sparse, model, optimizer, [2])
    train(whole[2], whole[0], whole[1], [1, 2])  # and what raised has changed nothing
    assert same(sparse.state, whole[2].state)


def test_a_zeroed_gradient_where_masks_change_warns():
    model, optimizer, sparse = trio(steps=2)
    backward(model)
    optimizer.zero_grad(set_to_none=False)
    sparse.before_step()
    optimizer.step()
    with pytest.warns(
        UserWarning,
        match="after_step: every gradient was zero at step 2, where masks changed",
    ):
        sparse.after_step(2)


def test_what_attach_returned_is_kept():
    model = net()
    optimizer = adam(model)
    sf.attach(rigl(), model, optimizer)
    gc.collect()
    backward(model)
    with pytest.raises(
        RuntimeError,
        match="what sf.attach returned for these weights is gone: keep it, or call",
    ):
        optimizer.step()
    sparse = sf.attach(rigl(), model, optimizer)
    train(sparse, model, optimizer, range(2))


def test_numpy_integers_are_steps_and_other_numbers_are_refused():
    model, optimizer, sparse = trio()
    backward(model)
    for step in (True, 1.0):
        with pytest.raises(
            TypeError, match="before_step: expected step to be an int, got"
        ):
            sparse.before_step(step)
    sparse.before_step(np.int64(4))
    optimizer.step()
    sparse.after_step(np.int64(4))
    assert sparse.state_dict()["step"] == 4


def test_terms_and_skip_read_the_step_of_before_step():
    model = net()
    optimizer = adam(model)
    algorithm = sf.with_terms(rigl(), sf.terms.pruned_decay(0.1))
    sparse = sf.attach(algorithm, model, optimizer)
    backward(model)
    sparse.before_step()
    with pytest.raises(
        ValueError,
        match="after_step: before_step took this for step 0, got 1: give it 1, too",
    ):
        sparse.after_step(1)
    optimizer.step()
    sparse.after_step(0)
    sparse.detach()
    backward(model)
    sparse = sf.attach(rigl(), model, optimizer, skip=sf.at([1]))
    sparse.before_step()
    with pytest.raises(ValueError, match="before_step took this for step 0, got 1"):
        sparse.after_step(1)
    optimizer.step()
    sparse.after_step(3)


# ---- what warns ----------------------------------------------------------------------


def warned(run):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in found]


@pytest.mark.parametrize("name", ["rigl", "ste", "supermask"])
def test_numbers_of_batches_in_the_place_of_steps_warn_once(name):
    algorithm = {
        "rigl": rigl(),
        "ste": sf.ste(0.5, when=sf.every(5)),
        "supermask": sf.supermask(0.5, when=sf.at([8])),
    }
    model = net()
    sparse = sf.attach(algorithm[name], model, optimizer := adam(model))
    (text,) = warned(lambda: train(sparse, model, optimizer, range(3, 40, 4)))
    assert re.match(
        r"after_step: expected step [48], got (7|11), which leaves out where .* "
        r"fires: count steps of",
        text,
    )
    assert r"after_step(i // 4) does where 4 batches make a step" in text


@pytest.mark.parametrize(
    "algorithm", [sf.one_shot(0.5), sf.gmp(0.8, steps=20)], ids=["one shot", "gmp"]
)
def test_a_run_that_begins_when_all_is_over_warns(algorithm):
    model = net()
    sparse = sf.attach(algorithm, model, optimizer := adam(model))
    (text,) = warned(lambda: train(sparse, model, optimizer, range(20, 23)))
    assert "after_step: expected step 0, got 20, which leaves out where" in text
    assert (
        "where it begins late, give the algorithm a later trigger" in text
        and sparse.changes == 0
    )


def test_steps_that_begin_late_or_go_on_are_right():
    for algorithm, first in (
        (rigl(), 1),
        (rigl(), 51),
        (sf.one_shot(0.5, when=sf.at([1001])), 1000),
        (sf.ste(0.5), 9),
    ):
        model = net()
        sparse = sf.attach(algorithm, model, optimizer := adam(model))
        train(sparse, model, optimizer, range(first, first + 3))
        other = net()
        other.load_state_dict(model.state_dict())
        again = sf.attach(algorithm, other, second := adam(other))
        again.load_state_dict(sparse.state_dict())
        train(again, other, second, range(first + 3, first + 5))


def test_a_step_without_the_optimizer_warns_once():
    model, optimizer, sparse = trio()

    def run():
        for step in range(1, 7):  # both calls for each of two batches
            backward(model)
            sparse.before_step()
            if step % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            sparse.after_step(step)

    (text,) = warned(run)
    assert text == (
        "after_step: no optimizer has stepped since before_step: where several "
        "batches make a step, call both around optimizer.step(), after the last "
        "backward; where a step is left out on purpose, all is well"
    )


def test_a_step_that_skip_leaves_out_needs_no_optimizer():
    model, optimizer, sparse = trio(skip=sf.at([1]))
    backward(model)
    sparse.before_step()
    sparse.after_step(1)
    optimizer.zero_grad()
    train(sparse, model, optimizer, [2])


@pytest.mark.parametrize("copied", [False, True])
def test_a_weight_that_trains_since_attach_warns_once(copied):
    model = net()
    model[0].requires_grad_(False)
    optimizer = adam(model)
    sparse = sf.attach(rigl(), model, optimizer)
    train(sparse, model, optimizer, [0])
    model[0].bias.requires_grad_(True)  # which stays dense anyway
    train(sparse, model, optimizer, [1])
    if copied:
        model, optimizer, sparse = copy.deepcopy((model, optimizer, sparse))
    model[0].weight.requires_grad_(True)
    (text,) = warned(lambda: train(sparse, model, optimizer, [2, 3]))
    assert text.startswith(
        "before_step: '0.weight' trains since attach, and stays dense: add or "
        "unfreeze it before, or"
    )
    sparse.detach()
    train(sf.attach(rigl(), model, optimizer), model, optimizer, [0])
    assert (model[0].weight == 0).any()


def test_a_layer_that_is_new_in_the_optimizer_warns_and_another_model_does_not():
    model, optimizer, sparse = trio()
    other = nn.Linear(4, 4)
    optimizer.add_param_group({"params": other.parameters()})
    train(sparse, model, optimizer, [1])
    model.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": model[3].parameters()})
    (text,) = warned(lambda: train(sparse, model, optimizer, [2, 3]))
    assert text.startswith(
        "before_step: '3.weight' trains since attach, and stays dense"
    )


# ---- hooks, and a second optimizer ---------------------------------------------------


def test_hooks_beside_an_optimizer_of_other_weights():
    model, other = net(), nn.Linear(4, 4)
    optimizer, second = adam(model), adam(other)
    sparse = sf.attach(rigl(), model, optimizer, hooks=True)
    whole = trio(steps=4)
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        other(torch.ones(4)).sum().backward()
        second.step()
        optimizer.step()
        second.step()
    assert same(sparse.state, whole[2].state)


@pytest.mark.filterwarnings("ignore:before_step. other code wrote to pruned entries")
@pytest.mark.parametrize("first", [False, True])
def test_hooks_mask_what_a_second_optimizer_has_written(first):
    model = net()
    optimizer, second = (
        adam(model),
        torch.optim.SGD([model[0].weight, model[2].bias], lr=0.1),
    )
    sparse = sf.attach(rigl(), model, optimizer, hooks=True)
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        if first:
            second.step()
        optimizer.step()
        check_zeros(sparse, model, optimizer)
        if not first:
            backward(model)
            second.step()
            with pytest.raises(
                RuntimeError,
                match="check: .* pruned entries of '0.weight' are not zero in the "
                "module",
            ):
                sparse.check()
    assert sparse.changes == 2


# ---- closures ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "calls", [True, False], ids=["before_step in the closure", "or not"]
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_lbfgs_sees_effective_weights_with_every_algorithm(name, calls):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    sparse = sf.attach(ALGORITHMS[name](), model, optimizer)
    losses = []

    def closure():
        optimizer.zero_grad()
        assert all(
            not model.get_parameter(p)[~m].any()
            for p, m in sparse.masks.items()
            if m.ndim
        )
        loss = cross_entropy(model(X), Y)
        loss.backward()
        losses.append(loss.item())
        if calls:
            sparse.before_step()
        return loss

    for step in range(4):
        optimizer.step(closure)
        sparse.after_step(step)
        sparse.check()
    assert len(losses) > 8 and min(losses) < losses[0]


def test_a_closure_sees_effective_weights_where_somebody_wrote_others():
    model, optimizer, sparse = trio()
    with torch.no_grad():
        model[0].weight.fill_(1.0)

    def closure():
        assert torch.equal(model[0].weight, sparse.masks["0.weight"].float())
        optimizer.zero_grad()
        backward(model)

    optimizer.step(closure)
    sparse.after_step(1)


def closure_of(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(X), Y)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "LBFGS"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_after_step_that_is_forgotten_after_a_closure_raises_at_the_next_step(
    name, kind
):
    runs = []
    for forgets in (True, False):
        model = net()
        options = {"max_iter": 3} if kind == "LBFGS" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        sparse = sf.attach(ALGORITHMS[name](), model, optimizer)
        closure = closure_of(model, optimizer)
        for step in range(3):
            optimizer.step(closure)
            if forgets:
                with pytest.raises(
                    RuntimeError,
                    match="step: the optimizer has stepped since before_step: call "
                    "after",
                ):
                    optimizer.step(closure)
            sparse.after_step(step)
        runs.append(sparse.state)
    assert same(*runs)  # what raised has changed nothing


def test_several_optimizers_may_each_have_a_closure_with_gradients_of_its_own():
    model = net()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    sparse = sf.attach(rigl(), model, optimizers)
    closures = [closure_of(model, model) for _ in optimizers]
    for step in range(3):
        for optimizer, closure in zip(optimizers, closures, strict=True):
            optimizer.step(closure)
        for optimizer, closure in zip(optimizers, closures, strict=True):
            with pytest.raises(
                RuntimeError,
                match="step: the optimizer has stepped since before_step: call "
                "after_step",
            ):
                optimizer.step(closure)
        sparse.after_step(step)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_closure_without_new_gradients_is_refused(name):
    model, optimizer, sparse = trio(name)
    backward(model)
    sparse.before_step()
    with pytest.raises(
        RuntimeError,
        match="no parameter has a new gradient: .* optimizers with closures need an "
        "attach",
    ):
        optimizer.step(lambda: 0.0)  # the masked ones would be the algorithm's
    model.zero_grad()
    with pytest.raises(
        RuntimeError, match="no parameter has a new gradient: call it after backward"
    ):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_closure_that_skips_its_batch_moves_nothing(name, hooks):
    runs = []
    for skips in (True, False):
        model = net()
        optimizer = adam(model)
        sparse = sf.attach(ALGORITHMS[name](), model, optimizer, hooks=hooks)
        for step in range(4):
            if skips:
                before, weights = sparse.state, weights_of(model)
                # not the scores, which the model does not have
                optimizer.step(model.zero_grad)
                assert same(before, sparse.state) and same(weights, weights_of(model))
            optimizer.step(closure_of(model, optimizer))
            if not hooks:
                sparse.after_step(step)
        runs.append(sparse.state)
    assert same(*runs)


@pytest.mark.filterwarnings("ignore:before_step. other code wrote to pruned entries")
def test_weights_that_a_closure_wrote_before_it_skipped_its_batch_are_masked():
    model, optimizer, sparse = trio()

    def closure():
        optimizer.zero_grad()
        with torch.no_grad():
            model[0].weight.fill_(1.0)

    optimizer.step(closure)
    train(sparse, model, optimizer, [1])
    sparse.check()


def test_gradients_of_latents_lie_in_memory_as_lbfgs_reads_them():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    sparse = sf.attach(sf.methods.maskllm(steps=4), model, optimizer)
    before = sparse.state.scores

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(X), Y)
        loss.backward()
        return loss

    optimizer.step(closure)
    sparse.after_step(0)
    assert not same(before, sparse.state.scores)


def test_scores_leave_lbfgs_and_join_it_again():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(X), Y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        sparse = sf.attach(sf.supermask(0.5, mode="joint"), model, optimizer)
        before = sparse.state.scores
        optimizer.step(closure)
        sparse.after_step(0)
        assert not same(before, sparse.state.scores)
        sparse.detach()
        assert len(optimizer._params) == 4


@pytest.mark.parametrize("hooks", [False, True])
# in half precision a curvature is 0 / 0, or infinite
@pytest.mark.parametrize("scale", [1.0, 6e4])
def test_lbfgs_that_diverges_leaves_weights_that_do_not_train(scale, hooks):
    model = net().half()
    found = model[0].weight.detach().clone()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4)
    sparse = sf.attach(sf.supermask(0.5), model, optimizer, hooks=hooks)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(X.half()), Y) * scale
        loss.backward()
        return loss

    for step in range(3):
        optimizer.step(closure)
        if not hooks:
            sparse.after_step(step)
        sparse.check()
        assert torch.equal(model[0].weight, found.where(sparse.masks["0.weight"], 0.0))


@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_lbfgs_does_not_hide_writes_to_weights_that_do_not_train(when):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    sparse = sf.attach(sf.supermask(0.5), model, optimizer)
    step = closure_of(model, optimizer)

    def write():
        model[0].weight.data.fill_(1.0)

    def closure():
        loss = step()
        sparse.before_step()
        if when == "before the step":
            write()
        return loss

    with pytest.raises(
        RuntimeError,
        match="other code wrote to '0.weight', but its mask follows from scores",
    ):
        optimizer.step(closure)
        write()
        sparse.after_step(0)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize(
    "algorithm",
    [sf.ste(0.75), sf.static(0.75, init="magnitude")],
    ids=["ste", "static"],
)
def test_lbfgs_is_that_of_a_straight_through_mask(algorithm, search):
    def loss(model, weights):
        return cross_entropy(torch.func.functional_call(model, weights, (X,)), Y)

    model, other = net(), net()
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=5, line_search_fn=search
    )
    sparse = sf.attach(algorithm, model, optimizer)
    state = algorithm.init(sf.modules.params_of(other))
    params = {
        name: nn.Parameter(state.params[name].clone())
        for name, _ in other.named_parameters()
    }
    second = torch.optim.LBFGS(
        params.values(), lr=0.1, max_iter=5, line_search_fn=search
    )
    trains = (
        {name: torch.ones((), dtype=torch.bool) for name in params}
        if state.support != ()
        else state.masks
    )

    def closure():
        optimizer.zero_grad()
        value = loss(model, dict(model.named_parameters()))
        value.backward()
        return value

    def straight_through():
        shown = {
            n: p.detach().where(state.masks[n], 0.0).requires_grad_()
            for n, p in params.items()
        }
        value = loss(other, shown)
        grads = torch.autograd.grad(value, list(shown.values()))
        for (name, p), grad in zip(params.items(), grads, strict=True):
            p.grad = grad.where(trains[name], 0.0)
        return value

    for step in range(4):
        optimizer.step(closure)
        sparse.after_step(step)
        second.step(straight_through)
        stepped = state._replace(
            params={name: p.detach().clone() for name, p in params.items()}
        )
        state = algorithm.update(
            stepped, {name: p.grad for name, p in params.items()}, step
        )
        assert same(sparse.state.params, state.params) and same(
            sparse.masks, state.masks
        )


# ---- who else writes -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:before_step. other code wrote to pruned entries")
@pytest.mark.parametrize("name", ["rigl", "ste", "keep", "supermask"])
@pytest.mark.parametrize("when", ["between steps", "before the step", "after the step"])
def test_weights_that_somebody_wrote_are_taken_over_and_masked(name, when):
    model, optimizer, sparse = trio(name)

    def write():
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.5)

    backward(model)
    if when == "between steps":
        write()
        assert all(
            (sparse.state.params[n][m.expand_as(p)] == p[m.expand_as(p)]).all()
            for (n, p), m in zip(
                sorted(model.named_parameters()),
                sf.tree.leaves_of(sparse.masks),
                strict=True,
            )
        )
    sparse.before_step()
    if when == "before the step":
        write()
    optimizer.step()
    weights = dict(zip(dict(model.named_parameters()), weights_of(model), strict=True))
    if when == "after the step":
        write()
        weights = {n: w + 0.5 for n, w in weights.items()}
    optimizer.zero_grad()
    sparse.after_step(1)
    sparse.check()
    state = sparse.state
    for path, weight in model.named_parameters():
        mask = state.masks[path].expand_as(weight)
        assert torch.equal(weight[mask], weights[path][mask]) and torch.equal(
            weight, sf.effective(state)[path]
        )
    train(sparse, model, optimizer, range(2, 5))


def test_entries_that_nobody_wrote_keep_their_hidden_values():
    model, _, sparse = trio("ste")
    hidden = sparse.state.params["0.weight"]
    mask = sparse.masks["0.weight"]
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    assert torch.equal(
        sparse.state.params["0.weight"], torch.where(mask, 2 * hidden, hidden)
    )
    model.load_state_dict(
        {name: torch.full_like(p, 7.0) for name, p in model.named_parameters()}
    )
    assert bool((sparse.state.params["0.weight"] == 7.0).all())


def test_weights_that_follow_from_latents_are_not_written():
    model, optimizer, sparse = trio("latents")
    saved = copy.deepcopy(model.state_dict())
    model.load_state_dict(saved)  # the same values
    backward(model)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(
        RuntimeError,
        match="before_step: other code wrote to '0.weight', but its values follow from "
        "lat",
    ):
        sparse.before_step()
    model.load_state_dict(saved)
    train(sparse, model, optimizer, range(1, 3))


def test_the_same_values_are_no_write_to_latents():
    for alpha in (1.0, 2.0):  # 1: the latents themselves are the weights
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparse = sf.attach(sf.methods.powerprop(alpha=alpha), model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            backward(model)
            if step == 2:
                with torch.no_grad():
                    sparse._module_state.extra[0].parameter.fill_(torch.nan)
            sparse.before_step()
            optimizer.step()
            model.load_state_dict(model.state_dict())
            sparse.after_step(step)
        assert model[0].weight.isnan().any()
        model.load_state_dict(model.state_dict())
        backward(model)
        sparse.before_step()


def test_check_finds_what_was_written_in_secret():
    model, optimizer, sparse = trio()
    sparse.check()
    model[0].weight.data.add_(1.0)
    with pytest.raises(
        RuntimeError,
        match=r"check: 72 pruned entries of '0.weight' .* since after_step: call "
        r"apply_masks\(\)",
    ):
        sparse.check()
    assert sf.masks.n_kept(sparse.in_module().masks) > sf.masks.n_kept(sparse.masks)
    train(sparse, model, optimizer, [1])
    sparse.check()
    assert sf.masks.n_kept(sparse.in_module().masks) == sf.masks.n_kept(sparse.masks)


def test_masks_are_not_applied_between_the_two_calls():
    model, _, sparse = trio()
    backward(model)
    sparse.before_step()
    with pytest.raises(
        RuntimeError, match="apply_masks: called between before_step and after_step"
    ):
        sparse.apply_masks()


def test_a_graph_that_is_used_again_after_the_step_is_not_broken_by_masks():
    """Zeros that are written over zeros are no change that autograd has to know."""
    model, _, sparse = trio()
    loss = cross_entropy(model(X), Y)
    loss.backward(retain_graph=True)
    sparse.before_step()  # a scaler leaves the step out
    with pytest.warns(UserWarning, match="no optimizer has stepped"):
        sparse.after_step(1)
    loss.backward()


def test_gradients_and_moments_that_somebody_wrote_are_masked():
    model, optimizer, sparse = trio()
    backward(model)
    sparse.before_step()
    with torch.no_grad():
        model[0].weight.grad.add_(torch.nan)
        model[2].weight.grad = torch.ones_like(model[2].weight)
    loaded = copy.deepcopy(optimizer.state_dict())
    for state in loaded["state"].values():
        state["exp_avg"].fill_(1.0)
    optimizer.load_state_dict(loaded)
    optimizer.step()
    sparse.after_step(1)
    check_zeros(sparse, model, optimizer)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_was_replaced_is_named_and_a_detach_mends_it(name):
    def other_layer(model, optimizer):
        model[0] = nn.Linear(8, 12)

    def other_parameter(model, optimizer):
        model[0].weight = nn.Parameter(torch.ones(12, 8))

    def other_dtype(model, optimizer):
        model.double()

    def no_member(model, optimizer):
        optimizer.param_groups[0]["params"].clear()

    for change, text in {
        other_layer: r"'0.bias', or a layer that holds it, was replaced since attach: "
        r"call detach\(\), then attach",
        other_parameter: r"'0.weight', or a layer that holds it, was replaced",
        other_dtype: r"'0.bias' was torch.float32 on cpu of shape \(12,\) when it was "
        r"attached, and is torch.float64",
        no_member: r"the optimizer of '.*' has it no more: call detach\(\), then "
        r"attach again",
    }.items():
        model, optimizer, sparse = trio(name)
        change(model, optimizer)
        cross_entropy(model(X.to(model[0].weight.dtype)), Y).backward()
        with pytest.raises(RuntimeError, match=f"before_step: {text}"):
            sparse.before_step()
        sparse.detach()
        optimizer = adam(model)
        again = sf.attach(ALGORITHMS[name](), model, optimizer)
        cross_entropy(model(X.to(model[0].weight.dtype)), Y).backward()
        again.before_step()
        optimizer.step()
        again.after_step(0)


def test_another_optimizer_at_work_is_noticed():
    model, _, sparse = trio()
    other = adam(model)
    backward(model)
    sparse.before_step()
    other.step()
    with pytest.raises(
        RuntimeError,
        match="after_step: '0.bias' moved without its optimizer: for another optimizer",
    ):
        sparse.after_step(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "kind",
    ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "Adamax"],
)
def test_no_pruned_weight_becomes_nan(kind, dtype):
    model = net().to(dtype)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2)
    sparse = sf.attach(rigl(), model, optimizer)
    for step in range(4):
        optimizer.param_groups[0]["eps"] = 0.0
        optimizer.zero_grad()
        cross_entropy(model(X.to(dtype)), Y).backward()
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
        sparse.check()


# ---- skip and reset ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"skip": sf.at([2, 3])}, {"reset": sf.at([3])}],
    ids=["", "skip", "reset"],
)
def test_skip_and_reset_are_those_of_with_optimizer(options):
    def loss(params):
        return cross_entropy(sf.modules.call(model, params, X), Y)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    alone = sf.with_optimizer(rigl(), sf.optimizers.sgd(0.5, momentum=0.5), **options)
    state = alone.init(sf.modules.params_of(net()))
    sparse = sf.attach(rigl(), model, optimizer, **options)
    for step in range(7):
        state = alone.update(state, torch.func.grad(loss)(sf.effective(state)), step)
        train(sparse, model, optimizer, [step])
        assert same(sparse.masks, state.masks)
        assert all(
            torch.allclose(sparse.state.params[name], leaf, atol=1e-6)
            for name, leaf in state.params.items()
        )


def test_snip_scores_weights_and_gradients_of_one_step():
    model = net()
    snip = sf.one_shot(0.5, sf.scores.saliency)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    with pytest.raises(
        ValueError,
        match=r"attach: saliency multiplies weights by gradients .* give skip=, the "
        r"trigger",
    ):
        sf.attach(snip, model, optimizer)
    sparse = sf.attach(snip, model, optimizer, skip=sf.at([0]))
    params = sf.modules.params_of(net())
    grads = torch.func.grad(lambda p: cross_entropy(sf.modules.call(model, p, X), Y))(
        params
    )
    train(sparse, model, optimizer, range(1))
    assert same(sparse.masks, snip.update(snip.init(params), grads, 0).masks)
    assert torch.equal(model[0].bias, net()[0].bias)  # no optimizer has moved it


def test_a_step_that_is_left_out_moves_nothing_by_old_gradients():
    model, optimizer, sparse = trio("supermask", steps=0, skip=sf.at([1]))
    for step in range(3):
        before, weights = sparse.state.scores, weights_of(model)
        backward(model)
        sparse.before_step()
        if step == 1:
            backward(model)
        optimizer.step()
        model.zero_grad()  # not the scores, which the model does not have
        sparse.after_step(step)
        assert same(before, sparse.state.scores) == (step == 1)
        assert all(
            torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True)
        ) == (step == 1)


# ---- copies --------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_copies_and_pickles_of_the_three_train_on(name, hooks):
    model, optimizer, sparse = trio(name)
    if hooks:
        sparse.detach()
        sparse = sf.attach(ALGORITHMS[name](), model, optimizer, hooks=True)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save((sparse, optimizer, model), file)
    file.seek(0)
    copies = [
        copy.deepcopy((model, optimizer, sparse)),
        copy.deepcopy((sparse, optimizer, model))[::-1],
        pickle.loads(pickle.dumps((model, optimizer, sparse))),
        torch.load(file, weights_only=False)[::-1],
        (model, optimizer, sparse),
    ]
    states = []
    for one in copies:
        if hooks:
            for _ in range(4):
                one[1].zero_grad()
                backward(one[0])
                one[1].step()
        else:
            train(one[2], one[0], one[1], range(1, 5))
        states.append(one[2].state)
        assert same(sf.effective(one[2].state), dict(one[0].named_parameters()))
    assert all(same(states[-1], state) for state in states)


def test_a_copy_alone_has_parameters_of_its_own():
    model, _, sparse = trio()
    alone = copy.deepcopy(sparse)
    backward(model)
    with pytest.raises(
        RuntimeError,
        match="no parameter has a new gradient: .* a copy of a module has parameters "
        "of its own",
    ):
        alone.before_step()


def test_masks_are_read_without_copies_and_their_changes_are_counted():
    model, optimizer, sparse = trio(steps=0)
    assert sparse.changes == 0
    before = sparse.masks
    train(sparse, model, optimizer, range(5))  # they change at 0, 2 and 4
    assert sparse.changes == 3 and not same(before, sparse.masks)
    assert sparse.masks["0.weight"] is sparse.masks["0.weight"]


ONCE = (
    "rigl(0.75) changes masks once in {}, at step 0: give it steps=50, the length of "
    "the run"
)


def test_masks_that_changed_once_are_told_in_the_summary_and_at_the_end():
    model = net()
    optimizer = adam(model)
    sparse = sf.attach(sf.rigl(0.75), model, optimizer)
    assert sparse.notes == []
    train(sparse, model, optimizer, range(50))
    assert sparse.changes == 1
    assert sparse.notes == [ONCE.format("the 50 steps so far")]
    for only in (None, "sparsified"):
        assert str(sf.report.summary(sparse, only=only)).endswith(
            f"\nnote: {ONCE.format('the 50 steps so far')}"
        )
    with pytest.warns(
        UserWarning, match=f"^{re.escape('detach: ' + ONCE.format('50 steps'))}$"
    ):
        sparse.detach()


def test_masks_that_changed_once_are_told_at_attach_where_the_length_is_given():
    model = net()
    with pytest.warns(
        UserWarning,
        match=f"^{re.escape('attach: ' + ONCE.format('the run of 50 steps'))}$",
    ):
        sf.attach(sf.rigl(0.75), model, adam(model), steps=50)


@pytest.mark.parametrize(
    "algorithm",
    [sf.rigl(0.75, steps=3), rigl(), sf.rigl(0.75, when=sf.every(100)), sf.static(0.5)],
    ids=repr,
)
def test_who_said_when_is_not_told(algorithm):
    model = net()
    optimizer = adam(model)
    sparse = sf.attach(algorithm, model, optimizer)
    train(sparse, model, optimizer, range(3))
    assert not any("once" in note for note in sparse.notes)
    sparse.detach()


def test_the_summary_of_a_run_that_was_cut_says_what_is_left():
    model = net()
    optimizer = adam(model)
    sparse = sf.attach(sf.gmp(0.75, steps=100), model, optimizer)
    train(sparse, model, optimizer, range(3))
    assert sf.report.summary(sparse).notes == (
        "gmp(0.75, steps=100) takes 100 steps, more than the 3 steps so far",
    )
    train(sparse, model, optimizer, range(3, 100))
    assert sf.report.summary(sparse).notes == ()
