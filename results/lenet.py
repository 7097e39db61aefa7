"""LeNet-300-100 on 5,000 digits of MNIST, in loops of torch.optim: methods by the share
of weights that is kept.

Runs of a seed share images, batches and initial weights. A job is one run, but for
tickets: their rounds are one chain.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsefn as sf
from results import data
from results.jobs import Job, Plan, Rates, Row, Task, each, learning_rate

VERSION = 2
SIZES = (784, 300, 100, 10)
BATCH, MOMENTUM, DECAY = 100, 0.9, 1e-4
LEVELS = (1, 2, 3, 5, 10)  # per cent kept
SHOWN = 3  # the level of what is run at one level
ROUNDS = (50, 25, 10, 5, 3, 2, 1)  # per cent that is left after each round of IMP
EARLY = 10  # steps after which the weights are that tickets go back to
SCORED = 512  # images that masks before training are chosen with

AT_START = ("SNIP", "GraSP", "SynFlow")
METHODS = ("static", "SET", "RigL", "SNFS", "DSR", "DeepR", "GMP", *AT_START)
SCALED = ("static, scaled start", "RigL, scaled start")
TUNED = ("dense", *METHODS, "IMP")
ENDS = (str(LEVELS[0]), str(LEVELS[-1]))
RATES = (0.4, 0.2, 0.8)
WITHOUT_MOMENTUM = (2.0, 1.0, 4.0)  # DeepR's noise and signs are those of plain SGD


# ---- networks and algorithms ---------------------------------------------------------


def fresh(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """Linear layers with He's normal weights and zero biases, from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layer = nn.Linear(a, b, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            layer.weight.normal_(0, (2 / a) ** 0.5, generator=generator)
            layer.bias.zero_()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def network(seed: int) -> nn.Sequential:
    """LeNet-300-100."""
    return fresh(SIZES, seed)


