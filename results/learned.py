"""Masks of a tiny LLaMA on text: learned by gradients or by losses, or chosen in one
pass over the same windows.

Its weights stay as they were trained, but for SparseGPT's.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsefn as sf
from results import data
from results import text as texts
from results.jobs import Job, Plan, Rates, Row, Task, each
from results.recovery import DENSE_RATE, LAYERS, llama

VERSION = 1
# learned masks, and what they prune
LEARNED = {"MaskLLM": "2:4", "ProxSparse": "2:4", "MaskPro": "2:4", "LEAP": "50"}
ARMS = {
    "2:4": (
        "magnitude",
        "Wanda",
        "SparseGPT",
        "RIA",
        "Wanda, permuted",
        "Wanda, swaps",
        "MaskLLM",
        "ProxSparse",
        "MaskPro",
    ),
    "50": ("Wanda", "SparseGPT", "RIA", "LEAP"),  # per cent pruned
}
PARTS = {"a quarter": 4, "half": 2}  # of the steps
CURVES = 3  # seeds
STRENGTH = 0.05  # of ProxSparse: 2:4 in about as many steps as there are
SCALE = 3.0  # of MaskPro's first logits; of 10, as in the paper, few draws differ
SEEDS = (100,)  # of tuning
RATES = {
    "MaskLLM": (5e-3, 1e-2, 2e-2),
    "ProxSparse": (1e-3, 5e-4, 2e-3),
    "MaskPro": (4.0, 1.0, 16.0),
    "LEAP": (5e-3, 1e-2, 2e-2),
}


class Setting(NamedTuple):
    """A trained model, and the windows that every method may read."""

    net: nn.Module
    where: list[str]  # paths of the weights that get masks
    windows: Tensor
    test: Tensor


@functools.lru_cache(4)
def setting_of(seed: int, plan: Plan, tuning: bool = False) -> Setting:
    """One model for each seed: its text, weights and windows are its own."""
    text = data.text(seed, tuning=tuning)
    net = llama(len(text.characters), plan.mask_width, seed)
    texts.train(net, sf.dense(), text.train, seed, plan.llama_steps, DENSE_RATE)
    where = [path for path, p in net.named_parameters() if is_masked(path, p)]
    return Setting(
        net.eval(),
        where,
        texts.windows(text.train, plan.mask_windows, 1000 + seed),
        text.test,
    )


def is_masked(path: str, weight: Tensor) -> bool:
    """Whether it is a matrix of a block."""
    return ".layers." in path and weight.ndim > 1


# ---- one pass ------------------------------------------------------------------------


def in_order(
    net: nn.Module,
    windows: Tensor,
    rule: Callable[[Any], sf.Algorithm],
    of: Any = ("count", "square", "gram"),
) -> sf.State:
    """Blocks are pruned in order, each with the inputs that the pruned ones give it."""
    return sf.calibration.in_order(
        net,
        None,
        [f"net.model.layers.{i}.*" for i in range(LAYERS)],
        rule,
        windows[:, :-1],
        of=of,
        chunk_size=128,
    )


def one_pass(method: str, level: str, setting: Setting) -> sf.State:
    """Masks, and SparseGPT's weights."""
    net, where, windows, _ = setting
    sparsity = None if ":" in level else int(level) / 100
    shape = {"pattern": sf.patterns.nm(2, 4)} if ":" in level else {}
    if method == "magnitude":
        chosen = sf.one_shot(sparsity, where=where, **shape)
        state = chosen.init(sf.modules.params_of(net))
        return chosen.update(state, state.params, 0)
    if method == "Wanda, swaps":
        return in_order(net, windows, swapped)
    rule, of = {
        "Wanda": (sf.methods.wanda, "square"),
        "RIA": (sf.methods.ria, "square"),
        "SparseGPT": (sf.methods.sparsegpt, ("count", "square", "gram")),
    }[method]
    return in_order(net, windows, lambda stats: rule(sparsity, stats, **shape), of)


