"""A small convolutional network on 5,000 digits of MNIST: what needs layers whose
weights are used at many places.

Where weights lie (ERK or uniform, at equal parameters and at equal FLOPs), shuffled
masks, and filters that go whole.
"""

import functools
import time
from typing import Any

import torch
from torch import Tensor, nn

import sparsefn as sf
from results.jobs import Job, Plan, Rates, Row, Task, each
from results.lenet import (
    SCORED,
    images,
    loop,
    masks_at_start,
    measured,
    moving_options,
    sgd,
    train,
)

VERSION = 2
WIDTHS = (16, 32, 64)
LAYOUT_LEVELS = (20, 10)  # per cent kept by the uniform network
SHUFFLE_LEVELS = (20, 5)
LAYOUTS = ("uniform", "ERK", "ERK of equal FLOPs")
AT_START = ("SNIP", "SynFlow")
# of all steps: filters begin to go, have gone, and the network gets smaller
BEGUN, PRUNED, SHRUNK = (0.1, 0.55, 0.6)
# runs of the narrow network that take as long as one that is pruned, on one thread;
# rows have both times
LONG = 1.35
SERVED = 100  # images in a batch that is timed
RATES = (0.8, 0.4, 1.6)
ENDS = tuple(map(str, LAYOUT_LEVELS))
TUNED = {"dense": ("100",), "static, ERK": ENDS, "RigL, ERK": ENDS, "narrow": ("half",)}
FILTERS = ("filters pruned", "narrow", "narrow, as long")


# ---- network -------------------------------------------------------------------------


def network(seed: int, share: float = 1.0) -> nn.Sequential:
    """Three convolutions with batch norm, a mean and a linear layer; He's weights from
    the seed alone.
    """
    a, b, c = (int(share * width) for width in WIDTHS)
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 28, 28))]
    for before, after, size in ((1, a, 5), (a, b, 3), (b, c, 3)):
        conv = nn.Conv2d(
            before, after, size, stride=2, padding=size // 2, bias=False, device="meta"
        )
        layers += [conv.to_empty(device="cpu"), nn.BatchNorm2d(after), nn.ReLU()]
    head = nn.Linear(c, 10, device="meta").to_empty(device="cpu")
    net = nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), head)
    with torch.no_grad():
        for module in net:
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.normal_(
                    0, (2 / module.weight[0].numel()) ** 0.5, generator=generator
                )
        head.bias.zero_()
    return net


# ---- where weights lie ---------------------------------------------------------------


def flops(distribution: Any, sparsity: float) -> int:
    """Of one image, counting what is kept."""
    net = network(0)
    state = sf.static(sparsity, distribution=distribution).init(
        sf.modules.params_of(net)
    )
    return sf.report.flops(net, state, torch.zeros(1, 784)).total.sparse


@functools.cache
def layout(name: str, level: int) -> tuple[Any, float]:
    """A budget and the sparsity to ask it for: papers call uniform what leaves the
    first layer dense.
    """
    asked = 1 - level / 100
    uniform, erk = sf.budgets.uniform(dense_first=True), sf.budgets.erk()
    if name == "uniform":
        sizes = [p.numel() for p in network(0).parameters() if p.ndim > 1]
        return uniform, sf.budgets.compensated(asked, sum(sizes), sizes[0])
    if name == "ERK":
        return erk, asked
    wanted, low, high = flops(*layout("uniform", level)), 0.0, 1.0
    for _ in range(20):  # more zeros, fewer FLOPs
        middle = (low + high) / 2
        low, high = (middle, high) if flops(erk, middle) > wanted else (low, middle)
    return erk, high


def laid_out(
    method: str,
    where: str,
    level: str,
    seed: int,
    plan: Plan,
    rate: float,
    tuning: bool = False,
) -> Row:
    """Train with a random mask that stays, or with RigL."""
    distribution, sparsity = layout(where, int(level))
    key, net, split = sf.random.key(seed), network(seed), images(seed, tuning)
    if method == "static":
        chosen = sf.static(sparsity, distribution=distribution, key=key)
    else:
        chosen = sf.rigl(
            sparsity,
            **moving_options(plan.conv_steps),
            distribution=distribution,
            key=key,
        )
    state = train(net, chosen, split, seed, plan.conv_steps, rate)
    counted = sf.report.flops(net, state, split.test_x[:1]).total.sparse
    return {
        **measured(net, split),
        "kept": sf.masks.n_kept(state.masks),
        "flops": counted,
    }


# ---- masks before training -----------------------------------------------------------


def chosen_before(method: str, level: str, seed: int, plan: Plan, rate: float) -> Row:
    """SNIP or SynFlow, as it is or with the masks of each layer shuffled."""
    name, *how = method.split(", ")
    net, split = network(seed), images(seed, False)
    x, y = split.x[:SCORED], split.y[:SCORED]
    masks = masks_at_start(name, net, 1 - int(level) / 100, x, y, plan.rounds)
    if how:
        masks = sf.masks.shuffle(masks, sf.random.key(seed))
    train(net, sf.from_masks(masks), split, seed, plan.conv_steps, rate)
    return measured(net, split)


