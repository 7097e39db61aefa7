"""What sparse training adds: an update of the masks, a step of the optimizer, a step of training.

    python benchmarks/updates.py
    python benchmarks/updates.py --quick

Two peers are installed apart, see requirements-peers.txt; without one its table is left out, with a message. Masks are
held against those of the peers, and weights after a step of training against `torch.nn.utils.prune`'s.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torchopt
from _models import Transformer, Weight, convnet, normal_tree, resnet50_shapes
from _peers import cerebras_sparse, rigl_torch_scheduler
from _timing import Case, Row, compare, options_of, same_up_to_ties, write
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

import sparsefn as sf

SPARSITY, DROP, RATE = 0.9, 0.3, 1e-3
Leaves = dict[str, Tensor]


# ---- an update of the masks ----------------------------------------------------------------------


def start_of(algorithm: sf.Algorithm, weights: Leaves) -> sf.State:
    """A state in training: weights are zero off the masks."""
    state = algorithm.init(weights)
    return state._replace(params=sf.effective(state))


def moved_by_topk(weight: Tensor, gradient: Tensor, mask: Tensor, draw: bool) -> tuple[Tensor, Tensor]:
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


def update_cases(shapes: Sequence[tuple[int, ...]], draw: bool) -> list[Case]:
    """RigL (or SET, which draws) on these weights: 90% zeros, 30% of the rest moved."""
    make = sf.set if draw else sf.rigl
    options = {"key": sf.random.key(1)} if draw else {}
    weights, grads = normal_tree(shapes, 0), normal_tree(shapes, 1)
    algorithm = make(SPARSITY, drop_fraction=DROP, init="magnitude", **options)
    state = start_of(algorithm, weights)

    def by_topk() -> dict[str, tuple[Tensor, Tensor]]:
        return {p: moved_by_topk(w, grads[p], state.masks[p], draw) for p, w in state.params.items()}

    ours, theirs = algorithm.update(state, grads, 0), by_topk()
    for path, (weight, mask) in theirs.items():
        if draw:
            if int(mask.sum()) != int(ours.masks[path].sum()):
                raise AssertionError(f"counts at {path}")
            continue
        same_up_to_ties(ours.masks[path], mask, grads[path].abs())
        both = ours.masks[path] & mask
        if not torch.equal(torch.where(both, ours.params[path], 0.0), torch.where(both, weight, 0.0)):
            raise AssertionError(f"weights at {path}")
    return [
        Case("floor: |w| > t, each", lambda: [w.abs() > 1.6 for w in weights.values()]),
        Case(f"sparsefn.{'set' if draw else 'rigl'}", lambda: algorithm.update(state, grads, 0)),
        Case("torch.topk of each layer, twice", by_topk),
    ]


def rigl_torch_cases(shapes: Sequence[tuple[int, ...]]) -> list[Case]:
    """rigl-torch's update beside ours, on the same masks. It leaves the first layer dense and rounds counts down."""
    scheduler_class = rigl_torch_scheduler()
    if scheduler_class is None:
        return []
    weights, grads = normal_tree(shapes, 0), normal_tree(shapes, 1)

    def scheduler() -> Any:
        model = nn.Sequential(*(Weight(w.clone()) for w in weights.values()))
        torch.manual_seed(0)  # it draws its first masks, the same each time
        # The cosine of a far end is 1: the fraction is DROP in full.
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        made = scheduler_class(model, optimizer, 1 - SPARSITY, T_end=10**12, alpha=DROP, ignore_linear_layers=False)
        for module, hook, path in zip(model, made.backward_hook_objects, weights, strict=True):
            module.weight.grad = grads[path].clone()
            if hook is not None:
                hook.dense_grad = grads[path].clone()
        return made

    first = scheduler()
    pairs = zip(weights, first.backward_masks, strict=True)
    masks = {path: torch.tensor(True) if mask is None else mask.clone() for path, mask in pairs}
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
    """The functions behind cerebras.pytorch.sparse's RigL, beside ours on the same masks. They give masks alone."""
    sparse = cerebras_sparse()
    if sparse is None:
        return []
    weights, grads = normal_tree(shapes, 0), normal_tree(shapes, 1)
    fraction = torch.tensor(DROP)

    def lost(rate: float, active: Tensor) -> Tensor:  # it keeps a float32 product, rounded down
        return active - ((1 - fraction) * active.float()).long()

    algorithm = sf.rigl(SPARSITY, drop_fraction=DROP, count=lost, init="magnitude")
    state = start_of(algorithm, weights)
    # Half an entry more than the target: it, too, is a float32 product that is rounded down.
    targets = {p: 1 - (mask.sum() + 0.5) / mask.numel() for p, mask in state.masks.items()}

    def theirs() -> Leaves:
        masks = {}
        for path, weight in state.params.items():
            stay, count = sparse.make_mask_drop_minimum(weight.abs(), state.masks[path], fraction)
            masks[path] = sparse.make_mask_grow_maximum(grads[path].abs(), stay, targets[path], count)
        return masks

    ours = algorithm.update(state, grads, 0)
    for path, mask in theirs().items():
        same_up_to_ties(ours.masks[path], mask, grads[path].abs())
    return [
        Case("sparsefn.rigl", lambda: algorithm.update(state, grads, 0)),
        Case("cerebras_pytorch, masks alone", theirs),
    ]


