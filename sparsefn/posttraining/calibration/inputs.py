"""Statistics of what the weights of a module are multiplied by."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsefn._engine.numbers import flags_of
from sparsefn.core.state import State, Where
from sparsefn.core.tree import Tree, check_not_meta, leaves_of
from sparsefn.core.tree.where import as_globs, matching
from sparsefn.nn.ensemble import check_one_state
from sparsefn.nn.modules.calls import Call, limited_tables, quiet_call, tensors_for
from sparsefn.nn.modules.originals import computed_from, layer_of
from sparsefn.nn.modules.padding import padding_in
from sparsefn.nn.modules.weights import is_conv1d, is_weight
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.cache import copied_call
from sparsefn.posttraining.calibration.sums import Stats
from sparsefn.posttraining.calibration.watch import Watch, under_watch, unwatched

_ALL = ("count", "square", "gram")
# What ends the name of a mask of tokens, and its value where it hides one: transformers
# and torch have opposite ones.
_HIDDEN = {"attention_mask": 0, "key_padding_mask": 1}
_DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
# and Conv1D of transformers
_SEEN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


def inputs(
    module: nn.Module,
    state: State | None,
    *args: Tree,
    paths: Where | None = None,
    of: str | Sequence[str] = _ALL,
    tokens: Tensor | None = None,
    **kwargs: Tree,
) -> Stats:
    """Sums over the inputs of each weight in one call: `{path: statistics}`.

    >>> layer = torch.nn.Linear(3, 2)
    >>> sf.calibration.inputs(
    ...     layer, None, torch.tensor([[1.0, 3.0, 0.0], [2.0, 4.0, 1.0]])
    ... )["weight"]["gram"]
    tensor([[ 5., 11.,  2.],
            [11., 25.,  4.],
            [ 2.,  4.,  1.]])

    Args:
        module: The model, in its own mode (train or eval). A UserWarning names a layer
            with dropout, known by its class or an attribute.
        state: A State, whose effective weights are used. None: the module's own
            weights.
        *args: The arguments of one call of the module.
        paths: Globs, or a function of (path, leaf), that choose leaves. None: all.
        of: Names of the wanted statistics; "count" and "square" come always.
            `scores.wanda` needs only "square", and "gram" takes about as much memory as
            the weights.
        tokens: Bool tensor of shape (examples, tokens), False where a token is padding
            and does not count. Each layer must get one input a token, in this order.
            None: all count.
        **kwargs: Arguments of the call by name.

    Returns:
        The statistics of each leaf. An input is a row of the matrix that the weight is
        multiplied by: a token, or a patch of a convolution.

        - "count", 0-d int64: how many inputs there were.
        - "square", float64: the sum of the squares of each entry of an input. It has
          shape (inputs,), or (inputs, 1) where the weight is stored as (inputs,
          outputs), as in `Conv1D` of transformers.
        - "gram", (inputs, inputs): the sum of the products of two entries, float32, or
          float64 where the inputs are.

        For a convolution an input has channels * kernel entries, in the order of
        `weight.flatten(1)`. Where parts of the outputs read other inputs, all three
        have one more axis in front: a convolution with groups, `in_proj_weight` of an
        `nn.MultiheadAttention` whose keys are not its queries, experts in one leaf.
        `as_matrix` gives a weight this form. Leaves that read one tensor, as queries,
        keys and values do, share their statistics.

    Raises:
        TypeError: `state` is no State, or `tokens` no bool tensor.
        ValueError: No leaf that a glob matches was seen, or inputs are not finite, both
            with the paths and their layers. Another name in `of`. A product with a part
            of a weight's inputs. A mask of the call that hides tokens, such as
            `attention_mask`, without `tokens`. With `tokens`, layers that get (tokens,
            examples), as `nn.MultiheadAttention` does inside; with as many examples as
            tokens this is not noticed. As `sf.modules.call`.

    The statistics of two batches are added with `optree.tree_map(torch.add, a, b)`.
    "count" is exact. "square" adds, in float64, squares that are rounded to float32 (to
    float64 for float64 inputs), so another split of the same inputs changes it by the
    rounding of float64 sums alone. "gram" adds in float32, and another split changes it
    as it changes any product of matrices. Inputs of deep layers may themselves differ
    in their last bits between batches of different sizes, which are different products.
    The module, its buffers and the arguments stay as they are; there are no hooks, and
    nothing requires gradients. What is in memory at a time is one call's activations,
    and the statistics.

    Seen are the products and convolutions that torch runs: `nn.Linear`, `nn.Conv1d` to
    `3d`, `Conv1D` of transformers, the projections in `nn.MultiheadAttention`, and
    products of your own forward with a weight or a view of one, also under autocast;
    compiled parts run uncompiled. Not seen are products with a tensor that is computed
    from the weight, as under a parametrization or `spectral_norm`, transposed
    convolutions and fused recurrent layers: they have no entry. A layer of a kind that
    is seen, but that this call did not reach, has statistics of count 0, which are
    added like other statistics. A UserWarning tells of `input_ids` that end or begin
    with two ids or more that the model's config calls padding (`pad_token_id`, or
    without one `eos_token_id`).
    """
    names = names_of(of)
    named = Named.of(module)
    weights = weights_of_call(named, state)
    check_has_values("inputs", named, weights)
    if paths is None:
        chosen = weights
    else:
        chosen = matching("paths", paths, weights)
    matrices = [path for path in chosen if weights[path].ndim > 1]
    check_data("inputs", module, [((args, kwargs), tokens)])
    collect = collector(named, weights, matrices, names)
    stats, _ = collect(copied_call((args, kwargs)), tokens)
    stats = {path: stats[path] for path in chosen if path in stats}
    check_finite_stats(stats, named)
    globs: list[Where] = (
        [paths]
        if callable(paths)
        else list(as_globs("*" if paths is None else paths, "paths"))
    )
    for glob in globs:
        asked = list(matching("paths", glob, weights))
        if not any(path in stats and stats[path]["count"].any() for path in asked):
            raise ValueError(
                "inputs: no product was seen with "
                f"{', '.join(layer_at(named, path) for path in asked)}"
            )
    return stats


def names_of(of: str | Sequence[str]) -> tuple[str, ...]:
    """The names of the statistics that are wanted; counts and squares are there always.

    >>> names_of("square"), names_of(["gram"])
    (('count', 'square'), ('count', 'square', 'gram'))
    """
    names = (of,) if isinstance(of, str) else tuple(of)
    for name in names:
        if name not in _ALL:
            raise ValueError(
                f"inputs: expected of to name some of {', '.join(map(repr, _ALL))}, "
                f"got {name!r}"
            )
    return _ALL if "gram" in names else _ALL[:2]


def check_data(
    what: str, module: nn.Module, data: Iterable[tuple[Call, Tensor | None]]
) -> None:
    """Raise where a mask hides tokens and nothing says which tokens count, or where
    that does not fit the call; warn of dropout, and of ids that are padded.

    >>> call = ((torch.ones(2, 3),), {})
    >>> check_data("inputs", torch.nn.Linear(3, 1), [(call, torch.ones(2, 3))])
    Traceback (most recent call last):
        ...
    TypeError: inputs: expected tokens to be a bool tensor, True for each token that
    counts, got torch.float32 of shape (2, 3)
    """
    noisy = [
        path for path, part in module.named_modules() if part.training and _drops(part)
    ]
    if noisy:
        warnings.warn(
            f"{what}: dropout is on in {noisy[0]!r}: call eval() of the model first",
            stacklevel=3,
        )
    ids = list[Tree]()
    for call, tokens in data:
        given = arguments_by_name(module, call)
        if tokens is None:
            _check_masks(what, module, given)
            ids += [x for name, x in given.items() if name.endswith("input_ids")]
        else:
            _check_tokens(what, module, given, tokens)
    padding = padding_in(module, ids)
    if padding:
        mend = (
            "give the model the attention_mask of its tokenizer, and leave it out "
            "with tokens=attention_mask.bool()"
        )
        if _has_decoder(module):
            mend = "give examples of one length in one call"
        warnings.warn(
            f"{what}: {padding}, and count in the statistics: {mend}",
            UserWarning,
            stacklevel=3,
        )


def _check_masks(what: str, module: nn.Module, given: Mapping[str, Tree]) -> None:
    shapes = _shapes(given)
    for name, mask in given.items():
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            continue
        value = next((x for end, x in _HIDDEN.items() if name.endswith(end)), None)
        if value is None or shapes.count(mask.shape) < 2:
            continue
        hidden = int((mask == value).sum())
        if hidden and bool(((mask == 0) | (mask == 1)).all()):
            other = "~" if value else ""
            mend = f"leave it out of the statistics with tokens={other}{name}.bool()"
            if _has_decoder(module):
                mend = "give examples of one length in one call"
            raise ValueError(
                f"{what}: expected whole windows, but {name!r} hides {hidden} of "
                f"{mask.numel()} tokens as padding: {mend}"
            )


def _check_tokens(
    what: str,
    module: nn.Module,
    given: Mapping[str, Tree],
    tokens: object,
) -> None:
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.bool or not tokens.ndim:
        got = type(tokens).__name__
        if isinstance(tokens, Tensor):
            got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        raise TypeError(
            f"{what}: expected tokens to be a bool tensor, True for each token that "
            f"counts, got {got}"
        )
    if _has_decoder(module):
        raise ValueError(
            f"{what}: expected a model of one sequence with tokens, got an encoder "
            "with a decoder"
        )
    shapes = _shapes(given)
    if tokens.shape not in shapes and tokens.shape[::-1] in shapes:
        wanted = tuple(tokens.shape[::-1])
        raise ValueError(
            f"{what}: expected tokens of shape {wanted}, as the call has, got "
            f"{tuple(tokens.shape)}"
        )


def _shapes(given: Mapping[str, Tree]) -> list[torch.Size]:
    # The first two dimensions of all tensors of a call.
    tensors = leaves_of(list(given.values()))
    return [x.shape[:2] for x in tensors if isinstance(x, Tensor)]


def arguments_by_name(module: nn.Module, call: Call) -> dict[str, Tree]:
    """The arguments of a call by their names, those without a keyword first.

    >>> arguments_by_name(torch.nn.Linear(2, 1), ((torch.ones(2),), {}))
    {'input': tensor([1., 1.])}
    """
    return (
        dict(zip(inspect.signature(module.forward).parameters, call[0], strict=False))
        | call[1]
    )


def _has_decoder(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def _drops(part: nn.Module) -> bool:
    # Attention and whole models of transformers have the share as a number, for torch's
    # function.
    shares = [
        x for name, x in vars(part).items() if "drop" in name and isinstance(x, float)
    ]
    return any(shares) or (isinstance(part, _DROPOUT) and part.p > 0)


def check_has_values(call: str, named: Named, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a weight to run with, or a buffer, of the meta device.

    >>> check_has_values(
    ...     "inputs", Named.of(torch.nn.Linear(2, 1)), {"w": torch.ones(1)}
    ... )

    A module of the meta device may run with the weights of a state.
    """
    check_not_meta(call, (*weights.items(), *named.module.named_buffers()))