# ---- filters -------------------------------------------------------------------------


def milliseconds(nets: list[nn.Module], x: Tensor, calls: int = 50) -> list[float]:
    """The fastest call of each, taken in turn: other work on the machine only adds."""
    best = [float("inf")] * len(nets)
    with torch.no_grad():
        for _ in range(calls):
            for i, net in enumerate(nets):
                begin = time.perf_counter()
                net(x)
                best[i] = min(best[i], 1000 * (time.perf_counter() - begin))
    return [round(ms, 4) for ms in best]


def pruned_by_filters(seed: int, plan: Plan, rate: float) -> Row:
    """Half of the filters of every layer go while the network trains; the smaller
    network trains on.
    """
    steps, net, split = plan.conv_steps, network(seed), images(seed, False)
    every, last, change = steps // 40, int(PRUNED * steps), int(SHRUNK * steps)
    groups = sf.shrinking.groups(net.eval(), split.x[:2])
    gradual = sf.schedules.polynomial(0.0, 0.5, begin=int(BEGUN * steps), end=last)
    chosen = sf.gmp(
        gradual, when=sf.every(every, stop=last + 1), pattern=groups.pattern()
    )
    begin, optimizer = time.process_time(), sgd(net.train(), rate)
    sparse = sf.attach(chosen, net, optimizer)
    for step in loop(net, optimizer, split, seed, range(change), steps, rate):
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
    seconds = time.process_time() - begin
    made = sf.shrinking.smaller(net.eval(), sparse.state, split.x[:2])
    begin, small = time.process_time(), made.module.train()
    after = sgd(small, rate)
    after.load_state_dict(sf.shrinking.carry_optimizer(optimizer, net, made))
    for _ in loop(small, after, split, seed, range(change, steps), steps, rate):
        after.step()
    seconds += time.process_time() - begin
    row = measured(small, split)
    ours, narrow = milliseconds(
        [small, network(seed, 0.5).eval()], split.test_x[:SERVED]
    )
    return {**row, "seconds": round(seconds, 3), "ms": ours, "narrow_ms": narrow}


def plain(
    seed: int, share: float, steps: int, rate: float, tuning: bool = False
) -> Row:
    """A network of a width, trained without masks."""
    net, split = network(seed, share), images(seed, tuning)
    begin = time.process_time()
    train(net, sf.dense(), split, seed, steps, rate)
    return {**measured(net, split), "seconds": round(time.process_time() - begin, 3)}


# ---- jobs ----------------------------------------------------------------------------


def jobs(plan: Plan) -> list[Job]:
    """All of this group."""
    layouts = [
        (f"{method}, {where}", str(k))
        for k in LAYOUT_LEVELS
        for method in ("static", "RigL")
        for where in LAYOUTS
    ]
    before = [
        (name + how, str(k))
        for k in SHUFFLE_LEVELS
        for name in AT_START
        for how in ("", ", shuffled")
    ]
    arms = [("dense", "100"), *layouts, *before, *((name, "half") for name in FILTERS)]
    return [job for arm in arms for job in each("conv", arm[0], [arm], plan)]


def tasks() -> list[Task]:
    """Learning rates to choose."""
    return [Task("conv", method, levels, RATES) for method, levels in TUNED.items()]


def trained(
    arm: str, level: str, seed: int, plan: Plan, rate: float, tuning: bool = False
) -> Row:
    """The row of an arm."""
    steps = plan.conv_steps
    match arm.split(", "):
        case ["dense"]:
            return plain(seed, 1.0, steps, rate, tuning)
        case ["narrow", *longer]:
            return plain(
                seed, 0.5, round(LONG * steps) if longer else steps, rate, tuning
            )
        case ["filters pruned"]:
            return pruned_by_filters(seed, plan, rate)
        case ["static" | "RigL" as method, where]:
            return laid_out(method, where, level, seed, plan, rate, tuning)
    return chosen_before(arm, level, seed, plan, rate)


RATE_OF = {
    "dense": "dense",
    "filters pruned": "dense",
    "narrow": "narrow",
    "RigL": "RigL, ERK",
}  # others: static's


def run(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """The row of a job."""
    (seed,), ((arm, level),) = job.seeds, job.arms
    name = RATE_OF.get(arm.split(", ")[0], "static, ERK")
    return [
        {
            "arm": arm,
            "level": level,
            **trained(arm, level, seed, plan, rates[f"conv {name}"]),
        }
    ]


def tuned(
    task: Task, seeds: tuple[int, ...], plan: Plan, rate: float
) -> list[dict[str, float]]:
    """The error of each seed at each level of the task, on the data for tuning."""
    return [
        {
            level: trained(task.method, level, seed, plan, rate, tuning=True)["error"]
            for level in task.levels
        }
        for seed in seeds
    ]
