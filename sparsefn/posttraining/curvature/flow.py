"""Scores of what flows through a network: the slope of an objective, GraSP of
gradients, SynFlow of a signal.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial

import optree
import torch
from torch import Tensor, nn

from sparsefn._engine.numbers import Real
from sparsefn.core.checks import (
    check_call,
    check_positive,
    described,
    is_int,
    numbers,
    shown,
)
from sparsefn.core.state import PlainScore, State, Step, effective
from sparsefn.core.tree import Tree, check_like, flatten, wide
from sparsefn.nn.modules.calls import call
from sparsefn.nn.modules.params import buffers_of
from sparsefn.posttraining.curvature import derivatives
from sparsefn.posttraining.curvature.derivatives import Batch, Loss


@described
def sensitivity(
    objective: Loss, batch: Batch = (), at: Callable[[Tree], Tree] | None = None
) -> PlainScore:
    """|weight * derivative|: an objective's change without the weight, to first order.

    >>> score = sf.curvature.sensitivity(
    ...     lambda params, x: (x @ params["w"]).square().sum(), (torch.ones(1, 2),)
    ... )
    >>> score(
    ...     sf.State(
    ...         {"w": torch.tensor([2.0, -1.0])}, {"w": torch.tensor([True, True])}
    ...     ),
    ...     (),
    ...     0,
    ... )
    {'w': tensor([4., 2.])}

    Args:
        objective: A function `objective(params, *batch)` that returns a 0-d tensor.
        batch: Tuple of the objective's arguments after params, or a function of the
            step that returns one.
        at: A function of the effective weights that returns a tree like params, at
            which the derivative is taken. Default: at the effective weights.

    Returns:
        A score. The weights are `state.params`, as in `sf.scores.saliency`. Leaves that
        are not sparsified score 0.

    Raises:
        TypeError: `objective` is no function, `batch` neither a tuple nor a function,
            or `at` no function of one argument.
        ValueError: On a call, the value of the objective is not 0-d, or `at` gives
            another structure or shape.

    Of the loss on a batch of its own this is SNIP: Lee et al. 2019, arXiv 1810.02340,
    eq. 5. An objective that trains for some steps before it computes the loss gives
    ProsPr (Alizadeh et al. 2022, arXiv 2202.08132), one that compares outputs at
    perturbed weights NTK-SAP (Wang et al. 2023, arXiv 2304.02840). With the absolute
    values as `at`, and the summed output for an input of ones, this is the score of
    SynFlow.
    """
    derivatives.check_loss(objective, batch)
    if at is not None:
        check_call("at", at, "params")

    def score(state: State, grads: Tree, step: Step) -> Tree:
        now = derivatives.arguments_at(batch, step)
        point = effective(state)
        if at is not None:
            made = at(point)
            check_like("what `at` gives", made, point, dtype=False)
            point = made
        weights, of_weights, scored = derivatives.sparsified(state, objective, point)
        slopes = derivatives.gradient_at(of_weights, weights, now)
        own = flatten(state.params)[0]
        return scored(
            {path: (wide(own[path]) * slope).abs() for path, slope in slopes.items()}
        )

    return score


@described
def grasp(loss: Loss, batch: Batch, temperature: Real | None = 200.0) -> PlainScore:
    """GraSP: a weight scores weight * (Hessian * gradient).

    >>> def loss(params, x, y, temperature=1.0):
    ...     return torch.nn.functional.cross_entropy(x @ params["w"] / temperature, y)
    >>> batch = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([0, 1])
    >>> w = torch.tensor([[2.0, -1.0], [1.0, 1.0]])
    >>> score = sf.curvature.grasp(loss, batch)
    >>> score(sf.State({"w": w}, {"w": w != 0.0}), (), 0)["w"] > 0
    tensor([[ True,  True],
            [False,  True]])

    Args:
        loss: A function `loss(params, *batch, temperature=...)` that divides its logits
            by `temperature` and returns a 0-d tensor.
        batch: Tuple of the loss's arguments after params, or a function of the step
            that returns one. For several batches use `sf.scores.mean(grasp(loss,
            batch))` with a function.
        temperature: A positive number. Default: 200, as the authors have it: all
            classes are then about as likely, whatever the size of the logits. Scores of
            the training loss itself, with a temperature of 1, are another thing, and
            prune worse. None calls a loss of another kind as it is, without that
            keyword.

    Returns:
        A score, which is large where pruning the weight would shrink the gradient's
        norm. It is signed: no absolute value is taken. The weights are `state.params`,
        as in `sf.scores.saliency`. Leaves that are not sparsified score 0.

    Raises:
        TypeError: `loss` is no function with the keyword, `batch` neither a tuple nor a
            function, or `temperature` no number.
        ValueError: `temperature` is not positive, or on a call the value of the loss is
            not 0-d.

    Without a temperature:

    >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> score = sf.curvature.grasp(
    ...     lambda params: params["w"] @ matrix @ params["w"] / 2, (), temperature=None
    ... )
    >>> score(
    ...     sf.State(
    ...         {"w": torch.tensor([1.0, -1.0])}, {"w": torch.tensor([True, True])}
    ...     ),
    ...     (),
    ...     0,
    ... )
    {'w': tensor([0., 5.])}

    The paper's S(-w) = -w * Hg is the change of the gradient's norm when the weight is
    pruned, and it prunes the weights whose S is largest. A score here keeps the
    largest, so this one is -S. Gradient and Hessian are over the sparsified leaves, as
    the authors' are over the weights: biases are not included.

    Wang et al. 2020, arXiv 2002.07376, alg. 1.
    """
    derivatives.check_loss(loss, batch)
    scaled = loss if temperature is None else _at_temperature(loss, temperature)

    def score(state: State, grads: Tree, step: Step) -> Tree:
        now = derivatives.arguments_at(batch, step)
        weights, of_weights, scored = derivatives.sparsified(state, scaled)
        gradient = derivatives.gradient_at(of_weights, weights, now)
        product = derivatives.hessian_vector(of_weights, weights, gradient, now)
        own = flatten(state.params)[0]
        return scored({path: wide(own[path]) * p for path, p in product.items()})

    return score


def _at_temperature(loss: Loss, temperature: Real) -> Loss:
    (divisor,) = numbers(temperature=temperature)
    check_positive("temperature", divisor)
    if not _takes_temperature(loss):
        raise TypeError(
            "grasp: expected a loss that divides its logits by its keyword "
            f"temperature, which GraSP sets to {divisor}, got {shown(loss)} without "
            "this keyword; temperature=None calls it as it is"
        )
    return partial(loss, temperature=temperature)


def _takes_temperature(loss: Loss) -> bool:
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):  # written in C
        return True
    named = parameters.get("temperature")
    by_name = named is not None and named.kind in (
        named.POSITIONAL_OR_KEYWORD,
        named.KEYWORD_ONLY,
    )
    return by_name or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@described
def synflow(
    forward: nn.Module | Callable[[Tree, Tensor], Tensor], input_shape: Sequence[int]
) -> PlainScore:
    """SynFlow: |w| times the gradient of the summed output at |w|.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False)
    ... )
    >>> weights = {
    ...     "0.weight": torch.tensor([[1.0, -2.0], [3.0, 0.0]]),
    ...     "1.weight": torch.tensor([[-1.0, 2.0]]),
    ... }
    >>> masks = {
    ...     path: torch.ones_like(leaf, dtype=torch.bool)
    ...     for path, leaf in weights.items()
    ... }
    >>> sf.curvature.synflow(net, (2,))(sf.State(weights, masks), (), 0)["0.weight"]
    tensor([[1., 2.],
            [6., 0.]], dtype=torch.float64)

    Args:
        forward: A module, which runs in eval mode with absolute buffers (a copy of it:
            neither its mode nor its buffers change), or a function `forward(params,
            x)`, which runs as it is.
        input_shape: Shape of an input without the batch axis. The one input is an
            example of ones: there is no data.

    Returns:
        A score in float64, in which everything is computed, because float32 overflows
        in deep networks. Leaves that are not sparsified score 0.

    Raises:
        TypeError: `input_shape` is not positive ints, `forward` is neither a module nor
            a function, or on a call it gives no tensor.

    The score is meant for chains of linear layers and ReLU, where the scores of every
    layer without a bias have the same sum. Biases and norms are made absolute too, as
    in the authors' code.

    The paper prunes in 100 rounds, to a density of kept ** ((round + 1) / 100) over all
    layers jointly:

    >>> rounds, kept = sf.every(1, stop=100), 1 / 3
    >>> algorithm = sf.gmp(
    ...     lambda step: 1 - kept ** ((step + 1) / 100),
    ...     when=rounds,
    ...     init="dense",
    ...     score=sf.curvature.synflow(net, (2,)),
    ...     distribution=sf.budgets.global_(),
    ...     where="*",
    ... )
    >>> state = algorithm.init(weights)
    >>> for step in range(100):
    ...     state = algorithm.update(state, weights, step)
    >>> state.masks["0.weight"]
    tensor([[False, False],
            [ True, False]])

    Tanaka et al. 2020, arXiv 2006.05467, alg. 1.
    """
    if not isinstance(input_shape, tuple | list) or not all(
        is_int(n) and n >= 1 for n in input_shape
    ):
        raise TypeError(
            "expected input_shape to be positive ints without the batch axis, such "
            f"as (3, 32, 32), got {input_shape!r}"
        )
    run = _absolute(forward)

    def flow(params: Tree, ones: Tensor) -> Tensor:
        out: object = run(params, ones)
        if not isinstance(out, Tensor):
            raise TypeError(
                f"expected forward to give a tensor, got {type(out).__name__}"
            )
        return out.sum()

    def score(state: State, grads: Tree, step: Step) -> Tree:
        absolute = optree.tree_map(lambda w: w.double().abs(), effective(state))
        weights, of_weights, scored = derivatives.sparsified(state, flow, absolute)
        device = next((leaf.device for leaf in optree.tree_leaves(absolute)), None)
        ones = torch.ones((1, *input_shape), dtype=torch.float64, device=device)
        gradient = derivatives.gradient_at(of_weights, weights, (ones,))
        own = flatten(state.params)[0]
        return scored(
            {path: own[path].double().abs() * g for path, g in gradient.items()}
        )

    return score


def _absolute(
    forward: nn.Module | Callable[[Tree, Tensor], Tensor],
) -> Callable[[Tree, Tensor], Tensor]:
    if not isinstance(forward, nn.Module):
        if not callable(forward):
            raise TypeError(
                "expected a module or a function (params, x) -> tensor, got "
                f"{type(forward).__name__}"
            )
        return forward
    module = copy.deepcopy(forward).eval()
    buffers = {}
    for name, buffer in buffers_of(module).items():
        if buffer.is_floating_point():
            buffers[name] = buffer.double().abs()
        else:
            buffers[name] = buffer
    return lambda params, x: call(module, params, x, buffers=buffers)