def weights_of_call(named: Named, state: State | None) -> dict[str, Tensor]:
    """The weights that a module is to run with, by name, each in memory of its own.

    >>> list(weights_of_call(Named.of(torch.nn.Linear(2, 1)), None))
    ['weight', 'bias']
    """
    if state is not None and not isinstance(state, State):
        raise TypeError(
            "expected state to be a State from init, or None, got "
            f"{type(state).__name__}"
        )
    if state is not None:
        check_one_state(state)
    given = tensors_for(
        named.module,
        "parameters",
        {} if state is None else state,
        partial=state is None,
        own=named.own,
    )
    written = limited_tables(named.module)
    storages = set[int]()
    weights = dict[str, Tensor]()
    for name, (at, x) in given.items():
        start = x.untyped_storage().data_ptr()
        shared = at in written or start in storages
        weights[name] = x.detach().clone() if shared else x.detach()
        storages.add(start)
    return weights


def collector(
    named: Named,
    weights: Mapping[str, Tensor],
    chosen: Iterable[str],
    names: Sequence[str],
    narrow: bool = False,
) -> Callable[[Call, Tensor | None], tuple[Stats, Tree]]:
    """A function of a call of the module with these weights: the statistics of the
    chosen leaves, and what the call returns.

    >>> layer = Named.of(torch.nn.Linear(2, 1, bias=False))
    >>> collect = collector(layer, {"weight": torch.ones(1, 2)}, ["weight"], ["count"])
    >>> stats, out = collect(((torch.ones(5, 2),), {}), None)
    >>> stats["weight"], out.shape
    ({'count': tensor(5), 'square': tensor([5., 5.], dtype=torch.float64)},
    torch.Size([5, 1]))

    Leaves come in the order in which they were first seen; after them come the leaves
    of layers that were not reached. Without leaves nothing is watched, which is faster,
    and so it is where the watch is `narrow`: it looks at the functions of torch that
    get a leaf, and not at all operations. The second argument are the tokens whose
    inputs are counted.
    """
    module = named.module
    at = {name: path for name, (path, _) in named.own.items()}
    plain = {
        name: weights[name] for name in chosen if not computed_from(module, at[name])
    }
    watch = Watch(plain, "gram" in names)
    given = {name: under_watch(x, watch) for name, x in plain.items() if narrow}
    run = quiet_call(named, {**weights, **given})
    wide = bool(plain) and not narrow

    def collect(call: Call, tokens: Tensor | None) -> tuple[Stats, Tree]:
        watch.start(tokens)
        with (
            torch.no_grad(),
            without_fusion(),
            watch if wide else contextlib.nullcontext(),
        ):
            out = unwatched(run(call))
        stats = watch.stats()
        watch.start(None)
        for name, weight in plain.items():
            if name not in stats and _is_seen(module, at[name], weight):
                unreached = _unreached(layer_of(module, at[name]), weight)
                stats[name] = {
                    of: x for of, x in unreached.items() if of == "count" or of in names
                }
        return stats, out

    return collect