# ---- a step of the optimizer ---------------------------------------------------------------------


def optimizer_cases(shapes: Sequence[tuple[int, ...]]) -> list[Case]:
    """Adam on these weights: TorchOpt's bare, inside a fixed mask, inside RigL between two changes, and ours.

    Torch takes longer for the root of a zero than for others, and so TorchOpt's Adam for masked gradients.
    """
    weights, grads, adam = normal_tree(shapes, 0), normal_tree(shapes, 1), torchopt.adam(RATE)

    def bare(optimizer: Any, weights: Leaves, grads: Leaves) -> Callable[[], Any]:
        memory = optimizer.init(weights)

        def step() -> Any:
            updates, new = optimizer.update(grads, memory, params=weights, inplace=False)
            return torchopt.apply_updates(weights, updates, inplace=False), new

        return step

    def inside(algorithm: sf.Algorithm, optimizer: Any) -> Callable[[], Any]:
        whole = sf.with_optimizer(algorithm, optimizer)
        state = whole.init(weights)
        return lambda: whole.update(state, grads, 1)

    static = sf.static(SPARSITY, init="magnitude")
    resting = sf.rigl(SPARSITY, when=sf.every(100), init="magnitude")
    masks = static.init(weights).masks
    masked = [sf.apply_masks(tree, masks) for tree in (weights, grads)]
    return [
        Case("TorchOpt's adam, dense", bare(adam, weights, grads)),
        Case("TorchOpt's adam, on masked weights and gradients", bare(adam, *masked)),
        Case("with_optimizer(static, TorchOpt's adam)", inside(static, torchopt.adam(RATE))),
        Case("with_optimizer(rigl at rest, the same)", inside(resting, torchopt.adam(RATE))),
        Case("sparsefn's adam, dense", bare(sf.optimizers.adam(RATE), weights, grads)),
        Case("with_optimizer(rigl at rest, sparsefn's adam)", inside(resting, sf.optimizers.adam(RATE))),
    ]


# ---- a step of training --------------------------------------------------------------------------


