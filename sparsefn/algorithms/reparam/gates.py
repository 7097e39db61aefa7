"""Learned gates: each weight is multiplied by a number between 0 and 1 that trains."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsefn._engine.numbers import Real
from sparsefn._engine.processes import check_plain, outside_vjp
from sparsefn.algorithms.competition import Competition
from sparsefn.algorithms.mask_draws import (
    check_prunes,
    check_sparsity_given,
    check_strength,
    prior_of,
    priors_of,
)
from sparsefn.algorithms.memory import Scores
from sparsefn.algorithms.reparam.weight_map import Reparametrisation
from sparsefn.algorithms.unit_table import unit_table
from sparsefn.core import random
from sparsefn.core.checks import check_trigger, described, is_number, number
from sparsefn.core.schedules import as_schedule
from sparsefn.core.state import Level, Step, Trigger, everywhere
from sparsefn.core.tree import Leaves, Tree, choose, wide
from sparsefn.core.triggers import never
from sparsefn.masks.budgets.distributions import global_
from sparsefn.masks.patterns.boxes import over_elements
from sparsefn.masks.patterns.kinds import Pattern, unstructured
from sparsefn.masks.patterns.units import units_of, units_of_leaves

_EDGE = 1e-6  # draws and chances stay this far from 0 and 1
_FAR = math.log(100.0)  # where log alpha is clamped
_LEAST = -700.0  # exp(700) is still finite
_SPREAD = 0.014  # the standard deviation of the first logits of `gumbel_gate`


@described
def hard_concrete(
    beta: float = 2 / 3,
    gamma: float = -0.1,
    zeta: float = 1.1,
    *,
    droprate: float = 0.5,
    pattern: Pattern = unstructured(),
) -> Reparametrisation:
    """w = v * z with random gates z that are exactly 0 or 1 with a learned chance.

    >>> map_ = sf.reparam.hard_concrete(droprate=0.1)
    >>> latents = map_.init({"w": torch.tensor([[1.0, 2.0]])}, sf.random.key(0))
    >>> weights, masks = map_.settled(latents, 0)
    >>> weights["w"]
    tensor([[0.9791, 1.9605]])

    The penalty is a term on the gates, with `chance_kept` for P(z > 0):

    >>> def penalty(trained, step):
    ...     return 1e-3 * sum(
    ...         sf.reparam.chance_kept(a).sum()
    ...         for a in trained["latent"]["gate"].values()
    ...     )
    >>> algorithm = sf.with_terms(
    ...     sf.reparametrised(sf.reparam.hard_concrete()), sf.terms.penalty(penalty)
    ... )

    Args:
        beta: Temperature of the gates, above 0.
        gamma: Lower end of the interval that they are stretched to, below 0.
        zeta: Upper end of that interval, above 1.
        droprate: Number in (0, 1). log alpha starts normal around log((1 - droprate) /
            droprate), with deviation 0.01.
        pattern: Units that have one gate each, such as `channel(1)`. Default: each
            weight.

    Returns:
        Reparametrisation with the latents
        `{"latent": {path: v}, "gate": {path: log alpha}}`.

    Raises:
        TypeError: A number is of another type, or `pattern` is no pattern.
        ValueError: beta <= 0, gamma and zeta do not lie outside [0, 1], droprate is
            outside (0, 1), or, with a pattern of larger units, a leaf is a DTensor.

    This is L0 regularisation. A gate is drawn from (key, path, step): with u uniform in
    (0, 1), s = sigmoid((log u - log(1 - u) + log alpha) / beta) and z = min(1, max(0,
    s * (zeta - gamma) + gamma)); the mask is z > 0. Without noise, in `sf.settled`, s
    = sigmoid(log alpha). After each step log alpha is clamped to +-log 100. Gates are
    computed in float64, with the device's own exp and log, and rounded: the last bits
    of float64 leaves may differ between kinds of machines.

    Louizos et al. 2018, arXiv 1712.01312, eqs. 10 to 13.
    """
    _check_stretch("hard_concrete", beta, gamma, zeta)
    number("droprate of hard_concrete", droprate)
    if not isinstance(pattern, Pattern):
        raise TypeError(
            "hard_concrete: expected pattern to be one such as sf.patterns.channel(1), "
            f"got {type(pattern).__name__}"
        )
    if not 0 < droprate < 1:
        raise ValueError(f"hard_concrete: expected 0 < droprate < 1, got {droprate}")
    start_at = math.log((1 - droprate) / droprate)

    def start(leaves: Leaves, key: Tensor) -> Tree:
        gates = {}
        draws = random.fold_in(key, "init")
        for path, units in units_of_leaves(pattern, leaves).items():
            leaf = leaves[path]
            own = random.leaf_key(draws, path)
            if not units.single:
                check_plain(f"hard_concrete with {pattern}", path, leaf)
            if units.single:
                like = leaf
            else:
                like = leaf.new_empty(units.grid)
            gate = start_at + 0.01 * random.normal_like(own, like)
            gates[path] = gate.to(leaf.dtype)
        return {"latent": dict(leaves), "gate": gates}

    def gated(latents: Tree, gates: Leaves) -> tuple[Leaves, Leaves]:
        weights = {}
        masks = {}
        for path, v in latents["latent"].items():
            z = over_entries(pattern, gates[path], v)
            weights[path] = (v * z).to(v.dtype)
            masks[path] = (z > 0).detach()
        return weights, masks

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        gates = {}
        for path, log_alpha in latents["gate"].items():
            u = _inner_uniform_at(step, key, path, log_alpha)
            gates[path] = drawn_gate(log_alpha, u, beta, gamma, zeta)
        return gated(latents, gates)

    def settled(latents: Tree, step: Step) -> tuple[Leaves, Leaves]:
        gates = {}
        for path, log_alpha in latents["gate"].items():
            z = _stretched(log_alpha.double(), gamma, zeta)
            gates[path] = z.to(wide(log_alpha).dtype)
        return gated(latents, gates)

    def project(latents: Tree, step: Step) -> Tree:
        gates = {}
        for path, log_alpha in latents["gate"].items():
            gates[path] = log_alpha.clamp(-_FAR, _FAR)
        return {**latents, "gate": gates}

    return Reparametrisation(start, apply, settled, project)


def uniform_at(step: Step, key: Tensor, path: str, like: Tensor) -> Tensor:
    """Draws of (key, path, step) from [0, 1), as many as a tensor that is being
    differentiated has entries.

    >>> uniform_at(3, sf.random.key(0), "w", torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    def draw(x: Tensor) -> Tensor:
        own = random.leaf_key(key, path, step)
        return random.uniform_like(own, x)

    return outside_vjp(draw, like)


def _inner_uniform_at(step: Step, key: Tensor, path: str, like: Tensor) -> Tensor:
    # Away from 0 and 1, where logistic noise is infinite.
    return uniform_at(step, key, path, like) * (1 - 2 * _EDGE) + _EDGE


def drawn_gate(
    log_alpha: Tensor, u: Tensor, beta: float, gamma: float, zeta: float
) -> Tensor:
    """The hard concrete gate of a uniform draw.

    >>> from sparsefn.algorithms.reparam.gates import drawn_gate
    >>> drawn_gate(torch.zeros(3), torch.tensor([0.05, 0.5, 0.9]), 2 / 3, -0.1, 1.1)
    tensor([0.0000, 0.5000, 1.0000])
    """
    z = _stretched((_logistic(u) + log_alpha) / beta, gamma, zeta)
    return z.to(wide(log_alpha).dtype)


def _logistic(u: Tensor) -> Tensor:
    # logistic noise, the difference of two draws of a Gumbel distribution
    u = u.double()
    return torch.log(u) - torch.log1p(-u)


# In float64, so that the last bits of exp and log, which differ between machines, are
# rounded off.
def _stretched(x: Tensor, gamma: float, zeta: float) -> Tensor:
    return (sigmoid(x) * (zeta - gamma) + gamma).clamp(0.0, 1.0)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), where equal entries have equal bits wherever they lie in a
    tensor.

    >>> from sparsefn.algorithms.reparam.gates import sigmoid
    >>> sigmoid(torch.tensor([-1.0, 0.0, 1000.0]))
    tensor([0.2689, 0.5000, 1.0000])

    `torch.sigmoid` rounds the last few entries of a tensor by another formula on CPUs.
    0 below -700, of slope 0.
    """
    exp = torch.exp(-x.clamp(min=_LEAST))
    return torch.where(x < _LEAST, 0.0, torch.reciprocal(1.0 + exp))


def chance_kept(
    log_alpha: Tensor,
    beta: float = 2 / 3,
    gamma: float = -0.1,
    zeta: float = 1.1,
) -> Tensor:
    """The chance P(z > 0) of hard concrete gates.

    >>> sf.reparam.chance_kept(torch.tensor([0.0, -2.0]))
    tensor([0.8318, 0.4010])

    Args:
        log_alpha: Float tensor of log alphas.
        beta: As in `hard_concrete`.
        gamma: As in `hard_concrete`.
        zeta: As in `hard_concrete`.

    Returns:
        sigmoid(log alpha - beta * log(-gamma / zeta)), of the shape of `log_alpha`,
        clamped to [1e-6, 1 - 1e-6], beyond which its slope is 0. Its sum is the
        expected number of gates that are not zero.

    Raises:
        ValueError: beta <= 0, or gamma and zeta do not lie outside [0, 1].
    """
    _check_stretch("chance_kept", beta, gamma, zeta)
    chance = sigmoid(log_alpha - beta * math.log(-gamma / zeta))
    return chance.clamp(_EDGE, 1 - _EDGE)


def _check_stretch(call: str, beta: float, gamma: float, zeta: float) -> None:
    for name, value in (("beta", beta), ("gamma", gamma), ("zeta", zeta)):
        number(f"{name} of {call}", value)
    if not beta > 0:
        raise ValueError(f"{call}: expected beta > 0, got {beta}")
    if not (gamma < 0 and zeta > 1):
        raise ValueError(
            f"{call}: expected gamma < 0 and zeta > 1, got {gamma} and {zeta}"
        )


def over_entries(pattern: Pattern, gates: Tensor, leaf: Tensor) -> Tensor:
    """The gates of the units of a leaf, one for each of its entries.

    >>> over_entries(
    ...     sf.patterns.channel(0), torch.tensor([[1.0], [0.0]]), torch.ones(2, 3)
    ... )
    tensor([[1., 1., 1.],
            [0., 0., 0.]])
    """
    units = units_of(pattern, tuple(leaf.shape))
    if units.single:
        return gates
    return over_elements(gates, units.unit, units.shape)


@described
def sigmoid_gate(
    temperature: Level, init: float = 0.0, *, round_end: Trigger = never()
) -> Reparametrisation:
    """w = v * sigmoid(b * s) / sigmoid(init), a gate that hardens as b grows.

    >>> map_ = sf.reparam.sigmoid_gate(lambda step: 200.0 ** (step / 10), init=0.0)
    >>> latents = map_.init({"w": torch.tensor([1.0, 2.0])}, sf.random.key(0))
    >>> latents["gate"]["w"] += torch.tensor([0.1, -0.1])
    >>> map_.apply(latents, 10, sf.random.key(0))[0], map_.settled(latents, 10)[0]
    ({'w': tensor([2.0000e+00, 8.2446e-09])}, {'w': tensor([2., 0.])})

    Args:
        temperature: b, a float or a schedule.
        init: Finite number at which s starts. With b = 1 the first weights are v, up to
            rounding.
        round_end: Trigger at which, after the optimizer's step, s becomes min(b * s,
            init): gates that are open start the next round at `init`, and closed ones
            stay closed. The schedule begins again at the next step, as in
            `lambda step: 200.0 ** ((step % 100) / 99)` with
            `round_end=sf.every(100, start=99)`.

    Returns:
        Reparametrisation whose latents by name are
        `{"latent": {path: v}, "gate": {path: s}}`. The masks of training keep
        everything. In `sf.settled` the gate is 1 / sigmoid(init) where s > 0, and the
        rest is pruned.

    Raises:
        TypeError: `temperature` is no float and no schedule, or `round_end` no trigger.
        ValueError: `init` is not a finite number.

    This is continuous sparsification. The penalty on the gates is a term:
    `sf.terms.penalty`. Gates are computed in float64 and rounded, as in
    `hard_concrete`.

    Savarese et al. 2020, arXiv 1912.04427, eqs. 5 to 9.
    """
    beta = as_schedule(temperature)
    if not is_number(init) or not math.isfinite(init):
        raise ValueError(f"sigmoid_gate: expected a finite init, got {init!r}")
    check_trigger("round_end", round_end)
    first = 1.0 / (1.0 + math.exp(-init))

    def start(leaves: Leaves, key: Tensor) -> Tree:
        gates = {path: torch.full_like(x, init) for path, x in leaves.items()}
        return {"latent": dict(leaves), "gate": gates}

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        weights = {}
        for path, v in latents["latent"].items():
            s = latents["gate"][path].double()
            gate = sigmoid(beta(step) * s) / first
            weights[path] = v * gate.to(v.dtype)
        return weights, everywhere(latents["latent"])

    def settled(latents: Tree, step: Step) -> tuple[Leaves, Leaves]:
        weights = {}
        masks = {}
        for path, v in latents["latent"].items():
            s = latents["gate"][path]
            masks[path] = (s > 0).detach()
            weights[path] = torch.where(masks[path], v / first, 0.0)
        return weights, masks

    def project(latents: Tree, step: Step) -> Tree:
        def ended(gates: Tree) -> Tree:
            made = {}
            for path, s in gates.items():
                hardened = beta(step) * wide(s)
                made[path] = hardened.clamp(max=init).to(s.dtype)
            return made

        gates = choose(round_end(step), ended, latents["gate"])
        return {**latents, "gate": gates}

    return Reparametrisation(start, apply, settled, project)


@described
def gumbel_gate(
    sparsity: Level,
    *,
    scale: Level = 25.0,
    temperature: Level = 1.0,
    prior: Tree | None = None,
    strength: float = 3.0,
) -> Reparametrisation:
    """w = W * m with a Gumbel sigmoid m of each weight, whose logit trains.

    >>> map_ = sf.reparam.gumbel_gate(0.5)
    >>> latents = map_.init({"w": torch.tensor([2.0, 3.0])}, sf.random.key(0))
    >>> latents["logit"]["w"] = torch.tensor([0.1, -0.1])
    >>> map_.settled(latents, 0)
    ({'w': tensor([2., 0.])}, {'w': tensor([ True, False])})

    Args:
        sparsity: Fraction of all weights together that `sf.settled` prunes: a float, a
            schedule or a 0-d tensor.
        scale: What logits are multiplied with, a float or a schedule.
        temperature: Temperature of the sigmoid, above 0, a float or a schedule. The
            lower, the closer to 0 or 1.
        prior: Masks tree, of another method, that the gates start near. None: none.
        strength: Standard deviations that a first logit is raised by where `prior`
            keeps the weight, and lowered by where it does not.

    Returns:
        Reparametrisation with the latents `{"base": {path: W}, "logit": {path: x}}`.
        W is frozen. The logits x, one for each weight, start normal with deviation
        0.014. The masks of training keep everything. In `sf.settled` exactly the
        weights with the largest logits of all leaves are left, the first among equal
        ones.

    Raises:
        TypeError: `sparsity`, `scale` or `temperature` is neither a float nor a
            schedule, or `prior` is no tree of bool masks.
        ValueError: `sparsity` is outside [0, 1], `strength` is not finite, or, in
            `init`, `prior` has no mask of a leaf or one of another shape, or prunes
            nothing, or a leaf is a DTensor.

    With u uniform in (0, 1), drawn from (key, path, step), m = sigmoid((scale * x +
    log u - log(1 - u)) / temperature). The noise is the difference of two draws of a
    Gumbel distribution. Gates are computed in float64 and rounded, as in
    `hard_concrete`. In a module W has to require a gradient, from which the logits get
    theirs.

    Mozaffari, Hourri, Rastegari and Najibi 2026, arXiv 2605.17289.
    """
    check_strength("gumbel_gate", strength)
    check_sparsity_given("gumbel_gate", sparsity)
    rule = Competition(unstructured(), global_())
    goal = rule.goal(sparsity)
    times = as_schedule(scale)
    warmth = as_schedule(temperature)
    priors = priors_of("gumbel_gate", prior)

    def start(leaves: Leaves, key: Tensor) -> Tree:
        logits = {}
        known = {}
        draws = random.fold_in(key, "init")
        for path, leaf in leaves.items():
            check_plain("gumbel_gate", path, leaf)
            like = wide(leaf)
            logit = _SPREAD * random.normal_like(random.leaf_key(draws, path), like)
            if priors is not None:
                kept = prior_of("gumbel_gate", path, leaf, priors)
                known[path] = kept
                logit = logit + strength * _SPREAD * torch.where(kept, 1.0, -1.0)
            logits[path] = logit.to(like.dtype)
        check_prunes("gumbel_gate", known)
        return {"base": dict(leaves), "logit": logits}

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        weights = {}
        gates = gumbel_gates(latents["logit"], times(step), warmth(step), step, key)
        for path, base in latents["base"].items():
            w = wide(base)
            weights[path] = (w * gates[path].to(w.dtype)).to(base.dtype)
        return weights, everywhere(weights)

    def settled(latents: Tree, step: Step) -> tuple[Leaves, Leaves]:
        weights = {}
        logits = {path: logit.detach() for path, logit in latents["logit"].items()}
        table = unit_table(rule, logits, goal=goal, step=step)
        masks = table.best_masks(Scores(logits))
        for path, base in latents["base"].items():
            weights[path] = torch.where(masks[path], base, 0.0)
        return weights, masks

    return Reparametrisation(start, apply, settled, held=("base",))


def gumbel_gates(
    logits: Leaves, scale: Real, temperature: Real, step: Step, key: Tensor
) -> Leaves:
    """The gates of `gumbel_gate` at a step, in float64.

    >>> logits = {"w": torch.tensor([-9.0, 9.0])}
    >>> gumbel_gates(logits, 25.0, 1.0, 0, sf.random.key(0))["w"].round()
    tensor([0., 1.], dtype=torch.float64)
    """
    gates = {}
    for path, logit in logits.items():
        u = _inner_uniform_at(step, key, path, logit)
        gates[path] = sigmoid((scale * logit.double() + _logistic(u)) / temperature)
    return gates