def _unreached(layer: nn.Module, weight: Tensor) -> dict[str, Tensor]:
    # The sums over no inputs, which add to the sums of any batch. Inputs of attention
    # may be of one kind, or of three.
    turned = is_conv1d(layer)
    groups = getattr(layer, "groups", 1)
    width = weight.shape[0] if turned else weight.shape[1:].numel()
    size = () if isinstance(layer, nn.MultiheadAttention) else (width,)
    split = (groups,) if groups > 1 else ()
    square = torch.zeros(split + size, dtype=torch.float64, device=weight.device)
    gram = torch.zeros(
        split + size + size,
        dtype=torch.promote_types(weight.dtype, torch.float32),
        device=weight.device,
    )
    count = torch.zeros(split, dtype=torch.int64, device=weight.device)
    return {
        "count": count,
        "square": square[..., None] if turned else square,
        "gram": gram,
    }


def check_finite_stats(stats: Stats, named: Named, what: str = "inputs") -> None:
    """Raise ValueError where inputs were not finite, with the first such leaf.

    >>> check_finite_stats(
    ...     {"weight": {"square": torch.tensor([torch.inf])}},
    ...     Named.of(torch.nn.Linear(2, 1)),
    ... )
    Traceback (most recent call last):
        ...
    ValueError: inputs: expected finite inputs of 'weight' (Linear), got NaN or infinity
    in sums
    """
    # a device is waited for once
    shared = {id(of["square"]): of for of in stats.values()}
    flags = flags_of([_finite(of) for of in shared.values()])
    finite = dict(zip(shared, flags, strict=True))
    for path, of in stats.items():
        if not finite[id(of["square"])]:
            raise ValueError(
                f"{what}: expected finite inputs of {layer_at(named, path)}, got NaN "
                "or infinity in sums"
            )


