import copy
import gc
import io
import weakref

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
                first = 0.01 if key == "step_size" else 0.0  # Rprop starts at the learning rate
                assert (moment[~mask] == first).all(), (name, key)


# ---- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS = {
    **{
        name: (name, {})
        for name in ("SGD", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
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
    optimizer = getattr(torch.optim, kind)(model.parameters(), **{"lr": 0.01, **options})
    sparse = sf.attach(rigl(), model, optimizer)
    first = sparse.state
    train(sparse, model, optimizer, range(7))
    check_zeros(sparse, model, optimizer)
    assert sf.masks.sparsity(sparse.state.masks) == sf.masks.sparsity(first.masks)
    assert not same(first.masks, sparse.state.masks)


def test_an_optimizer_that_mixes_entries_moves_none_that_is_pruned():
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 4, bias=False))
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
        assert not any(w[~sparse.state.masks[n]].any() for n, w in model.named_parameters() if w.ndim > 1)
    assert cross_entropy(model(X), Y).item() < before


def test_parameter_groups_and_several_optimizers():
    model = net()
    body = torch.optim.SGD(
        [{"params": [model[0].weight], "lr": 0.0}, {"params": [model[0].bias]}], lr=0.1, momentum=0.9
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
    assert not (model[0].weight[mask] - start[mask])[start[mask] != 0].any()  # a rate of zero
    check_zeros(sparse, model, _Both(body, head))


class _Both:
    def __init__(self, *optimizers):
        self.state = {p: s for optimizer in optimizers for p, s in optimizer.state.items()}


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
    sparse = sf.attach(rigl(), model, optimizer := torch.optim.SGD(model.parameters(), lr=0.0))
    seen = sparse.state
    train(sparse, model, optimizer, [0], clip=1e-6)  # growth goes by the dense gradient, whatever is clipped
    grads = sf.modules.value_and_grad(lambda p: cross_entropy(sf.modules.call(net(), p, X), Y))(sf.effective(seen))[1]
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
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# ---- gradients that are missing, scaled, not finite -----------------------------------------------


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 4)
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
    assert model.unused.weight.grad is None and model.unused.weight not in optimizer.state
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
        scaler.scale(cross_entropy(model(X), Y) * (float("inf") if bad else 1.0)).backward()
        scaler.unscale_(optimizer)
        sparse.before_step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        sparse.after_step(step)
        if bad:
            assert same(before, sparse.state)
            assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert scaler.get_scale() == 2.0
    check_zeros(sparse, model, optimizer)


def test_gradients_of_a_sparse_layout():
    model = nn.Sequential(nn.Embedding(6, 8, sparse=True), nn.Linear(8, 4))
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sf.attach(sf.rigl(0.5, when=sf.always(), steps=9, where="1.weight"), model, dense)
    cross_entropy(model(torch.tensor([0, 1, 1])), torch.tensor([0, 1, 2])).backward()
    sparse.before_step()
    assert model[0].weight.grad.layout == torch.sparse_coo
    dense.step()
    sparse.after_step(0)


# ---- modules --------------------------------------------------------------------------------------


def test_tied_weights_share_a_mask():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    sparse = sf.attach(rigl(), model, optimizer := adam(model))
    train(sparse, model, optimizer, range(3))
    assert list(sparse.state.masks) == ["0.weight"]
    assert model[2].weight is model[0].weight and int(sparse.state.masks["0.weight"].sum()) == 16


def test_a_compiled_model_and_a_checkpointed_one_train_the_same():
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    states = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager"), Checkpointed):
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


