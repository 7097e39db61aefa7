"""What an update of the masks costs: RigL and SET, on the weights of a ResNet-50 and on
many small leaves.

    python benchmarks/updates.py
    python benchmarks/updates.py --quick

Two peers are installed apart, see requirements-peers.txt; without one its table is left
out, with a message. Masks are held against those of the peers.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from _models import Weight, normal_tree, resnet50_shapes
from _peers import cerebras_sparse, rigl_torch_scheduler
from _timing import Case, Row, compare, options_of, same_up_to_ties, write
from torch import Tensor, nn

import sparsefn as sf

SPARSITY, DROP, RATE = 0.9, 0.3, 1e-3
Leaves = dict[str, Tensor]


def start_of(algorithm: sf.Algorithm, weights: Leaves) -> sf.State:
    """A state in training: weights are zero off the masks."""
    state = algorithm.init(weights)
    return state._replace(params=sf.effective(state))


def moved_by_topk(
    weight: Tensor, gradient: Tensor, mask: Tensor, draw: bool
) -> tuple[Tensor, Tensor]:
    """RigL's or SET's update of a layer with torch alone: new weight and mask."""
    kept = int(mask.sum())
    n_drop = round(DROP * kept)
    strength = (weight.abs() * mask).reshape(-1)
    stay = torch.zeros(strength.shape, dtype=torch.bool)
    stay[torch.topk(strength, kept - n_drop, sorted=False).indices] = True
    wish = torch.rand(strength.shape) if draw else gradient.abs().reshape(-1)
    new = stay.clone()
    new[torch.topk(wish.masked_fill(stay, -1.0), n_drop, sorted=False).indices] = True
    new = new.reshape(mask.shape)
    return torch.where(new & mask, weight, 0.0), new


def update_cases(shapes: Sequence[tuple[int, ...]], draws: bool) -> list[Case]:
    """RigL (and SET, which draws) on these weights: 90% zeros, 30% of the rest
    moved.
    """
    weights, grads = normal_tree(shapes, 0), normal_tree(shapes, 1)
    algorithms = {"rigl": sf.rigl(SPARSITY, drop_fraction=DROP, init="magnitude")}
    if draws:
        algorithms["set"] = sf.set(
            SPARSITY, drop_fraction=DROP, init="magnitude", key=sf.random.key(1)
        )
    cases = [Case("floor: w > t, each", lambda: [w > 1.6 for w in weights.values()])]
    for name, algorithm in algorithms.items():
        state = start_of(algorithm, weights)

        def ours(
            algorithm: sf.Algorithm = algorithm, state: sf.State = state
        ) -> sf.State:
            return algorithm.update(state, grads, 0)

        def theirs(
            state: sf.State = state, draw: bool = name == "set"
        ) -> dict[str, tuple[Tensor, Tensor]]:
            return {
                p: moved_by_topk(w, grads[p], state.masks[p], draw)
                for p, w in state.params.items()
            }

        new = ours()
        for path, (weight, mask) in theirs().items():
            if name == "set":
                if int(mask.sum()) != int(new.masks[path].sum()):
                    raise AssertionError(f"counts at {path}")
                continue
            same_up_to_ties(new.masks[path], mask, grads[path].abs())
            both = new.masks[path] & mask
            if not torch.equal(
                torch.where(both, new.params[path], 0.0), torch.where(both, weight, 0.0)
            ):
                raise AssertionError(f"weights at {path}")
        once = (
            "torch.topk and torch.rand of each layer"
            if name == "set"
            else "torch.topk of each layer, twice"
        )
        cases += [Case(f"sparsefn.{name}", ours), Case(once, theirs)]
    return cases


def rigl_torch_cases(shapes: Sequence[tuple[int, ...]]) -> list[Case]:
    """rigl-torch's update beside ours, on the same masks. It leaves the first layer
    dense and rounds counts down.
    """
    scheduler_class = rigl_torch_scheduler()
    if scheduler_class is None:
        return []
    weights, grads = normal_tree(shapes, 0), normal_tree(shapes, 1)

    def scheduler() -> Any:
        model = nn.Sequential(*(Weight(w.clone()) for w in weights.values()))
        torch.manual_seed(0)  # it draws its first masks, the same each time
        # The cosine of a far end is 1: the fraction is DROP in full.
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        made = scheduler_class(
            model,
            optimizer,
            1 - SPARSITY,
            T_end=10**12,
            alpha=DROP,
            ignore_linear_layers=False,
        )
        for module, hook, path in zip(
            model, made.backward_hook_objects, weights, strict=True
        ):
            module.weight.grad = grads[path].clone()
            if hook is not None:
                hook.dense_grad = grads[path].clone()
        return made

    first = scheduler()
    pairs = zip(weights, first.backward_masks, strict=True)
    masks = {
        path: torch.tensor(True) if mask is None else mask.clone()
        for path, mask in pairs
    }
    masked = {path: torch.where(masks[path], w, 0.0) for path, w in weights.items()}
    algorithm = sf.drop_grow(
        "current",
        drop=sf.scores.magnitude,
        grow=sf.scores.gradient,
        drop_fraction=DROP,
        count=sf.budgets.rounded_down,
        where=lambda path, leaf: bool(masks[path].ndim),
        init=masks,
    )
    state = algorithm.init(masked)
    ours = algorithm.update(state, grads, 0)
    first._rigl_step()
    for path, mask in zip(weights, first.backward_masks, strict=True):
        if mask is not None:
            same_up_to_ties(ours.masks[path], mask, grads[path].abs())
    return [
        Case("sparsefn.drop_grow", lambda: algorithm.update(state, grads, 0)),
        Case("rigl-torch", lambda made: made._rigl_step(), scheduler),
    ]


def cerebras_cases(shapes: Sequence[tuple[int, ...]]) -> list[Case]:
    """The functions behind cerebras.pytorch.sparse's RigL, beside ours on the same
    masks. They give masks alone.
    """
    sparse = cerebras_sparse()
    if sparse is None:
        return []
    weights, grads = normal_tree(shapes, 0), normal_tree(shapes, 1)
    fraction = torch.tensor(DROP)

    # it keeps a float32 product, rounded down
    def lost(rate: float, active: Tensor) -> Tensor:
        return active - ((1 - fraction) * active.float()).long()

    algorithm = sf.rigl(SPARSITY, drop_fraction=DROP, count=lost, init="magnitude")
    state = start_of(algorithm, weights)
    # Half an entry more than the target: it, too, is a float32 product that is rounded
    # down.
    targets = {
        p: 1 - (mask.sum() + 0.5) / mask.numel() for p, mask in state.masks.items()
    }

    def theirs() -> Leaves:
        masks = {}
        for path, weight in state.params.items():
            stay, count = sparse.make_mask_drop_minimum(
                weight.abs(), state.masks[path], fraction
            )
            masks[path] = sparse.make_mask_grow_maximum(
                grads[path].abs(), stay, targets[path], count
            )
        return masks

    ours = algorithm.update(state, grads, 0)
    for path, mask in theirs().items():
        same_up_to_ties(ours.masks[path], mask, grads[path].abs())
    return [
        Case("sparsefn.rigl", lambda: algorithm.update(state, grads, 0)),
        Case("cerebras_pytorch, masks alone", theirs),
    ]


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    divide = 16 if options.smoke else 4 if options.quick else 1
    shapes = resnet50_shapes(divide)
    size = sum(torch.Size(shape).numel() for shape in shapes)
    what = "ResNet-50's 54 weights" + (f", channels / {divide}" if divide > 1 else "")
    # The inputs of a table are dropped before the next: the states of ResNet-50 are
    # large.
    tables: list[tuple[str, Callable[[], list[Case]], int]] = [
        (f"RigL update of {what}", lambda: update_cases(shapes, draws=True), size),
        (
            f"RigL update of {what}, the first dense",
            lambda: rigl_torch_cases(shapes),
            size,
        ),
        (
            f"RigL update of {what}, counts in float32",
            lambda: cerebras_cases(shapes),
            size,
        ),
    ]
    total = 10_000 if options.smoke else 1_000_000
    for leaves in (1, 10) if options.smoke else (1, 10, 100, 1000):
        rows = [(total // leaves // 10, 10)] * leaves
        title = (
            f"RigL update of 1e{len(str(total)) - 1} weights in {leaves} "
            f"{'leaf' if leaves == 1 else 'leaves'}"
        )
        tables.append((title, partial(update_cases, rows, draws=False), total))
    done = {}
    for title, make, weights in tables:
        cases = make()
        if cases:
            done[title] = compare(title, cases, options, weights)
    return done


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("updates", main(chosen), chosen)