def _finite(stats: dict[str, Tensor]) -> Tensor:
    # No sum of products is larger than the largest sum of squares, so the diagonal
    # tells of the whole.
    gram = stats.get("gram", stats["square"])
    return (
        stats["square"].isfinite().all()
        & (gram.diagonal(0, -2, -1) if gram.ndim > 1 else gram).isfinite().all()
    )


def layer_at(named: Named, name: str) -> str:
    """The name of a leaf, and the layer that it belongs to, for errors.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(2, 2))
    >>> layer_at(Named.of(model), "0.weight")
    "'0.weight' (Embedding)"
    """
    at = named.own[name][0]
    found = computed_from(named.module, at)
    if found:
        return (
            f"{name!r} ({found.path!r} is computed from it: make it a parameter with "
            f"{found.mend})"
        )
    return f"{name!r} ({type(layer_of(named.module, at)).__name__})"


def is_table(named: Named, name: str) -> bool:
    """Whether a leaf is the table of an embedding, whose rows are looked up.

    >>> is_table(Named.of(torch.nn.Embedding(2, 2)), "weight")
    True
    """
    layer = layer_of(named.module, named.own[name][0])
    return isinstance(layer, nn.Embedding | nn.EmbeddingBag)


def _is_seen(module: nn.Module, at: str, weight: Tensor) -> bool:
    return is_weight(module, at, weight, _SEEN) or (
        is_conv1d(layer_of(module, at)) and is_weight(module, at, weight)
    )


@contextlib.contextmanager
def without_fusion() -> Iterator[None]:
    """Without torch's fused attention and encoder layer, and compiled parts, which
    would hide their products.

    >>> with without_fusion():
    ...     torch.backends.mha.get_fastpath_enabled()
    False
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # it takes a second to import, and without it nothing is compiled
    compiler = "torch._dynamo" in sys.modules
    try:
        with (
            torch.compiler.set_stance("force_eager")
            if compiler
            else contextlib.nullcontext()
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
