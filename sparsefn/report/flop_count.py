"""Inference FLOPs of a sparse model, by torch's own counter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from sparsefn._engine.leaves import is_sparse
from sparsefn.core.checks import aligned
from sparsefn.core.state import State, effective
from sparsefn.core.tree import Tree, flatten
from sparsefn.nn.ensemble import check_one_state
from sparsefn.nn.modules.calls import call_with_buffers
from sparsefn.nn.modules.params import buffers_of

Formula: TypeAlias = Callable[..., int]
# whose first argument is added, not multiplied
_ADD_FIRST = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)


class Cost(NamedTuple):
    """FLOPs of one module with its submodules.

    >>> from sparsefn.report.flop_count import Cost
    >>> Cost("0", dense=64, sparse=16).sparse
    16

    Attributes:
        path: Dotted path of the module, or "total".
        dense: FLOPs without masks.
        sparse: FLOPs under the masks.
    """

    path: str
    dense: int
    sparse: int


class Flops(NamedTuple):
    """The result of `flops`; `str()` of it is a table.

    >>> layer = torch.nn.Linear(4, 2)
    >>> sf.report.flops(
    ...     layer, sf.dense().init(sf.modules.params_of(layer)), torch.ones(1, 4)
    ... ).total
    Cost(path='total', dense=16, sparse=16)

    Attributes:
        rows: A row for every module that was called and has FLOPs, by its dotted path,
            submodules included.
        total: The row of the whole call.
        uncounted: Paths of sparsified leaves that no counted product used.
    """

    rows: tuple[Cost, ...]
    total: Cost
    uncounted: tuple[str, ...]

    def __str__(self) -> str:
        """Align the rows, with the total and the uncounted leaves below."""
        lines = [("module", "dense", "sparse", "ratio")]
        for row in (*self.rows, self.total):
            ratio = f"{row.sparse / row.dense:.4f}" if row.dense else ""
            lines.append((row.path, f"{row.dense:,}", f"{row.sparse:,}", ratio))
        missed = f"\nnot counted: {', '.join(self.uncounted)}" if self.uncounted else ""
        return aligned(lines, left=1) + missed


def flops(
    module: nn.Module,
    state: State,
    *args: Tree,
    buffers: Mapping[str, Tensor] | None = None,
    **kwargs: Tree,
) -> Flops:
    """Count the FLOPs of one call of the module, dense and with the masks of a state.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ... )
    >>> state = sf.static(0.75, where="0.weight").init(sf.modules.params_of(model))
    >>> print(sf.report.flops(model, state, torch.ones(10, 8)))
    module  dense  sparse   ratio
    0         640     160  0.2500
    2         160     160  1.0000
    total     800     320  0.4000

    Args:
        module: The module, in its own mode (train or eval).
        state: The state whose masks and weights count.
        *args: Inputs of the module.
        buffers: The buffers by path, as in `sf.modules.call`. None: the module's own.
        **kwargs: Keyword inputs of the module.

    Returns:
        `rows` for the modules, their `total`, and in `uncounted` the sparsified leaves
        that no counted product used. `str()` of it is a table.

    Raises:
        TypeError: `state` is not a State.
        ValueError: `state` is a stack of states, or `sf.modules.call` raises it.

    The conventions are as in `torch.utils.flop_counter`: a multiply and its add are 2
    FLOPs, matrix products, convolutions and attention count, biases, activations, norms
    and lookups do not. A product with a sparsified leaf, or a view of one, counts its
    kept entries only, exactly; a leaf that is used twice counts twice, and where both
    factors are sparsified the sparser one decides. Every other operation counts as
    dense, also a product with a weight that was cast or computed from the leaf. The
    numbers are the work of a perfect sparse kernel, not seconds.

    The call runs on the meta device and costs nothing; a forward that needs values is
    run as it is, the global random state put back. Nothing that is given is changed.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"expected state to be a State from init, got {type(state).__name__}"
        )
    check_one_state(state)
    inputs = (args, buffers_of(module) if buffers is None else buffers, kwargs)
    try:
        return _count(module, state, torch.device("meta"), *inputs)
    except Exception:
        # the meta device cannot run it; an error of the call itself is raised again
        # below
        pass
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        return _count(module, state, None, *inputs)