# ---- the state ------------------------------------------------------------------------------------


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
        assert {leaf.data_ptr() for leaf in sf.tree.leaves_of(sparse._placed.state.params)} == held


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
        "keep": sf.gmp(sf.schedules.polynomial(0.0, 0.9, begin=0, end=6), pruned="keep"),
    }[name]
    model = net()
    whole = sf.attach(algorithm, model, optimizer := adam(model))
    train(whole, model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sparse": whole.state_dict()}, file)
    train(whole, model, optimizer, range(3, 7))
    orders = ["attach sparse model optimizer", "attach model optimizer sparse", "model attach sparse optimizer"]
    if name not in ("supermask", "reparametrised"):  # whose optimizer gets parameters from attach
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
        assert all(torch.equal(leaf, other.state_dict()[path]) for path, leaf in saved["model"].items())
        train(again, other, second, range(3, 7))
        assert same(whole.state, again.state)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_found_by_attach_are_held_until_the_first_step_only():
    model = net()
    sparse = sf.attach(rigl(), model, optimizer := adam(model))
    found = {name: record.found for name, record in sparse._placed.weights.items()}
    assert [name for name, kept in found.items() if kept is not None] == ["0.weight", "2.weight"]
    train(sparse, model, optimizer, [0])
    saved = sparse.state_dict()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    sparse.load_state_dict(saved)
    assert all(record.found is None for record in sparse._placed.weights.values())
    assert torch.equal(model[0].weight, 2.0 * sparse.state.masks["0.weight"])


def test_weights_that_the_module_has_are_not_saved_twice():
    model = net()
    sparse = sf.attach(rigl(), model, adam(model))
    assert set(sparse.state_dict()) == {"algorithm", "arguments", "step", "tensors"}
    assert not [path for path in sparse.state_dict()["tensors"] if path.startswith("params.")]
    other = net()
    kept = sf.attach(sf.ste(0.5), other, adam(other)).state_dict()["tensors"]
    assert [path for path in kept if path.startswith("params.")] == ["params.0.weight", "params.2.weight"]


def test_a_state_of_another_algorithm_is_refused_and_nothing_changes():
    model, other = net(), net()
    sparse = sf.attach(rigl(), model, adam(model))
    saved = sf.attach(sf.gmp(0.5), other, adam(other)).state_dict()
    before = sparse.state
    with pytest.raises(ValueError, match=r"expected a state of rigl\(0.75, .*, got one of gmp\(0.5\)"):
        sparse.load_state_dict(saved)
    tensors = dict(sparse.state_dict()["tensors"])
    tensors["masks.0.weight"] = torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"a state of rigl\(0.75, .* does not fit rigl\(.*'masks.0.weight'"):
        sparse.load_state_dict({**sparse.state_dict(), "tensors": tensors})
    with pytest.raises(ValueError, match=r"expected the state_dict\(\) of what attach returned"):
        sparse.load_state_dict(model.state_dict())
    assert same(before, sparse.state)


# ---- calls in another order -----------------------------------------------------------------------


def test_after_step_needs_before_step_and_a_later_step():
    model = net()
    sparse = sf.attach(rigl(), model, optimizer := adam(model))
    with pytest.raises(
        RuntimeError, match="after_step: call before_step first, between backward and the optimizer's step"
    ):
        sparse.after_step(0)
    train(sparse, model, optimizer, [5])
    backward(model)
    sparse.before_step()
    with pytest.raises(ValueError, match="after_step: expected a step after 5, got 5"):
        sparse.after_step(5)
    with pytest.raises(TypeError, match="after_step: expected step to be an int, got 6.0"):
        sparse.after_step(6.0)
    optimizer.step()
    sparse.after_step(6)


@pytest.mark.parametrize("algorithm", [rigl(), sf.ste(0.5)], ids=["rigl", "ste"])
def test_before_step_twice_is_refused(algorithm):
    model = net()
    sparse = sf.attach(algorithm, model, adam(model))
    backward(model)
    sparse.before_step()
    with pytest.raises(RuntimeError, match=r"before_step: called twice.*call after_step after every before_step"):
        sparse.before_step()


def test_an_update_that_fails_leaves_the_effective_weights():
    def failing(state, grads, step):
        if step == 1:
            raise RuntimeError("no scores today")
        return state.params

    model = net()
    sparse = sf.attach(
        sf.drop_grow(0.5, drop=sf.scores.magnitude, grow=failing, when=sf.always(), pruned="train"),
        model,
        optimizer := adam(model),
    )
    train(sparse, model, optimizer, [0])
    with pytest.raises(RuntimeError, match="no scores today"):
        train(sparse, model, optimizer, [1])
    shown = sf.effective(sparse.state)
    assert all(torch.equal(shown[name], weight) for name, weight in model.named_parameters())
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
    assert all(torch.equal(shown[name], weight) for name, weight in model.named_parameters())
    assert len(optimizer.param_groups[0]["params"]) == 4 and len(optimizer.state) == 4
    for call in (sparse.before_step, lambda: sparse.after_step(9), sparse.detach, lambda: sparse.load_state_dict({})):
        with pytest.raises(RuntimeError, match="this algorithm was detached: attach it again"):
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
    assert all(not model.get_parameter(name)[~masks[name]].any() for name in ("0.weight", "2.weight"))
    assert same(sf.effective(sparse.state), dict(model.named_parameters()))
