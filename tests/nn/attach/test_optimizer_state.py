"""Optimizers of torch and of elsewhere under `attach`: their moments are cleared, or
they are refused by name.
"""

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import sparsefn as sf
from sparsefn.nn.attach.attach import check_optimizer, without_wrapper
from sparsefn.nn.attach.optimizer_state import (
    check_known,
    clear_changed,
    clear_moments,
    factors_in,
    first_value,
    found_in,
    joins,
    optimizer_states,
    tensors_in,
    zeros_stay,
)
from sparsefn.nn.attach.parameters import Record, inner_optimizers
from tests.nn.distributed.harness import Cases, on_ranks

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 4


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).to(dtype)


def rigl():
    return sf.rigl(0.75, when=sf.every(2), steps=100)


def churns():
    """Weights that are dropped grow again soon, where moments that were left would
    show.
    """
    return sf.set(0.5, when=sf.every(2), drop_fraction=0.5)


def train(model, optimizer, steps=7, algorithm=None, **options):
    """Steps in a loop; what attach returned."""
    sparse = sf.attach(algorithm or rigl(), model, optimizer, **options)
    for step in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(X.to(model[0].weight.dtype)), Y).backward()
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
    return sparse


def weights_of(model):
    return torch.cat(
        [parameter.detach().reshape(-1) for parameter in model.parameters()]
    )


def plain_adamw():
    model = net()
    train(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        steps=12,
        algorithm=churns(),
    )
    return weights_of(model)


# ---- stand-ins -----------------------------------------------------------------------


class StandIn(Optimizer):
    """SGD with momentum in a state that subclasses lay out: `begin(p)`, and
    `momentum(state)` as a tensor or back.
    """

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(self.begin(p))
                self.move(p, state, group["lr"])

    def begin(self, p):
        return {"m": torch.zeros_like(p)}

    def move(self, p, state, lr):
        state["m"].mul_(0.9).add_(p.grad)
        p.sub_(lr * state["m"])


class Nested(StandIn):
    """Momentum in lists, dicts and objects, as AggMo, SOAP and Shampoo with grafting
    have it.
    """

    def begin(self, p):
        zeros = lambda: torch.zeros_like(p)  # noqa: E731
        return {
            "by_rate": {"0.9": [zeros()]},
            "graft": SimpleNamespace(m=zeros(), norm=2.0),
            "step": 0,
        }

    def move(self, p, state, lr):
        for m in (state["by_rate"]["0.9"][0], state["graft"].m):
            m.mul_(0.9).add_(p.grad)
        p.sub_(lr * state["graft"].m)


class Flat(StandIn):
    """Momentum as a flat list of entries, and with two dimensions in one."""

    def begin(self, p):
        return {"m": torch.zeros(p.numel()), "unfolded": torch.zeros(1, *p.shape)}

    def move(self, p, state, lr):
        state["unfolded"][0].add_(p.grad)
        state["m"].mul_(0.9).add_(p.grad.reshape(-1))
        p.sub_(lr * state["m"].view_as(p))


def dynamic_map(signed):
    """The 256 numbers of 8-bit codes, as bitsandbytes has them: the code of zero is
    127, or 0 without signs.
    """
    positive = [10.0 ** (i / 32 - 4) for i in range(128 if signed else 255)]
    return torch.tensor(
        sorted([0.0, *positive, *(-x for x in positive[1:] if signed)])[-256:]
    )


class EightBit(StandIn):
    """As bitsandbytes: uint8 codes of the weight's shape, which stand for parts of the
    largest number of a block.
    """

    def begin(self, p):
        blocks = (p.numel() + 15) // 16
        code = torch.zeros(p.shape, dtype=torch.uint8)
        return {
            "state1": code,
            "qmap1": dynamic_map(True),
            "absmax1": torch.zeros(blocks),
            "step": 0,
        }

    def move(self, p, state, lr):
        scale = state["absmax1"].repeat_interleave(16)[: p.numel()].view_as(p)
        m = (state["qmap1"][state["state1"].long()] * scale).mul_(0.9).add_(p.grad)
        padded = torch.cat([m.reshape(-1), torch.zeros(-m.numel() % 16)]).view(-1, 16)
        largest = padded.abs().amax(1)
        parts = (
            (padded / largest.clamp(min=1e-12)[:, None])
            .reshape(-1)[: p.numel()]
            .view_as(p)
        )
        state["state1"].copy_(
            (parts[..., None] - state["qmap1"]).abs().argmin(-1).to(torch.uint8)
        )
        state["absmax1"].copy_(largest)
        p.sub_(lr * m)


