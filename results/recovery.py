"""Accuracy that comes back after pruning, at equal steps: a tiny LLaMA on text, pruned
by SparseGPT, and a convnet on digits, pruned by magnitude.

Each pruned model is trained by its labels, by the dense model's logits, by these and
hidden states, or block after block.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsefn as sf
from results import conv, data, lenet
from results import text as texts
from results.jobs import Job, Plan, Rates, Row, each, learning_rate

VERSION = 1
LAYERS = 2  # of the LLaMA
DENSE_RATE = 8e-3  # of the LLaMA
LEVELS = {"LLaMA": "70", "convnet": "90"}  # per cent pruned
WAYS = ("fine-tuned", "logits", "logits and hidden states", "by block")
# The best of three or more, a factor of two apart, on seed 100 of the data for tuning.
RATES = {
    "LLaMA": dict(zip(WAYS, (8e-3, 1.6e-2, 1.6e-2, 3.2e-2), strict=True)),
    "convnet": dict(zip(WAYS, (0.8, 0.8, 0.8, 6.4e-2), strict=True)),
}
Batch = tuple[Tensor, Tensor]


class Network(nn.Module):
    """A model of transformers, from characters to logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, index: Tensor) -> Tensor:
        return self.net(input_ids=index).logits


class Setting(NamedTuple):
    """A dense model and the pruned one, and what both are trained and measured with."""

    dense: nn.Module
    state: sf.State  # the pruned weights
    blocks: list[str]  # paths of the layers that are compared
    batches: list[Batch]  # one a step
    optimizer: Callable[[nn.Module, float], Any]
    measure: Callable[[nn.Module], Row]


# ---- LLaMA ---------------------------------------------------------------------------


def llama(characters: int, width: int, seed: int) -> Network:
    """Weights from the seed alone."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=characters,
        hidden_size=width,
        intermediate_size=5 * width // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=texts.WINDOW,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Network(transformers.LlamaForCausalLM(config))


@functools.lru_cache(4)
def of_llama(seed: int, plan: Plan, tuning: bool) -> Setting:
    """SparseGPT prunes the blocks of the dense model."""
    text = data.text(seed, tuning=tuning)
    net = llama(len(text.characters), plan.width, seed)
    texts.train(net, sf.dense(), text.train, seed, plan.llama_steps, DENSE_RATE)
    net.eval()
    blocks = [f"net.model.layers.{i}" for i in range(LAYERS)]
    state = sf.calibration.in_order(
        net,
        None,
        [f"{block}.*" for block in blocks],
        lambda stats: sf.methods.sparsegpt(int(LEVELS["LLaMA"]) / 100, stats),
        texts.windows(text.train, plan.windows, 1000 + seed)[:, :-1],
        chunk_size=32,
    )
    windows = texts.windows(text.train, plan.recovery_steps * texts.BATCH, 2000 + seed)
    return Setting(
        net,
        state,
        blocks,
        [(part[:, :-1], part[:, 1:]) for part in windows.split(texts.BATCH)],
        lambda net, rate: torch.optim.AdamW(net.parameters(), lr=rate),
        lambda net: {"bits": texts.bits(net, text.test)},
    )


# ---- convnet -------------------------------------------------------------------------


@functools.lru_cache(4)
def of_convnet(seed: int, plan: Plan, rate: float, tuning: bool) -> Setting:
    """One magnitude of all weights decides which the dense network keeps."""
    split = lenet.images(seed, tuning)
    flat = conv.network(seed)
    lenet.train(flat, sf.dense(), split, seed, plan.conv_steps, rate)
    first, *layers = flat
    blocks = [nn.Sequential(*layers[i : i + 3]) for i in (0, 3, 6)]
    net = nn.Sequential(first, *blocks, *layers[9:]).eval()
    algorithm = sf.one_shot(
        int(LEVELS["convnet"]) / 100, distribution=sf.budgets.global_()
    )
    state = algorithm.init(sf.modules.params_of(net))
    order = lenet.batches(len(split.y), plan.recovery_steps, 2000 + seed)
    return Setting(
        net,
        algorithm.update(state, state.params, 0),
        ["1", "2", "3"],
        [(split.x[index], split.y[index]) for index in order],
        lenet.sgd,
        lambda net: lenet.measured(net, split),
    )


# ---- recovery ------------------------------------------------------------------------


def by_labels(setting: Setting, net: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy: fine-tuning."""
    x, y = batch
    return functional.cross_entropy(net(x).flatten(0, -2), y.flatten())


