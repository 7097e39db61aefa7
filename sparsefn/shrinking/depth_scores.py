"""What a layer is worth: how far it turns what passes through it, and what a model
loses without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsefn.nn.modules import as_call, inner_module
from sparsefn.posttraining.calibration import angle_of, influence_of
from sparsefn.shrinking.depth import Layers
from sparsefn.shrinking.proof import check_loaded
from sparsefn.shrinking.trace import Example, isolated, shapes_of, where_it_lies
from sparsefn.shrinking.values import in_its_order


def influence(
    layers: Layers,
    model: nn.Module,
    batches: Iterable[Example],
    *,
    dim: int = -1,
    tokens: Sequence[Tensor] | None = None,
) -> Tensor:
    """Block influence: 1 - the mean cosine of what enters a layer and what leaves it.

    >>> class Turn(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return x + super().forward(x)
    >>> model = torch.nn.Sequential(Turn(2, 2, False), Turn(2, 2, False)).eval()
    >>> with torch.no_grad():
    ...     _ = model[0].weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, -1.0]]))
    ...     _ = model[1].weight.copy_(torch.eye(2))
    >>> x = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    >>> layers = sf.shrinking.layers(model, x)
    >>> sf.shrinking.influence(layers, model, [x, x])
    tensor([1., 0.], dtype=torch.float64)

    Args:
        layers: The layers of the model, as `sf.shrinking.layers` finds them.
        model: The model, which does not change, in eval mode.
        batches: What the model is called with, batch by batch, each of the shapes of
            the example that the layers were found on.
        dim: The dimension of the vectors that are compared: -1 for tokens, 1 for the
            channels of images.
        tokens: For each batch a bool tensor that says which tokens count, where they
            are padded, as `attention_mask.bool()`. None: all count.

    Returns:
        A float64 tensor on the CPU, (layers,), 0 where a layer changes no direction, 2
        where it reverses all. A vector of zeros has cosine 1 with one of zeros, and 0
        with others. It is a score: `sf.scores.of_units(values, layers.pattern())`.

    Raises:
        TypeError: `layers` are none, a batch is of another type, `dim` is no int, or
            `tokens` are no bool tensors.
        ValueError: There is no batch, or one of other shapes, as a smaller last one is,
            `dim` is no dimension of what enters a layer, or not -1 beside `tokens`,
            these are of another number or shape, or none counts, a parameter is on the
            meta device, or the layers are of another model, or of submodules.

    Men et al. 2024, "ShortGPT: Layers in Large Language Models are More Redundant Than
    You Expect", arXiv 2403.03853, eq. 1. There a layer is attention and MLP:
    `layers(..., by="module")`.
    """
    total = _count("influence", layers)
    if tokens is not None and dim != -1:
        raise ValueError(
            "influence: expected dim=-1 where tokens say which vectors count, got "
            f"{dim}"
        )
    sums = torch.zeros(total, dtype=torch.float64, device="cpu")
    count = 0
    for states, counted in _counted("influence", layers, model, batches, tokens):
        count += 1
        for i, (before, after) in enumerate(states):
            if counted is not None:
                before = before[counted]
                after = after[counted]
            sums[i] += influence_of(before, after, dim=dim)
    return sums / _some("influence", count)


def angular_distance(
    layers: Layers,
    model: nn.Module,
    batches: Iterable[Example],
    *,
    span: int = 1,
    last: bool = True,
    tokens: Sequence[Tensor] | None = None,
) -> Tensor:
    """The angle between what enters a span of layers and leaves it, in half turns.

    >>> class Turn(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return x + super().forward(x)
    >>> model = torch.nn.Sequential(*(Turn(2, 2, False) for _ in range(3))).eval()
    >>> for layer, turn in zip(model, [-1.0, -1.0, 0.0]):
    ...     _ = layer.weight.data.copy_(torch.tensor([[turn, turn], [-turn, turn]]))
    >>> x = torch.tensor([[[1.0, 0.0], [1.0, 2.0]]])
    >>> layers = sf.shrinking.layers(model, x)
    >>> sf.shrinking.angular_distance(layers, model, [x], span=2)
    tensor([1.0000, 0.5000], dtype=torch.float64)
    >>> start = 1  # the span of the smallest distance goes
    >>> masks = layers.masks(range(start, start + 2))

    Args:
        layers: The layers of the model, as `sf.shrinking.layers` finds them, none of
            which is inside another.
        model: The model, which does not change, in eval mode.
        batches: What the model is called with, as for `influence`. Vectors lie along
            the last dimension of the tensors that layers add to.
        span: How many layers that follow one another go together.
        last: Whether the last token of each sequence alone counts, as in the paper.
            False takes the mean over all vectors.
        tokens: As for `influence`. The last token is the last one that counts.

    Returns:
        A float64 tensor on the CPU, (layers - span + 1,), from 0 to 1, the mean over
        sequences for the span that starts at each layer.

    Raises:
        TypeError: `layers` are none, `span` is no int, or a batch is of another type.
        ValueError: `span` is below 1 or above the number of layers, a layer is inside
            another, or layers and batches are as `influence` refuses.

    Gromov et al. 2024, "The Unreasonable Ineffectiveness of the Deeper Layers", arXiv
    2403.17887.
    """
    total = _count("angular_distance", layers)
    if isinstance(span, bool) or not isinstance(span, int):
        raise TypeError(
            f"angular_distance: expected span to be an int, got {type(span).__name__}"
        )
    if not 1 <= span <= total:
        raise ValueError(
            f"angular_distance: expected a span from 1 to the {total} layers, got "
            f"{span}"
        )
    inner = [i for i, layer in enumerate(layers) if layer.inside]
    if inner:
        raise ValueError(
            "angular_distance: expected layers one after another, but layer "
            f"{inner[0]} is inside {min(layers[inner[0]].inside)}"
        )
    sums = torch.zeros(total - span + 1, dtype=torch.float64, device="cpu")
    count = 0
    for states, counted in _counted("angular_distance", layers, model, batches, tokens):
        count += 1
        chosen = None
        if counted is not None:
            chosen = _last_of(counted) if last else counted.nonzero(as_tuple=True)
        for i in range(len(sums)):
            before = states[i][0]
            after = states[i + span - 1][1]
            if chosen is not None:
                before = before[chosen]
                after = after[chosen]
            elif last:
                before = before[..., -1:, :]
                after = after[..., -1:, :]
            sums[i] += angle_of(before, after)
    return sums / _some("angular_distance", count)


def loss_without(
    layers: Layers,
    params: Mapping[str, Tensor],
    loss: Callable[[Mapping[str, Tensor]], Tensor],
) -> Tensor:
    """The loss of a model without each of its layers.

    >>> class Block(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return x + super().forward(x)
    >>> model = torch.nn.Sequential(Block(2, 2, False), Block(2, 2, False)).eval()
    >>> for layer, size in zip(model, [1.0, 3.0]):
    ...     _ = layer.weight.data.copy_(size * torch.eye(2))
    >>> x = torch.ones(1, 2)
    >>> layers = sf.shrinking.layers(model, x)
    >>> sf.shrinking.loss_without(
    ...     layers,
    ...     sf.modules.params_of(model),
    ...     lambda params: (8 - sf.modules.call(model, params, x)).square().mean(),
    ... )
    tensor([16., 36.], dtype=torch.float64)

    Args:
        layers: The layers of the model, as `sf.shrinking.layers` finds them.
        params: The parameters of the model by path, which do not change.
        loss: Function from such parameters to a 0-d tensor, over all calibration data:
            a mean loss, or a perplexity, its exponential.

    Returns:
        A float64 tensor on the CPU, (layers,). The loss of the model that
        `layers.masks([i])` mask: a higher one says that the layer is worth more.

    Raises:
        TypeError: `layers` are none, or `loss` gives no tensor.
        ValueError: A parameter is missing, or `loss` gives a tensor of another shape.

    With the perplexity it is the criterion of Kim et al. 2024, "Shortened LLaMA", arXiv
    2402.02834. Their other one, Taylor, is `sf.scores.saliency` with
    `layers.pattern(reduce="sum")`.
    """
    values = []
    for i in range(_count("loss_without", layers)):
        gone = {i, *(k for k, other in enumerate(layers) if i in other.inside)}
        zeros = {}
        for leaf in (leaf for k in gone for leaf in layers[k].leaves):
            if leaf not in params:
                raise ValueError(
                    f"loss_without: expected params with the leaf {leaf!r} of layer {i}"
                )
            zeros[leaf] = torch.zeros_like(params[leaf])
        with torch.no_grad():
            value: object = loss({**params, **zeros})
        if not isinstance(value, Tensor):
            raise TypeError(
                "loss_without: expected loss to give a 0-d tensor, got "
                f"{type(value).__name__}"
            )
        if value.ndim:
            raise ValueError(
                "loss_without: expected loss to give a 0-d tensor, got shape "
                f"{tuple(value.shape)}"
            )
        values.append(value.detach().double().cpu())
    return torch.stack(values)


def _count(name: str, layers: object) -> int:
    if not isinstance(layers, Layers):
        raise TypeError(
            f"{name}: expected layers as sf.shrinking.layers makes them, got "
            f"{type(layers).__name__}"
        )
    return len(layers)


def _some(name: str, count: int) -> int:
    if not count:
        raise ValueError(f"{name}: expected at least one batch, got none")
    return count


def _last_of(counted: Tensor) -> tuple[Tensor, ...]:
    # Where the last token of each sequence is that has one which counts.
    places = torch.arange(counted.shape[-1], device=counted.device)
    last = torch.where(counted, places, -1).amax(-1)
    rows = (last >= 0).nonzero(as_tuple=True)
    return (*rows, last[rows])


def _counted(
    name: str,
    layers: Layers,
    model: nn.Module,
    batches: Iterable[Example],
    tokens: Sequence[Tensor] | None,
) -> Iterator[tuple[list[tuple[Tensor, Tensor]], Tensor | None]]:
    # With the states of each batch which of its tokens count; None: all.
    number = 0
    for number, states in enumerate(_states(name, layers, model, batches), 1):
        if tokens is None or number > len(tokens):
            yield states, None
            continue
        counted: object = tokens[number - 1]
        if not isinstance(counted, Tensor) or counted.dtype != torch.bool:
            got = counted.dtype if isinstance(counted, Tensor) else type(counted)
            raise TypeError(
                f"{name}: expected tokens to be bool tensors, True for each token that "
                f"counts, got {got}: write attention_mask.bool()"
            )
        for before, _ in states:
            if counted.shape != before.shape[:-1]:
                raise ValueError(
                    f"{name}: expected tokens of the shape {tuple(before.shape[:-1])}, "
                    f"as layers take them, got {tuple(counted.shape)}"
                )
        if not bool(counted.any()):
            raise ValueError(
                f"{name}: expected tokens that count in each batch, but one has none"
            )
        yield states, counted.to(states[0][0].device)
    if tokens is not None and len(tokens) != number:
        raise ValueError(
            f"{name}: expected a tensor of tokens for each of {number} batches, got "
            f"{len(tokens)}"
        )


def _states(
    name: str, layers: Layers, model: nn.Module, batches: Iterable[Example]
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    # What enters and leaves each layer, batch by batch.
    trace = layers.trace
    if trace is None:
        raise ValueError(
            f"{name}: expected layers of a whole model, got layers of submodules"
        )
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            f"{name}: expected a list of batches or a loader, got "
            f"{type(batches).__name__}: of one batch x write [x]"
        )
    own = inner_module(model)
    check_loaded(name, own)
    for batch in batches:
        shapes = shapes_of(batch)
        if shapes != trace.shapes:
            raise ValueError(
                f"{name}: expected batches of the shapes {trace.shapes}, on which the "
                f"layers were found, got {shapes}: leave out a smaller last batch, as "
                "DataLoader(..., drop_last=True) does, or find the layers on an "
                "example of this shape"
            )
        program = trace.of(own, batch)
        run = _Watched(program, [layer.branches for layer in layers])
        call = where_it_lies(own, as_call(batch))
        with isolated():
            run.run(*in_its_order(program, call))
        states = []
        for i in range(len(layers)):
            before = run.before[i]
            after = run.after[i]
            if after.numel() == before.numel():  # some layers flatten the tokens
                after = after.reshape(before.shape)
            if not bool(after.isfinite().all()):
                raise ValueError(
                    f"{name}: expected finite hidden states, but layer {i}, at "
                    f"{layers[i].path!r}, gives others: run the model in a wider "
                    "dtype, or look at its inputs"
                )
            states.append((before, after))
        yield states


class _Watched(fx.Interpreter):
    """A run of a program that keeps what its layers take and give."""

    def __init__(self, program: fx.GraphModule, units: Iterable[Any]) -> None:
        super().__init__(program)
        self.first: dict[str, tuple[int, str]] = {}
        self.last: dict[str, int] = {}
        for i, branches in enumerate(units):
            self.first[branches[0].sum.name] = (i, branches[0].skip.name)
            self.last[branches[-1].sum.name] = i
        self.before: dict[int, Tensor] = {}
        self.after: dict[int, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.name in self.first:
            i, name = self.first[n.name]
            skip = next(one for one in n.all_input_nodes if one.name == name)
            self.before[i] = self.env[skip].clone()
        out = super().run_node(n)
        if n.name in self.last:
            self.after[self.last[n.name]] = out.clone()
        return out