class Codes(torch.Tensor):
    """As torchao's: a tensor in name, whose `codes` hold it, and which has no
    `masked_fill_`.
    """

    @staticmethod
    def __new__(cls, codes, qmap, shape=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape if shape is None else shape
        )

    def __init__(self, codes, qmap, shape=None):
        self.codes = codes
        if qmap is not None:
            self.qmap = qmap

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of Codes")

    def numbers(self):
        return (
            self.codes.float()
            if not hasattr(self, "qmap")
            else self.qmap[self.codes.long()]
        )


class Subclassed(StandIn):
    """Momentum in a subclass of tensors, in float8 or in 8-bit codes."""

    def begin(self, p):
        if self.param_groups[0]["eight_bit"]:
            return {
                "m": Codes(
                    torch.full(p.shape, 127, dtype=torch.uint8), dynamic_map(True)
                )
            }
        return {"m": Codes(torch.zeros(p.shape, dtype=torch.float8_e4m3fn), None)}

    def move(self, p, state, lr):
        m = 0.9 * state["m"].numbers() + p.grad
        if hasattr(state["m"], "qmap"):
            state["m"].codes.copy_(
                (m[..., None] - state["m"].qmap).abs().argmin(-1).to(torch.uint8)
            )
        else:
            state["m"].codes.copy_(m.to(torch.float8_e4m3fn))
        p.sub_(lr * m)


class Prodigy(StandIn):
    """As Prodigy: the first weights, and sums of gradients, both flat."""

    def begin(self, p):
        every = self.param_groups[0].get("slice_p", 1)
        return {
            "p0": p.flatten()[::every].clone(),
            "s": torch.zeros_like(p.flatten()[::every]),
        }

    def move(self, p, state, lr):
        state["s"].add_(p.grad.flatten()[:: self.param_groups[0].get("slice_p", 1)])
        p.sub_(lr * p.grad)


class SGDScheduleFree(StandIn):
    """As schedule-free SGD: the parameter is y, the state z, and the weights to ship
    are x.
    """

    def begin(self, p):
        return {"z": p.clone(), "k": 0}

    def move(self, p, state, lr):
        rate = 1 / (state["k"] + 1)
        p.lerp_(state["z"], rate).add_(p.grad, alpha=lr * (0.9 * (1 - rate) - 1))
        state["z"].sub_(lr * p.grad)
        state["k"] += 1

    @torch.no_grad()
    def eval(self):
        for p, state in self.state.items():
            p.lerp_(state["z"], 1 - 1 / 0.9)


class Shampoo(StandIn):
    """As Shampoo: factors of both sides of a matrix, which have a square weight's
    shape, and momentum.
    """

    def begin(self, p):
        factors = {f"pre_cond_{i}": torch.eye(size) for i, size in enumerate(p.shape)}
        return {"momentum_buffer": torch.zeros_like(p), **factors}

    def move(self, p, state, lr):
        for i in range(p.ndim):
            rows = p.grad.movedim(i, 0).reshape(p.shape[i], -1)
            state[f"pre_cond_{i}"].add_(rows @ rows.T)
        state["momentum_buffer"].mul_(0.9).add_(p.grad)
        p.sub_(lr * state["momentum_buffer"])


class SOAP(StandIn):
    """As SOAP: squares along the directions of a basis have the weight's shape."""

    def begin(self, p):
        basis = [torch.linalg.qr(torch.randn(size, size)).Q for size in p.shape]
        return {
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
            "Q": basis,
            "GG": list(basis),
        }

    def move(self, p, state, lr):
        turned = p.grad
        for basis in state["Q"]:
            turned = torch.tensordot(turned, basis, dims=[[0], [0]])
        state["exp_avg"].mul_(0.9).add_(p.grad)
        state["exp_avg_sq"].mul_(0.9).addcmul_(turned, turned)
        p.sub_(lr * state["exp_avg"])