def moving_options(steps: int) -> dict[str, Any]:
    """When masks move, and how much of them: 30 times, in the first three quarters of a
    run, less and less.
    """
    stop = 3 * steps // 4
    return {
        "when": sf.every(steps // 40, stop=stop),
        "drop_fraction": sf.schedules.cosine_decay(0.3, stop),
    }


def algorithm(method: str, sparsity: float, key: Tensor, steps: int) -> sf.Algorithm:
    """A method that moves masks while it trains, or fixes them at random."""
    erk, stop = sf.budgets.erk(), 3 * steps // 4
    kept = (1 - sparsity) * sum(a * b for a, b in itertools.pairwise(SIZES))
    moving = {**moving_options(steps), "distribution": erk, "key": key}
    match method.split(",")[0]:
        case "dense":
            return sf.dense()
        case "static":
            return sf.static(sparsity, distribution=erk, key=key)
        case "SET":
            return sf.set(sparsity, **moving)
        case "RigL":
            return sf.rigl(sparsity, **moving)
        case "SNFS":
            return sf.snfs(sparsity, **moving)
        case "DSR":
            target = max(1, round(0.05 * kept))
            return sf.methods.dsr(
                sparsity, when=moving["when"], target=target, key=key, distribution=erk
            )
        case "DeepR":
            return sf.methods.deep_rewiring(sparsity, key=key, distribution=erk)
        case "GMP":
            cubic = sf.schedules.polynomial(0.0, sparsity, begin=0, end=stop)
            return sf.gmp(
                cubic,
                when=sf.every(steps // 40, stop=stop + 1),
                distribution=sf.budgets.global_(),
            )
    raise ValueError(f"no method {method}")


def masks_at_start(
    method: str,
    net: nn.Module,
    sparsity: float,
    x: Tensor,
    y: Tensor,
    rounds: int,
    **options: Any,
) -> Any:
    """SNIP, GraSP, SynFlow or magnitude of a fresh network, each by its published
    algorithm.
    """
    params = sf.modules.params_of(net)

    def loss(params: Any, x: Tensor, y: Tensor, temperature: float = 1.0) -> Tensor:
        logits, _ = sf.modules.call_with_buffers(
            net, params, sf.modules.buffers_of(net), x
        )
        return functional.cross_entropy(logits / temperature, y)

    grads, steps = params, 1
    if method == "SNIP":
        chosen, grads = sf.methods.snip(sparsity), torch.func.grad(loss)(params, x, y)
    elif method == "GraSP":
        chosen = sf.methods.grasp(sparsity, loss, (x, y), **options)
    elif method == "SynFlow":
        chosen, steps = (
            sf.methods.synflow(sparsity, net, x.shape[1:], rounds=rounds),
            rounds,
        )
    else:
        chosen = sf.one_shot(sparsity, distribution=sf.budgets.global_())
    state = chosen.init(params)
    for step in range(steps):
        state = chosen.update(state, grads, step)
    return state.masks


@torch.no_grad()
def scale(net: nn.Module, masks: Any) -> None:
    """He's weights for the inputs that a unit has left: divided by the root of each
    leaf's density.
    """
    for path, weight in net.named_parameters():
        if masks[path].ndim:
            weight /= masks[path].float().mean().sqrt()


# ---- training ------------------------------------------------------------------------


@functools.cache
def images(seed: int, tuning: bool) -> data.Split:
    """Those of a seed."""
    return data.split(*data.mnist(), seed, tuning=tuning)


def batches(n: int, steps: int, seed: int) -> Tensor:
    """The indices of every batch, the same for all methods of a seed."""
    generator, per = torch.Generator().manual_seed(1000 + seed), n // BATCH
    orders = [
        torch.randperm(n, generator=generator)[: per * BATCH]
        for _ in range(-(-steps // per))
    ]
    return torch.cat(orders).view(-1, BATCH)[:steps]


def loop(
    net: nn.Module,
    optimizer: Any,
    split: data.Split,
    seed: int,
    span: range,
    total: int,
    rate: float,
) -> Iterator[int]:
    """A span of a run of `total` steps: the caller moves the weights where it
    yields.
    """
    schedule = learning_rate(rate, total)
    for step, index in zip(
        span, batches(len(split.y), total, seed)[span.start : span.stop], strict=True
    ):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        functional.cross_entropy(net(split.x[index]), split.y[index]).backward()
        yield step
        optimizer.zero_grad()


def sgd(net: nn.Module, rate: float, momentum: float = MOMENTUM) -> torch.optim.SGD:
    """The optimizer of all runs with images."""
    return torch.optim.SGD(
        net.parameters(), lr=rate, momentum=momentum, weight_decay=DECAY
    )


def train(
    net: nn.Module,
    chosen: sf.Algorithm,
    split: data.Split,
    seed: int,
    steps: int,
    rate: float,
    *,
    momentum: float = MOMENTUM,
    at: Callable[[int], None] = lambda done: None,
) -> sf.State:
    """Train in place with an algorithm; `at` is called after every step with their
    number.
    """
    optimizer = sgd(net, rate, momentum)
    sparse = sf.attach(chosen, net, optimizer)
    for step in loop(net, optimizer, split, seed, range(steps), steps, rate):
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
        at(step + 1)
    state = sparse.state
    sparse.detach()
    return state


@torch.no_grad()
def measured(net: nn.Module, split: data.Split) -> Row:
    """Test error in per cent, and loss."""
    net.eval()
    out = net(split.test_x)
    wrong = int((out.argmax(1) != split.test_y).sum())
    loss = float(functional.cross_entropy(out, split.test_y))
    return {"error": round(100 * wrong / len(split.test_y), 4), "loss": round(loss, 6)}


def sparsity_of(level: str) -> float:
    """Of "3" per cent kept."""
    return 1 - float(level) / 100


def prepared(
    method: str, level: str, seed: int, plan: Plan, split: data.Split
) -> tuple[nn.Module, sf.Algorithm]:
    """A network and what is attached to it, before training."""
    net, key, sparsity = network(seed), sf.random.key(seed), sparsity_of(level)
    x, y = split.x[:SCORED], split.y[:SCORED]
    name, *how = method.split(", ")
    if name in AT_START:
        options = {"temperature": 1.0} if how == ["temperature 1"] else {}
        masks = masks_at_start(name, net, sparsity, x, y, plan.rounds, **options)
        if how and how[0].startswith("shuffled"):
            masks = sf.masks.shuffle(
                masks, key, within=1 if how[0].endswith("inputs") else None
            )
        return net, sf.from_masks(masks)
    chosen = algorithm(name, sparsity, key, plan.steps)
    if method in SCALED:
        scale(net, chosen.init(sf.modules.params_of(net)).masks)
    return net, chosen


def one(
    method: str, level: str, seed: int, plan: Plan, rate: float, tuning: bool = False
) -> Row:
    """Train one network."""
    split = images(seed, tuning)
    net, chosen = prepared(method, level, seed, plan, split)
    momentum = 0.0 if method == "DeepR" else MOMENTUM
    train(net, chosen, split, seed, plan.steps, rate, momentum=momentum)
    return measured(net, split)


# ---- tickets -------------------------------------------------------------------------


def tickets(seed: int, plan: Plan, rate: float, tuning: bool = False) -> list[Row]:
    """Rounds of training, global magnitude pruning, and the weights of an early step;
    then two controls.
    """
    split, net, rows = images(seed, tuning), network(seed), []
    early: dict[str, Tensor] = {}

    def keep(done: int) -> None:
        if done == min(EARLY, plan.steps // 4):
            early.update(copy.deepcopy(net.state_dict()))

    def trained(start: dict[str, Tensor], masks: Any) -> nn.Module:
        again = network(seed)
        again.load_state_dict(start)
        train(again, sf.from_masks(masks), split, seed, plan.steps, rate)
        return again

    train(net, sf.dense(), split, seed, plan.steps, rate, at=keep)
    for kept in ROUNDS:
        cut = sf.one_shot(1 - kept / 100, distribution=sf.budgets.global_())
        params = sf.modules.params_of(net)
        masks = cut.update(cut.init(params), params, 0).masks
        net = trained(early, masks)
        if kept in LEVELS:
            rows.append({"arm": "IMP", "level": str(kept), **measured(net, split)})
        if kept == SHOWN and not tuning:
            other = trained(network(500 + seed).state_dict(), masks)
            moved = trained(early, sf.masks.shuffle(masks, sf.random.key(seed)))
            rows.append(
                {
                    "arm": "ticket, other weights",
                    "level": str(SHOWN),
                    **measured(other, split),
                }
            )
            rows.append(
                {
                    "arm": "ticket, shuffled mask",
                    "level": str(SHOWN),
                    **measured(moved, split),
                }
            )
    return rows


# ---- jobs ----------------------------------------------------------------------------


def jobs(plan: Plan) -> list[Job]:
    """All of this group."""
    controls = [
        f"{name}, {how}"
        for how in ("shuffled", "shuffled within inputs")
        for name in AT_START
    ]
    arms = [("dense", "100")]
    arms += [(method, str(level)) for level in LEVELS for method in (*METHODS, *SCALED)]
    arms += [(method, str(SHOWN)) for method in (*controls, "GraSP, temperature 1")]
    chain = [("IMP", str(level)) for level in LEVELS]
    chain += [
        (f"ticket, {how}", str(SHOWN)) for how in ("other weights", "shuffled mask")
    ]
    made = [job for arm in arms for job in each("lenet", arm[0], [arm], plan)]
    return made + each("lenet", "tickets", chain, plan)


def tasks() -> list[Task]:
    """Learning rates to choose."""
    levels = {"dense": ("100",)}
    rates = {"DeepR": WITHOUT_MOMENTUM}
    return [
        Task("lenet", name, levels.get(name, ENDS), rates.get(name, RATES))
        for name in TUNED
    ]


def run(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """Rows of a job."""
    (seed,) = job.seeds
    if job.name == "tickets":
        return tickets(seed, plan, rates["lenet IMP"])
    ((arm, level),) = job.arms
    # that of the method, whatever was done to its start or mask
    rate = rates[f"lenet {arm.split(',')[0]}"]
    return [{"arm": arm, "level": level, **one(arm, level, seed, plan, rate)}]


def tuned(
    task: Task, seeds: tuple[int, ...], plan: Plan, rate: float
) -> list[dict[str, float]]:
    """The error of each seed at each level of the task, on the data for tuning."""
    if task.method == "IMP":
        rows = [
            {
                row["level"]: row["error"]
                for row in tickets(seed, plan, rate, tuning=True)
            }
            for seed in seeds
        ]
        return [{level: errors[level] for level in task.levels} for errors in rows]
    return [
        {
            level: one(task.method, level, seed, plan, rate, tuning=True)["error"]
            for level in task.levels
        }
        for seed in seeds
    ]