def _count(
    module: nn.Module,
    state: State,
    device: torch.device | None,
    args: Tree,
    buffers: Tree,
    kwargs: Tree,
) -> Flops:
    def moved(tree: Tree) -> Tree:
        # Always copies, as a forward may write into its inputs.
        return optree.tree_map(
            lambda x: (
                x.detach().to(device or x.device, copy=True)
                if isinstance(x, Tensor)
                else x
            ),
            tree,
        )

    # Contiguous copies with a storage each: by its strides a view shows which entries
    # of the mask it has.
    # They require gradients because the fused attention of torch's own modules, which
    # hides its products, is for tensors that do not.
    leaves = flatten(moved(effective(state)))[0]
    weights = {
        p: x.clone(memory_format=torch.contiguous_format).requires_grad_()
        for p, x in leaves.items()
    }
    masks = dict(zip(weights, flatten(state.masks)[0].values(), strict=True))
    masks = {
        path: masks[path].contiguous()
        for path, x in weights.items()
        if is_sparse(masks[path], x)
    }
    used: set[str] = set()
    dense = FlopCounterMode(display=False)
    sparse = FlopCounterMode(
        display=False, custom_mapping=_thinned(masks, weights, used)
    )
    # The recurrent kernels of these backends hide their products, too.
    backends = (
        [_without(torch.backends.mkldnn), _without(torch.backends.cudnn)]
        if device is None
        else [device]
    )
    # A forward may checkpoint, as no backward follows: `call` refuses that where it is
    # the first with such hooks.
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.detach, torch.detach)
    with ExitStack() as stack:
        for context in (
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            *backends,
            dense,
            sparse,
            hooks,
        ):
            stack.enter_context(context)
        call_with_buffers(
            module, weights, moved(dict(buffers)), *moved(args), **moved(kwargs)
        )
    dense_counts = _by_module(dense)
    sparse_counts = _by_module(sparse)
    # The counter names a module by the class of the root and its path.
    names = {
        path: f"{type(module).__name__}.{path}"
        for path, _ in module.named_modules(remove_duplicate=False)
    }
    rows = [
        Cost(path, dense_counts[name], sparse_counts[name])
        for path, name in names.items()
        if name in dense_counts
    ]
    total = Cost("total", dense.get_total_flops(), sparse.get_total_flops())
    return Flops(tuple(rows), total, tuple(path for path in masks if path not in used))


def _by_module(mode: FlopCounterMode) -> dict[str, int]:
    return {name: sum(ops.values()) for name, ops in mode.get_flop_counts().items()}


@contextmanager
def _without(backend: Any) -> Iterator[None]:
    before = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = before


def _thinned(
    masks: dict[str, Tensor], weights: dict[str, Tensor], used: set[str]
) -> dict[object, Formula]:
    """Torch's formulas, times the share of the weights that is kept; they add to `used`
    whose weights they met.
    """
    paths = {weights[path].untyped_storage()._cdata: path for path in masks}

    @functools.cache
    def kept(path: str, size: torch.Size, stride: tuple[int, ...], offset: int) -> int:
        mask = masks[path]
        return int(
            torch.count_nonzero(
                mask.as_strided(size, stride, mask.storage_offset() + offset)
            )
        )

    def thin(op: object, formula: Formula) -> Formula:
        if op in _ADD_FIRST:
            factors = slice(1, 3)
        else:
            factors = slice(0, 2)

        def count(*args: Tensor, **kwargs: object) -> int:
            full = formula(*args, **kwargs)
            counts = [full]
            for x in args[factors]:
                path = paths.get(x.untyped_storage()._cdata)
                if path is not None:
                    used.add(path)
                    counts.append(
                        full
                        * kept(path, x.shape, x.stride(), x.storage_offset())
                        // max(x.numel(), 1)
                    )
            return min(counts)

        count._get_raw = True  # type: ignore[attr-defined]  # tensors, not their shapes
        return count

    return {op: thin(op, formula) for op, formula in flop_registry.items()}