def training_cases(model: nn.Module, x: Tensor, y: Tensor) -> list[Case]:
    """A step of SGD: dense and functional, with a fixed mask, and with the hooks of torch.nn.utils.prune."""
    params = sf.modules.params_of(model)

    def loss(params: Leaves) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    differentiate = sf.modules.value_and_grad(loss)

    def dense(gradient: Callable[[Leaves], Leaves]) -> Callable[[], Leaves]:
        def step() -> Leaves:
            grads = gradient(params)
            return {path: p - RATE * grads[path] for path, p in params.items()}

        return step

    # The hook of a layer runs when the layer is called: nn.MultiheadAttention reads out_proj's weight without.
    def where(path: str, leaf: Tensor) -> bool:
        return sf.default_where(path, leaf) and "out_proj" not in path

    static = sf.static(SPARSITY, where=where, init="magnitude")
    algorithm = sf.with_optimizer(static, sf.optimizers.sgd(RATE))
    start = algorithm.init(params)

    def masked(state: sf.State) -> sf.State:
        return algorithm.update(state, differentiate(sf.effective(state))[1], 0)

    hooked = copy.deepcopy(model)
    for path, mask in start.masks.items():
        if mask.ndim:
            owner, _, name = path.rpartition(".")
            prune.custom_from_mask(hooked.get_submodule(owner), name, mask)
    plain = copy.deepcopy(model)

    def stepping(module: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(module.parameters(), RATE)

        def step() -> None:
            optimizer.zero_grad()
            functional.cross_entropy(module(x), y).backward()
            optimizer.step()

        return step

    by_hooks = stepping(hooked)
    by_hooks()
    theirs = dict(hooked.named_parameters())
    for path, weight in sf.effective(masked(start)).items():
        mask = start.masks[path]
        other = theirs[f"{path}_orig"].detach() * mask if mask.ndim else theirs[path].detach()
        torch.testing.assert_close(weight, other, msg=lambda text, at=path: f"weights at {at}: {text}")
    return [
        Case("dense, functional", dense(lambda params: differentiate(params)[1])),
        Case("dense, torch.func.grad", dense(torch.func.grad(loss))),
        Case("sparsefn.static, with_optimizer", lambda: masked(start)),
        Case("torch.nn.utils.prune, torch.optim", by_hooks),
        Case("dense, torch.optim", stepping(plain)),
    ]


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    divide = 16 if options.smoke else 4 if options.quick else 1
    shapes = resnet50_shapes(divide)
    what = "ResNet-50's 54 weights" + (f", channels / {divide}" if divide > 1 else "")
    # What a table is made of is dropped before the next: the states of ResNet-50 are large.
    tables: list[tuple[str, Callable[[], list[Case]], bool]] = [
        (f"RigL update of {what}", lambda: update_cases(shapes, draw=False), True),
        (f"SET update of {what}", lambda: update_cases(shapes, draw=True), True),
        (f"RigL update of {what}, the first dense", lambda: rigl_torch_cases(shapes), True),
        (f"RigL update of {what}, counts in float32", lambda: cerebras_cases(shapes), True),
    ]
    total = 10_000 if options.smoke else 1_000_000
    for leaves in (1, 10) if options.smoke else (1, 10, 100, 1000):
        rows = [(total // leaves // 10, 10)] * leaves
        title = f"RigL update of 1e{len(str(total)) - 1} weights in {leaves} {'leaf' if leaves == 1 else 'leaves'}"
        tables.append((title, partial(update_cases, rows, draw=False), True))
    tables.append((f"step of Adam on {what}", lambda: optimizer_cases(shapes), False))
    torch.manual_seed(0)
    width, layers, shape = (
        (8, 1, (2, 4)) if options.smoke else (128, 2, (8, 32)) if options.quick else (256, 4, (8, 32))
    )
    tokens = torch.randint(0, 128, shape)
    encoder = Transformer(width, layers)
    named = f"training step of a Transformer {layers} x {width}"
    tables.append((named, lambda: training_cases(encoder, tokens, tokens.roll(1, 1).flatten()), False))
    batch, width, side = (2, 4, 8) if options.smoke else (8, 16, 32) if options.quick else (16, 64, 32)
    images, labels = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
    conv = convnet(width)
    named = "training step of a ResNet-18 for 32 x 32" + ("" if width == 64 else f", {width} channels first")
    tables.append((named, lambda: training_cases(conv, images, labels), False))
    done = {}
    for title, make, memory in tables:
        cases = make()
        if cases:
            done[title] = compare(title, cases, options, memory)
    return done


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("updates", main(chosen), chosen)