def swapped(stats: Any) -> sf.Algorithm:
    """Wanda's 2:4 masks, whose weights then change places."""
    pattern = sf.patterns.nm(2, 4)

    def refined(weight: Tensor, gram: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return weight, sf.solve.swaps(weight, gram, mask, pattern)

    # what Wanda prunes keeps its value until masks are final
    first = sf.one_shot(None, sf.scores.wanda(stats), pattern=pattern, pruned="keep")
    return sf.sequence(first, sf.rewrite(sf.solve.layerwise(stats, refined)))


def permuted(setting: Setting) -> tuple[nn.Module, sf.State]:
    """The model in the order of channels that Wanda's scores ask for, and its masks."""
    net, where, windows, _ = setting
    params = sf.modules.params_of(net)
    x = windows[:, :-1]
    stats = sf.calibration.inputs(net, None, x, of="square")
    scores = {path: weight.abs() for path, weight in params.items()}
    for path in where:
        mean = stats[path]["square"] / stats[path]["count"]
        scores[path] = scores[path] * mean.sqrt()
    made = sf.shrinking.permute(net, x[:2], 2, 4, where=where, scores=scores).module
    return made, one_pass("Wanda", "2:4", setting._replace(net=made))


# ---- learned -------------------------------------------------------------------------


def loss(net: nn.Module, params: Any, batch: Tensor) -> Tensor:
    """Cross-entropy, the mean over the characters of some windows."""
    logits = sf.modules.call(net, params, batch[:, :-1], partial=True)
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def batch_of(windows: Tensor, step: int) -> Tensor:
    """Windows in turn."""
    places = torch.arange(step * texts.BATCH, (step + 1) * texts.BATCH)
    return windows[places % len(windows)]


def latents_only(optimizer: Any) -> Any:
    """What has no mask stays as it is."""
    frozen = sf.optimizers.sgd(0.0)
    return sf.optimizers.by_path([("latent.*", optimizer), ("*", frozen)])


def learn(
    method: str, setting: Setting, prior: sf.State, steps: int, rate: float, seed: int
) -> sf.State:
    """Masks that start at Wanda's, but for ProxSparse's, which start dense."""
    if method == "MaskPro":
        return by_losses(setting, prior, steps, rate, seed)
    net, where, windows, _ = setting
    started = {"steps": steps, "prior": prior.masks, "key": sf.random.key(seed)}
    if method == "MaskLLM":
        learned = sf.methods.maskllm(norm=0.0, where=where, **started)
    elif method == "LEAP":
        learned = sf.methods.leap(0.5, where=where, **started)
    else:
        learned = sf.methods.prox_sparse(STRENGTH, where=where)
    algorithm = sf.with_optimizer(learned, latents_only(sf.optimizers.adam(rate)))
    state = algorithm.init(sf.modules.params_of(net))
    for step in range(steps):
        batch = batch_of(windows, step)
        slope = torch.func.grad(lambda params, x=batch: loss(net, params, x))
        state = algorithm.update(state, slope(sf.effective(state)), step)
    return sf.settled(algorithm, state)


@torch.no_grad()
def by_losses(
    setting: Setting, prior: sf.State, steps: int, rate: float, seed: int
) -> sf.State:
    """MaskPro: the loss under drawn masks, minus the loss under Wanda's."""
    net, where, windows, _ = setting
    learned = sf.methods.maskpro(
        prior=prior.masks, scale=SCALE, where=where, key=sf.random.key(seed)
    )
    algorithm = sf.with_optimizer(learned, sf.optimizers.sgd(rate))
    params = sf.modules.params_of(net)
    state = algorithm.init({**params, "loss": torch.tensor(0.0)})
    first = sf.effective(prior)
    zeros = {path: torch.zeros(()).expand(leaf.shape) for path, leaf in params.items()}
    for step in range(steps):
        batch = batch_of(windows, step)
        weights = sf.effective(state)
        del weights["loss"]
        residual = loss(net, weights, batch) - loss(net, first, batch)
        state = algorithm.update(state, {**zeros, "loss": residual}, step)
    masks = dict(sf.settled(algorithm, state).masks)
    del masks["loss"]
    return sf.State(sf.apply_masks(params, masks), masks)


# ---- jobs ----------------------------------------------------------------------------


def jobs(plan: Plan) -> list[Job]:
    """One for each seed, and shorter runs of the learned masks for a few."""
    arms = [(arm, level) for level, found in ARMS.items() for arm in found]
    parts = [
        (f"{arm}, {part} of the steps", level)
        for arm, level in LEARNED.items()
        for part in PARTS
    ]
    return [
        *each("learned", "all", [("dense", "0"), *arms], plan),
        *each("learned", "curves", parts, plan)[:CURVES],
    ]


def tasks() -> list[Task]:
    """Learning rates to choose."""
    return [
        # MaskPro at a rate of 0 keeps Wanda's masks: no end of lower rates is worse
        Task(
            "learned",
            method,
            (LEARNED[method],),
            rates,
            SEEDS,
            grows=method != "MaskPro",
        )
        for method, rates in RATES.items()
    ]


def pruned(
    arm: str, level: str, setting: Setting, plan: Plan, rates: Rates, seed: int
) -> tuple[nn.Module, sf.State]:
    """The model and its state after a method."""
    if arm == "Wanda, permuted":
        return permuted(setting)
    method, _, part = arm.partition(", ")
    if method not in LEARNED:
        return setting.net, one_pass(arm, level, setting)
    prior = one_pass("Wanda", level, setting)
    steps = plan.mask_steps // PARTS.get(part.removesuffix(" of the steps"), 1)
    rate = rates[f"learned {method}"]
    return setting.net, learn(method, setting, prior, steps, rate, seed)


def run(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """Bits per character of every model of a seed, and whether its counts are exact."""
    (seed,) = job.seeds
    setting = setting_of(seed, plan)
    rows = []
    for arm, level in job.arms:
        row = {"arm": arm, "level": level}
        if arm == "dense":
            rows.append({**row, "bits": texts.bits(setting.net, setting.test)})
            continue
        net, state = pruned(arm, level, setting, plan, rates, seed)
        made = sf.modules.bake(net, state)
        masks = [state.masks[path] for path in setting.where]
        rows.append(
            {
                **row,
                "bits": texts.bits(made, setting.test),
                "exact": is_exact(masks, level),
            }
        )
    return rows


def is_exact(masks: list[Tensor], level: str) -> bool:
    """Whether masks keep 2 of every 4 inputs, or half of all weights."""
    if level == "2:4":
        return all(bool((x.unflatten(1, (-1, 4)).sum(-1) == 2).all()) for x in masks)
    return 2 * sum(int(x.sum()) for x in masks) == sum(x.numel() for x in masks)


def tuned(
    task: Task, seeds: tuple[int, ...], plan: Plan, rate: float
) -> list[dict[str, float]]:
    """Bits of each seed on the text for tuning."""
    (level,) = task.levels
    found = []
    for seed in seeds:
        setting = setting_of(seed, plan, True)
        net, state = pruned(task.method, level, setting, plan, {task.name: rate}, seed)
        found.append({level: texts.bits(sf.modules.bake(net, state), setting.test)})
    return found
