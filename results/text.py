"""A small character-level transformer on Python's standard library: pruned with data,
and tuned by low-rank updates.
"""

import copy
import functools
import math
import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsefn as sf
from results import data
from results.jobs import Job, Plan, Rates, Row, Task, each, learning_rate
from sparsefn.posttraining.calibration import in_order

VERSION = 2
BLOCKS, HEADS, WINDOW, BATCH = 2, 4, 64, 16
RANK = 8
LEVELS = ("50", "70", "2:4")  # per cent pruned, or n of m kept
METHODS = ("magnitude", "Wanda", "SparseGPT")
START = "70"  # what is tuned: pruned by SparseGPT to this level
TUNED = (
    "dense",
    "low rank, keeps zeros",
    "low rank, masked at the end",
    "kept weights",
)
RATES = (1.6e-2, 8e-3, 3.2e-2)


# ---- model ---------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to earlier characters, then an MLP; each adds to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Characters to logits of the next one."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(characters, width),
            nn.Embedding(WINDOW, width),
        )
        self.blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, index: Tensor) -> Tensor:
        x = self.tokens(index) + self.places.weight[: index.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def model(characters: int, width: int, seed: int) -> Model:
    """Weights from the seed alone: PyTorch's own, and the global generator as it
    was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(characters, width)


# ---- training ------------------------------------------------------------------------


def windows(train: Tensor, count: int, seed: int) -> Tensor:
    """Windows of the text, and the character after each."""
    starts = torch.randint(
        len(train) - WINDOW, (count,), generator=torch.Generator().manual_seed(seed)
    )
    return train[starts[:, None] + torch.arange(WINDOW + 1)]


def train(
    net: nn.Module,
    chosen: sf.Algorithm,
    text: Tensor,
    seed: int,
    steps: int,
    rate: float,
) -> sf.State:
    """Train in place with AdamW."""
    optimizer = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=rate
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(1.0, steps))
    sparse = sf.attach(chosen, net, optimizer)
    for step, batch in enumerate(windows(text, steps * BATCH, seed).split(BATCH)):
        functional.cross_entropy(
            net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        ).backward()
        sparse.before_step()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        sparse.after_step(step)
    state = sparse.state
    sparse.detach()
    return state


@torch.no_grad()
def bits(net: nn.Module, test: Tensor) -> float:
    """Bits per character, in windows side by side."""
    sides, nats = (
        test[: (len(test) - 1) // WINDOW * WINDOW + 1].unfold(0, WINDOW + 1, WINDOW),
        0.0,
    )
    for part in sides.split(4 * BATCH):
        logits = net(part[:, :-1]).flatten(0, 1)
        nats += float(
            functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum")
        )
    return round(nats / sides[:, 1:].numel() / math.log(2), 6)


@functools.lru_cache(4)
def dense(seed: int, plan: Plan, rate: float, tuning: bool) -> Model:
    """The trained model of a seed."""
    text = data.text(seed, tuning=tuning)
    net = model(len(text.characters), plan.width, seed)
    train(net, sf.dense(), text.train, seed, plan.text_steps, rate)
    return net


# ---- pruning -------------------------------------------------------------------------


def prune(
    method: str, level: str, net: nn.Module, text: Tensor, seed: int, plan: Plan
) -> tuple[nn.Module, sf.State]:
    """The pruned model, block after block; nothing is trained again."""
    where = sf.modules.weights_of(net, skip=["head"])
    pattern = sf.patterns.nm(*map(int, level.split(":"))) if ":" in level else None
    sparsity = None if pattern else int(level) / 100
    shape = {} if pattern is None else {"pattern": pattern}
    if method == "magnitude":
        chosen = sf.one_shot(sparsity, where=where, **shape)
        state = chosen.init(sf.modules.params_of(net))
        state = chosen.update(state, state.params, 0)
        return sf.modules.bake(net, state), state
    x, blocks = (
        windows(text, plan.windows, 1000 + seed)[:, :-1],
        [f"blocks.{i}.*" for i in range(BLOCKS)],
    )
    rule = sf.methods.wanda if method == "Wanda" else sf.methods.sparsegpt
    of = "square" if method == "Wanda" else ("count", "square", "gram")
    state = in_order(
        net,
        None,
        blocks,
        lambda stats: rule(sparsity, stats, **shape),
        x,
        of=of,
        chunk_size=32,
    )
    return sf.modules.bake(net, state), state


# ---- tuning --------------------------------------------------------------------------


def careless() -> sf.reparam.Reparametrisation:
    """W + 2 B A, without the mask: plain LoRA."""

    def apply(
        latents: Any, step: Any, key: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        a, b = latents["a"], latents["b"]
        made = {
            path: base + 2.0 * (b[path] @ a[path])
            for path, base in latents["base"].items()
        }
        return made, {
            path: torch.ones_like(base, dtype=torch.bool)
            for path, base in latents["base"].items()
        }

    return sf.reparam.low_rank(RANK, 2.0 * RANK)._replace(apply=apply, settled=None)


def tune(
    way: str,
    base: nn.Module,
    masks: Any,
    text: Tensor,
    seed: int,
    plan: Plan,
    rate: float,
) -> nn.Module:
    """A pruned model, tuned in one of three ways; its zeros are those of before."""
    net, where = copy.deepcopy(base), sf.modules.weights_of(base, skip=["head"])
    if way == "kept weights":
        chosen = sf.static(None, init="from_zeros", where=where)
    else:
        for path, parameter in net.named_parameters():
            parameter.requires_grad_(where(path, parameter))
        keeps = way == "low rank, keeps zeros"
        reparam = sf.reparam.low_rank(RANK, 2.0 * RANK) if keeps else careless()
        chosen = sf.reparametrised(reparam, where=where, key=sf.random.key(seed))
    train(net, chosen, text, 2000 + seed, plan.tuned_steps, rate)
    return sf.modules.bake(net, sf.apply_masks(sf.modules.params_of(net), masks))


# ---- jobs ----------------------------------------------------------------------------


def jobs(plan: Plan) -> list[Job]:
    """One for each seed: its model is trained once."""
    arms = [
        ("dense", "0"),
        *((method, level) for level in LEVELS for method in METHODS),
    ]
    arms += [(way, START) for way in TUNED[1:]]
    return each("text", "all", arms, plan)


def tasks() -> list[Task]:
    """Learning rates to choose."""
    return [
        Task("text", way, ("0" if way == "dense" else START,), RATES) for way in TUNED
    ]


def run(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """Bits per character of every model of a seed."""
    (seed,) = job.seeds
    text = data.text(seed)
    net, rows = dense(seed, plan, rates["text dense"], False), []
    for arm, level in job.arms:
        if arm == "dense":
            made: nn.Module = net
        elif arm in METHODS:
            made, state = prune(arm, level, net, text.train, seed, plan)
            if (arm, level) == ("SparseGPT", START):
                start = made, state.masks
        else:
            made = tune(arm, *start, text.train, seed, plan, rates[f"text {arm}"])
        zeros = sum(int((p == 0).sum()) for p in made.blocks.parameters() if p.ndim > 1)
        # whose text it is
        about = {"zeros": zeros, "python": platform.python_version()}
        rows.append(
            {"arm": arm, "level": level, "bits": bits(made, text.test), **about}
        )
    return rows


def tuned(
    task: Task, seeds: tuple[int, ...], plan: Plan, rate: float
) -> list[dict[str, float]]:
    """Bits of each seed on the text for tuning; each way to tune starts at the model of
    the middle rate.
    """
    (level,) = task.levels
    found = []
    for seed in seeds:
        text = data.text(seed, tuning=True)
        net: nn.Module = dense(
            seed, plan, rate if task.method == "dense" else RATES[0], True
        )
        if task.method != "dense":
            pruned, state = prune("SparseGPT", START, net, text.train, seed, plan)
            net = tune(task.method, pruned, state.masks, text.train, seed, plan, rate)
        found.append({level: bits(net, text.test)})
    return found