class Projected(StandIn):
    """As GaLore: moments of the gradient in a basis, of rank 4 or of the full one."""

    def begin(self, p):
        rank = min(self.param_groups[0]["rank"], *p.shape)
        return {
            "projector": SimpleNamespace(ortho_matrix=torch.eye(p.shape[0])[:, :rank]),
            "exp_avg": None,
        }

    def move(self, p, state, lr):
        basis = state["projector"].ortho_matrix
        state["exp_avg"] = basis.T @ p.grad + (
            0 if state["exp_avg"] is None else 0.9 * state["exp_avg"]
        )
        p.sub_(lr * basis @ state["exp_avg"])


class Wrapper(Optimizer):
    """As OSS and apex: an optimizer that has the groups, and another inside that
    steps.
    """

    def __init__(self, params, inner):
        super().__init__(params, {"lr": inner.param_groups[0]["lr"]})
        self.optim = inner

    def step(self, closure=None):
        return self.optim.step(closure)


# ---- what is right -------------------------------------------------------------------


def numbers_of(state, shape):
    """The numbers of a state that lie where the weight's entries do."""
    return [
        t.numbers() if isinstance(t, Codes) else t.reshape(shape)
        for _, t in tensors_in(state)
    ]


@pytest.mark.parametrize("make", [StandIn, Nested, Flat])
def test_moments_are_cleared_wherever_they_are(make):
    model, plain = net(), net()
    sparse = train(model, make(model.parameters()), steps=12, algorithm=churns())
    other = train(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
        steps=12,
        algorithm=churns(),
    )
    assert all(
        torch.equal(sparse.masks[name], other.masks[name]) for name in sparse.masks
    )
    assert torch.allclose(weights_of(model), weights_of(plain), atol=1e-6)


@pytest.mark.parametrize("make", [Nested, Flat])
def test_each_moment_is_zero_where_weights_are_pruned_and_where_they_grew(make):
    model = net()
    optimizer = make(model.parameters())
    sparse = train(model, optimizer, steps=2)
    before = sparse.masks["0.weight"]
    optimizer.zero_grad()
    cross_entropy(model(X), Y).backward()
    sparse.before_step()
    optimizer.step()
    sparse.after_step(2)
    after = sparse.masks["0.weight"]
    assert (after & ~before).any()
    for moment in (
        numbers_of(optimizer.state[model[0].weight], (12, 8)) if make is Flat else ()
    ):
        assert not moment[~(after & before)].any() and moment[after & before].any()
    if make is Nested:
        state = optimizer.state[model[0].weight]
        for moment in (state["by_rate"]["0.9"][0], state["graft"].m):
            assert not moment[~(after & before)].any() and moment[after & before].any()


def test_a_cleared_code_stands_for_zero_and_other_codes_stay():
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = EightBit([weight])
    weight.grad = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    optimizer.step()
    state = optimizer.state[weight]
    codes = state["state1"].clone()
    live = torch.tensor([[True, False], [False, True]])
    record = Record("w", weight, optimizer)
    clear_moments(record, live)
    assert torch.equal(state["state1"][live], codes[live])
    assert state["qmap1"][state["state1"].long()][~live].tolist() == [0.0, 0.0]
    assert state["qmap1"][0] < -0.9 and state["absmax1"].tolist() == [4.0]


def test_moments_in_codes_are_zero_where_weights_are_pruned():
    model = net()
    optimizer = EightBit(model.parameters())
    sparse = train(model, optimizer)
    state, mask = optimizer.state[model[0].weight], sparse.masks["0.weight"]
    numbers = state["qmap1"][state["state1"].long()]
    assert not numbers[~mask].any() and numbers[mask].any()


@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_subclass_of_codes_is_cleared_in_its_codes(eight_bit):
    model = net()
    optimizer = Subclassed(model.parameters(), eight_bit=eight_bit)
    sparse = train(model, optimizer)
    moment = optimizer.state[model[0].weight]["m"].numbers()
    mask = sparse.masks["0.weight"]
    assert not moment[~mask].any() and moment[mask].any()


def test_factors_of_square_weights_are_no_moments():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = Shampoo(model.parameters())
    sparse = train(model, optimizer)
    state, mask = optimizer.state[model[0].weight], sparse.masks["0.weight"]
    assert factors_in(optimizer) == {"pre_cond_"}
    # the identity, and squares
    assert torch.linalg.eigvalsh(state["pre_cond_0"]).min() >= 1.0 - 1e-5
    assert (
        torch.equal(state["pre_cond_1"], state["pre_cond_1"].T)
        and state["pre_cond_1"][~mask].any()
    )
    assert not state["momentum_buffer"][~mask].any()