def by_teacher(hidden: bool, setting: Setting, net: nn.Module, batch: Batch) -> Tensor:
    """Logits of the dense model, and its hidden states."""
    x, _ = batch
    paths = setting.blocks
    with torch.no_grad():
        answer, states = sf.recovery.outputs(setting.dense, None, x, paths=paths)
    logits, own = sf.recovery.outputs(net, None, x, paths=paths)
    loss = sf.recovery.kl(logits, answer)
    if hidden:
        pairs = {path: path for path in paths}
        apart = sf.recovery.over_layers(sf.recovery.mean_square, own, states, pairs)
        # as large as the other, as in Minitron
        loss = loss + (loss / apart).detach() * apart
    return loss


LOSSES = {
    "fine-tuned": by_labels,
    "logits": functools.partial(by_teacher, False),
    "logits and hidden states": functools.partial(by_teacher, True),
}


def by_loss(setting: Setting, way: str, rate: float) -> nn.Module:
    """The pruned model, trained as a whole: its zeros stay."""
    net = sf.modules.bake(copy.deepcopy(setting.dense), setting.state).train()
    steps = len(setting.batches)
    optimizer = setting.optimizer(net, rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(1.0, steps))
    sparse = sf.attach(sf.from_masks(setting.state.masks), net, optimizer)
    for step, batch in enumerate(setting.batches):
        LOSSES[way](setting, net, batch).backward()
        sparse.before_step()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        sparse.after_step(step)
    sparse.detach()
    return net.eval()


def by_block(setting: Setting, rate: float) -> nn.Module:
    """The pruned model, each block trained with as many steps and the same batches."""

    def pruned(stats: Any) -> sf.Algorithm:
        def known(path: str, weight: Tensor, mask: Tensor, step: Any) -> Any:
            return setting.state.params[path], setting.state.masks[path]

        return sf.rewrite(known, when=sf.at([0]))

    steps = len(setting.batches)
    optimizer = sf.optimizers.adam(learning_rate(rate, steps))
    state = sf.calibration.in_order(
        setting.dense,
        None,
        [f"{path}.*" for path in setting.blocks],
        pruned,
        torch.cat([x for x, _ in setting.batches]),
        of="count",
        chunk_size=len(setting.batches[0][0]),
        recover=sf.recovery.blockwise(optimizer),
    )
    others = {
        path: leaf
        for path, leaf in setting.state.params.items()
        if not any(path.startswith(f"{block}.") for block in setting.blocks)
    }
    masks = {path: setting.state.masks[path] for path in others}
    state = sf.State(state.params | others, state.masks | masks)
    return sf.modules.bake(setting.dense, state).eval()


def recovered(setting: Setting, way: str, rate: float) -> nn.Module:
    """The pruned model after its training."""
    if way == "by block":
        return by_block(setting, rate)
    return by_loss(setting, way, rate)


# ---- jobs ----------------------------------------------------------------------------


def jobs(plan: Plan) -> list[Job]:
    """One for each model and seed: it is trained and pruned once."""
    return [
        job
        for model, level in LEVELS.items()
        for job in each(
            "recovery",
            model,
            [(f"{model}, {way}", level) for way in ("dense", "pruned", *WAYS)],
            plan,
        )
    ]


def setting_of(
    model: str, seed: int, plan: Plan, rates: Rates, tuning: bool = False
) -> Setting:
    """The pruned model of a seed."""
    if model == "LLaMA":
        return of_llama(seed, plan, tuning)
    return of_convnet(seed, plan, rates["conv dense"], tuning)


def run(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """Bits or errors of every model of a seed, and its zeros."""
    (seed,) = job.seeds
    setting = setting_of(job.name, seed, plan, rates)
    rows = []
    for arm, level in job.arms:
        _, way = arm.split(", ")
        net = setting.dense
        if way == "pruned":
            net = sf.modules.bake(setting.dense, setting.state)
        elif way in WAYS:
            net = recovered(setting, way, RATES[job.name][way])
        zeros = sum(int((p == 0).sum()) for p in net.parameters() if p.ndim > 1)
        rows.append(
            {"arm": arm, "level": level, **setting.measure(net), "zeros": zeros}
        )
    return rows