def test_squares_along_directions_stay():
    model = net()
    optimizer = SOAP(model.parameters())
    sparse = train(model, optimizer)
    state, mask = optimizer.state[model[0].weight], sparse.masks["0.weight"]
    assert state["exp_avg_sq"].ne(0).all() and not state["exp_avg"][~mask].any()


def test_a_weight_that_grew_starts_where_it_is_for_prodigy():
    model = net()
    optimizer = Prodigy(model.parameters())
    sparse = train(model, optimizer, steps=5)  # masks changed in the last step
    state, mask = optimizer.state[model[0].weight], sparse.masks["0.weight"]
    assert (
        not state["p0"].view(12, 8)[~mask].any()
        and not state["s"].view(12, 8)[~mask].any()
    )
    kept = mask & (state["s"].view(12, 8) != 0)
    assert (state["p0"].view(12, 8)[kept] != model[0].weight[kept]).any()
    grew = mask & (state["s"].view(12, 8) == 0)
    assert grew.any() and torch.equal(
        state["p0"].view(12, 8)[grew], model[0].weight[grew]
    )


def test_what_schedule_free_ships_is_as_sparse_as_what_it_trains():
    model = net()
    optimizer = SGDScheduleFree(model.parameters())
    sparse = train(model, optimizer, steps=9)
    optimizer.eval()
    assert (
        not model[0].weight[~sparse.masks["0.weight"]].any() and model[0].weight.any()
    )


def rewinds():
    return sf.rewinding(
        sf.static(0.5, init="magnitude"), to=sf.never(), when=sf.at([4])
    )


class PureScheduleFree:
    """Schedule-free SGD as a pair of functions."""

    def init(self, params):
        return {
            "z": {name: p.clone() for name, p in params.items()},
            "k": torch.zeros(()),
        }

    def update(self, grads, state, *, params, inplace):
        rate = 1 / (state["k"] + 1)
        updates, z = {}, {}
        for name, y in params.items():
            new = y.lerp(state["z"][name], rate) + grads[name] * (
                0.1 * (0.9 * (1 - rate) - 1)
            )
            updates[name] = new - y
            z[name] = state["z"][name] - 0.1 * grads[name]
        return updates, {"z": z, "k": state["k"] + 1}


def test_an_iterate_starts_where_a_kept_weight_is_set():
    model = net()
    optimizer = SGDScheduleFree(model.parameters())
    # back to the first weights in the last step
    sparse = train(model, optimizer, steps=5, algorithm=rewinds())
    weight, mask = model[0].weight, sparse.masks["0.weight"]
    assert weight[mask].any() and torch.equal(optimizer.state[weight]["z"], weight)
    optimizer.eval()
    assert torch.allclose(weight, net()[0].weight.where(mask, 0.0), atol=1e-7)


@pytest.mark.parametrize("make", [rigl, rewinds])
def test_attach_is_with_optimizer_for_iterates_too(make):
    model = net(torch.float64)
    optimizer = SGDScheduleFree(model.parameters())
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    sparse = train(model, optimizer, algorithm=make())
    pure = sf.with_optimizer(make(), PureScheduleFree())
    state = pure.init(params)
    other = net(torch.float64)
    loss = lambda weights: cross_entropy(sf.modules.call(other, weights, X.double()), Y)  # noqa: E731
    for step in range(7):
        state = pure.update(state, torch.func.grad(loss)(sf.effective(state)), step)
    for name, parameter in model.named_parameters():
        assert torch.equal(sparse.masks[name], state.masks[name])
        assert torch.allclose(parameter, sf.effective(state)[name], atol=1e-12)
        mask = state.masks[name].expand(parameter.shape)
        z = optimizer.state[parameter]["z"]
        assert torch.allclose(z[mask], state.opt["z"][name][mask], atol=1e-12)


def test_lbfgs_forgets_a_history_of_weights_that_are_pruned():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    sparse = sf.attach(sf.set(0.5, when=sf.at([2])), model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(X), Y)
        loss.backward()
        return loss

    lengths, iterations = [], []
    for step in range(4):
        optimizer.step(closure)
        sparse.after_step(step)
        state = next(iter(optimizer.state.values()), {})
        lengths.append(len(state.get("old_dirs", ())))
        iterations.append(state.get("n_iter", 0))
        mask = torch.cat(
            [
                sparse.masks[name].expand(p.shape).reshape(-1)
                for name, p in model.named_parameters()
            ]
        )
        assert all(
            not vector[~mask].any() for _, vector in tensors_in(state) if vector.ndim
        )
    assert lengths[0] < lengths[1] and lengths[2] == 0
    assert iterations == [2, 4, 0, 2]


def test_lbfgs_forgets_the_history_of_dense_weights_before_its_first_step():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(X), Y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    sparse = sf.attach(sf.static(0.5, init="magnitude"), model, optimizer)
    before = weights_of(model)
    optimizer.step(closure)
    sparse.after_step(0)
    goes_on = weights_of(model)
    sparse.detach()
    nn.utils.vector_to_parameters(before, model.parameters())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    sparse = sf.attach(sf.static(0.5, init="magnitude"), model, optimizer)
    optimizer.step(closure)
    sparse.after_step(0)
    assert torch.equal(weights_of(model), goes_on)


@pytest.mark.parametrize("nested", [False, True])
def test_moments_of_the_optimizer_inside_a_wrapper_are_cleared(nested):
    model = net()
    optimizer = Wrapper(
        model.parameters(), torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    if nested:
        optimizer = Wrapper(model.parameters(), optimizer)
    train(model, optimizer, steps=12, algorithm=churns())
    assert torch.equal(weights_of(model), plain_adamw())


def test_a_wrapper_starts_again_with_the_optimizer_inside():
    model = net()
    optimizer = Wrapper(
        model.parameters(), torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    train(model, optimizer, steps=3, reset=sf.at([2]))
    assert not optimizer.optim.state


class Redirecting(Optimizer):
    """As Lightning's wrapper: no step hooks of its own, and a closure that does
    nothing.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self._optimizer, name)

    def step(self, closure=None):
        return self._optimizer.step(closure or (lambda: None))


def test_a_wrapper_without_step_hooks_is_taken_off():
    model = net()
    optimizer = Redirecting(torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert without_wrapper(optimizer) is optimizer._optimizer
    train(model, optimizer, steps=12, algorithm=churns())
    assert torch.equal(weights_of(model), plain_adamw())


def two_ranks(folder: Path) -> Cases:
    for bucket in (False, True):
        yield f"bucket={bucket}", lambda bucket=bucket: train_in_shards(bucket)
    yield "supermask", scores_in_shards
    yield "overlap", steps_in_hooks_of_ddp


def train_in_shards(bucket):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, parameters_as_bucket_view=bucket
    )
    train(model, optimizer, steps=12, algorithm=churns())
    assert torch.equal(weights_of(model), plain_adamw())


def scores_in_shards():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    algorithm = sf.supermask(0.5, mode="joint")
    model, plain = net(), net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    with pytest.raises(
        ValueError,
        match="would not move new parameters, such as 'scores.0.weight'.*extra_group",
    ):
        sf.attach(algorithm, model, optimizer)
    train(model, optimizer, algorithm=algorithm, extra_group={})
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), algorithm=algorithm)
    assert torch.equal(weights_of(model), weights_of(plain))


def steps_in_hooks_of_ddp():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-2
    )
    with pytest.raises(
        ValueError,
        match="attach: ZeroRedundancyOptimizer moves weights during backward, before "
        "masks",
    ):
        sf.attach(rigl(), model, optimizer)


@pytest.mark.deep
def test_sharded_moments_are_those_of_one_process(tmp_path):
    on_ranks(2, two_ranks, tmp_path)


# ---- a function of the user ----------------------------------------------------------


def test_a_function_clears_instead():
    class Ranked(Projected):
        pass

    def forget(state, entries):
        seen.append((sorted(state), entries.dtype, tuple(entries.shape)))
        state["exp_avg"] = None

    seen = []
    model = net()
    optimizer = Ranked([p for p in model.parameters() if p.ndim == 2], rank=4)
    for layer in (model[0], model[2]):
        layer.bias.requires_grad_(False)
    sparse = train(model, optimizer, clear=forget)
    sparse.check()
    assert seen[0] == (["exp_avg", "projector"], torch.bool, (12, 8))


def test_the_function_gets_the_entries_that_a_rule_would_clear():
    def clear(state, entries):
        state["m"].masked_fill_(entries, 0.0)

    runs = []
    for options in ({}, {"clear": clear}):
        model = net()
        train(model, StandIn(model.parameters()), **options)
        runs.append(weights_of(model))
    assert torch.equal(*runs)


def test_a_function_that_is_none_is_refused():
    model = net()
    with pytest.raises(
        TypeError,
        match=r"attach: expected clear to be a function of \(state, entries\), got str",
    ):
        sf.attach(rigl(), model, StandIn(model.parameters()), clear="m")


# ---- what is refused -----------------------------------------------------------------


class Tracked(StandIn):
    def begin(self, p):
        return {"m": torch.zeros_like(p), **self.param_groups[0]["also"](p)}


MEND = (
    r"; pass attach\(..., clear=f\), where f\(state, entries\) sets the moments in "
    r"`state`"
)


@pytest.mark.parametrize(
    ("also", "text"),
    [
        (
            lambda p: {"codes": torch.zeros(p.shape, dtype=torch.int8)},
            "'codes' holds torch.int8 entries, whose zero is",
        ),
        (
            lambda p: {"on": torch.ones(p.shape, dtype=torch.bool)},
            "'on' holds torch.bool entries, whose zero is not kn",
        ),
        (
            lambda p: {"low": torch.zeros(4, p.shape[-1])},
            r"'low' has shape \(4, 8\) for a weight of shape \(12, 8\)",
        ),
        (
            lambda p: {"two": torch.zeros(2, *p.shape)},
            r"'two' has shape \(2, 12, 8\) for a weight of shape \(12, 8\)",
        ),
        (
            lambda p: {"deep": [{"t": torch.zeros(p.shape[::-1])}]},
            r"'deep.0.t' has shape \(8, 12\) for a weight of",
        ),
        (
            lambda p: {"all": torch.zeros(160)},
            "'all' joins the entries of all parameters",
        ),
        (
            lambda p: {"projector": SimpleNamespace()},
            "'m' lies beside the basis 'projector': its entries may be",
        ),
        (
            lambda p: {"c": Codes(torch.zeros(6), None, p.shape)},
            "'c' is a Codes, which has no code of each entry",
        ),
    ],
)
def test_what_nobody_can_tell_is_refused_at_the_first_step(also, text):
    model = net()
    optimizer = Tracked(model.parameters(), also=also)
    where = (
        "^attach: cannot clear the moments of pruned weights of '0.weight' in the "
        f"state of Tracked: {text}"
    )
    with pytest.raises(ValueError, match=f"{where}.*{MEND}"):
        train(model, optimizer)


def test_it_is_refused_at_attach_where_the_optimizer_has_stepped():
    model = net()
    optimizer = Tracked(
        model.parameters(),
        also=lambda p: {"n": torch.zeros(p.shape, dtype=torch.int64)},
    )
    cross_entropy(model(X), Y).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError,
        match="attach: cannot clear the moments of pruned weights of '0.weight'.*'n' "
        "holds",
    ):
        sf.attach(rigl(), model, optimizer)
    assert sf.checkpoint.tree_equal(dict(model.state_dict()), dict(before))
    assert not optimizer._optimizer_step_pre_hooks
    assert sf.attach(sf.dense(), model, optimizer).is_attached


def test_after_a_refusal_detach_leaves_an_ordinary_module():
    model = net()
    optimizer = Tracked(
        model.parameters(),
        also=lambda p: {"n": torch.zeros(p.shape, dtype=torch.int64)},
    )
    sparse = sf.attach(rigl(), model, optimizer)
    cross_entropy(model(X), Y).backward()
    sparse.before_step()
    with pytest.raises(ValueError, match="attach: cannot clear the moments"):
        optimizer.step()
    sparse.detach()
    assert int(model[0].weight.count_nonzero()) == 24


@pytest.mark.parametrize("rank", [4, 8])
def test_moments_in_a_projection_are_refused(rank):
    model = net()
    optimizer = Projected([model[0].weight], rank=rank)
    rest = torch.optim.SGD(
        [p for p in model.parameters() if p is not model[0].weight], lr=0.1
    )
    sparse = sf.attach(rigl(), model, [optimizer, rest])
    cross_entropy(model(X), Y).backward()
    sparse.before_step()
    with pytest.raises(
        ValueError,
        match="'0.weight' in the state of Projected: 'exp_avg' lies beside the basis",
    ):
        optimizer.step()


def test_a_part_of_the_first_weights_is_refused():
    model = net()
    with pytest.raises(
        ValueError,
        match=r"in the state of Prodigy: 'p0' has shape \(9,\) for a weight of shape "
        r"\(12, 8",
    ):
        train(model, Prodigy(model.parameters(), slice_p=11))


def test_moments_of_blocks_are_refused():
    class DistributedShampoo(StandIn):
        pass

    model = net()
    with pytest.raises(
        ValueError,
        match="DistributedShampoo: it keeps moments of blocks of a weight; pass attach",
    ):
        sf.attach(rigl(), model, DistributedShampoo(model.parameters()))


def test_copies_of_the_weights_are_refused():
    model = net()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = Wrapper(model.parameters(), torch.optim.SGD(masters, lr=0.1))
    before = copy.deepcopy(model.state_dict())
    text = (
        "attach: Wrapper has a SGD inside, which moves copies of the weights .master "
        "weights, or on another device."
    )
    with pytest.raises(ValueError, match=text):
        sf.attach(rigl(), model, optimizer)
    assert sf.checkpoint.tree_equal(dict(model.state_dict()), dict(before))


def test_steps_during_backward_are_refused():
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    sparse = sf.attach(rigl(), model, list(optimizers.values()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = weights_of(model)
    with pytest.raises(
        RuntimeError,
        match="An optimizer that steps during backward, in hooks of parameters, moves",
    ):
        cross_entropy(model(X), Y).backward()
    assert torch.equal(weights_of(model), before) and sparse.is_attached


# torch 2.11 raises it at itself
@pytest.mark.filterwarnings("ignore:`torch.jit.interface` is deprecated")
def test_steps_during_backward_that_torch_makes_are_refused_at_attach():
    from torch.distributed.optim import (
        _apply_optimizer_in_backward,
        _get_in_backward_optimizers,
    )

    model = net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(
        ValueError,
        match="attach: SGD moves weights during backward, before masks see the "
        "gradients",
    ):
        sf.attach(rigl(), model, _get_in_backward_optimizers(model))


# ---- parts ---------------------------------------------------------------------------


def one(state, shape=(2, 3), optimizer=torch.optim.SGD):
    weight = nn.Parameter(torch.ones(shape))
    made = optimizer([weight], lr=0.1)
    made.state[weight] = state
    return Record("w", weight, made), made


def test_tensors_are_found_in_loops_of_objects():
    state = {"m": torch.ones(2)}
    state["self"] = state
    assert [path for path, _ in tensors_in(state)] == ["m"]


def test_statistics_of_several_entries_are_not_found():
    record, optimizer = one(
        {"step": torch.tensor(3.0), "row": torch.ones(2), "column": torch.ones(1, 3)}
    )
    assert found_in(record, optimizer, optimizer.state[record.parameter]) == []
    check_known(optimizer, [record])


def test_states_of_a_parameter_come_once():
    record, optimizer = one({"m": torch.ones(2, 3)})
    around = Wrapper([record.parameter], optimizer)
    around.again = optimizer
    assert inner_optimizers(around) == [optimizer]
    assert len(optimizer_states(Record("w", record.parameter, around))) == 1
    check_optimizer(around, [])


@pytest.mark.parametrize(
    ("kind", "options", "path", "first"),
    [
        ("Yogi", {"initial_accumulator": 1e-6}, "exp_avg", 1e-6),
        ("Adai", {}, "beta1_prod", 1.0),
        ("DAdaptAdaGrad", {}, "alpha_k", 1e-6),
        ("VSGD", {"pbg2": 0.5, "pbhg2": 0.25}, "bhg", 0.25),
        ("VSGD", {"pbg2": 0.5, "pbhg2": 0.25}, "mug", 0.0),
    ],
)
def test_moments_that_do_not_start_at_zero(kind, options, path, first):
    weight = nn.Parameter(torch.ones(2))
    optimizer = type(kind, (StandIn,), {})([weight], **options)
    assert first_value(optimizer, weight, path) == first
    assert not joins(optimizer)


# ---- torch's own optimizers ----------------------------------------------------------


def made_by(kind="SGD", shape=(2,), dtype=torch.float32, **options):
    weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    return Record(
        "w", weight, getattr(torch.optim, kind)([weight], **{"lr": 0.1, **options})
    )


def test_only_moments_of_the_shape_are_cleared():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {
        "step": torch.tensor(3.0),
        "average": torch.tensor([1.0, torch.nan]),
        "row": torch.ones(1),
    }
    clear_moments(Record("w", weight, optimizer), torch.tensor([True, False]))
    state = optimizer.state[weight]
    assert (state["step"].item(), state["average"].tolist(), state["row"].tolist()) == (
        3.0,
        [1.0, 0.0],
        [1.0],
    )


ENTRY_BY_ENTRY = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
]


@pytest.mark.parametrize("name", ENTRY_BY_ENTRY)
def test_these_optimizers_leave_zeros_alone(name):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 4, generator=generator) < 0.5
    weight = torch.nn.Parameter(torch.randn(4, 4, generator=generator).where(mask, 0.0))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    assert zeros_stay(optimizer, [torch.float32])
    for _ in range(5):
        weight.grad = torch.randn(4, 4, generator=generator).where(mask, 0.0)
        optimizer.step()
        assert not weight[~mask].any()
        assert not torch.signbit(weight[~mask]).any()


def test_other_optimizers_are_not_trusted():
    weight = torch.nn.Parameter(torch.ones(2, 2))

    class Own(torch.optim.SGD):
        pass

    assert not zeros_stay(torch.optim.Muon([weight]), [torch.float32])
    assert not zeros_stay(Own([weight], lr=0.1), [torch.float32])


@pytest.mark.parametrize(
    ("kind", "options", "dtype", "stays"),
    [
        ("Adam", {}, torch.float32, True),
        ("Adam", {}, torch.bfloat16, True),
        ("Adam", {}, torch.float16, False),
        ("Adam", {"eps": 1e-4}, torch.float16, True),
        ("Adam", {"eps": 0.0}, torch.float32, False),
        (
            "Adam",
            {"eps": 1e-40},
            torch.float32,
            False,
        ),  # subnormal: some processors take it for zero
        ("Adam", {"lr": torch.tensor(0.1)}, torch.float32, True),
        ("SGD", {}, torch.float16, True),
        ("SGD", {"lr": math.inf}, torch.float32, False),
        ("SGD", {"lr": 20.0, "weight_decay": 0.1}, torch.float32, False),
        ("ASGD", {"lr": 20.0, "lambd": 0.1}, torch.float32, False),
    ],
)
def test_numbers_under_which_zeros_may_go(kind, options, dtype, stays):
    assert zeros_stay(made_by(kind, dtype=dtype, **options).optimizer, [dtype]) is stays


def test_numbers_are_read_as_they_are_now():
    optimizer = made_by("Adam").optimizer
    assert zeros_stay(optimizer, [torch.float32])
    optimizer.param_groups[0]["eps"] = 0.0
    assert not zeros_stay(optimizer, [torch.float32])


@pytest.mark.parametrize(
    ("kind", "options", "name", "first"),
    [
        ("Rprop", {"lr": 0.25}, "step_size", 0.25),
        ("Rprop", {"lr": 0.25}, "prev", 0.0),
        ("Adagrad", {"initial_accumulator_value": 0.5}, "sum", 0.5),
        ("Adam", {}, "exp_avg", 0.0),
        ("ASGD", {}, "ax", 0.0),
    ],
)
def test_moments_start_where_torch_starts_them(kind, options, name, first):
    record = made_by(kind, **options)
    for _ in range(2):
        record.parameter.grad = torch.tensor([1.0, -2.0])
        record.optimizer.step()
    kept = record.optimizer.state[record.parameter][name][0].item()
    clear_moments(record, torch.tensor([True, False]), torch.zeros(2))
    assert record.optimizer.state[record.parameter][name].tolist() == [kept, first]


def test_moments_of_changed_leaves_alone_are_read():
    record = made_by("Adam", shape=(2, 2))
    record.optimizer.state[record.parameter]["exp_avg"] = torch.ones(2, 2)
    state = sf.static(0.5, init="magnitude").init({"w": torch.ones(2, 2)})
    mask = state.masks["w"]
    record.support = mask
    clear_changed([(record, state.params["w"], mask)], state.params)
    assert record.optimizer.state[record.parameter]["exp_avg"].all()
    record.support = ~mask
    clear_changed([(record, state.params["w"], mask)], state.params)
    assert not record.optimizer.state[record.parameter]["exp_avg"].any()
