"""A small character-level transformer, sharded by FSDP2 over local processes and
trained by RigL.

    python examples/distributed.py
    python examples/distributed.py --quick

Four processes train it, each with a part of every weight and with batches of its own.
They save it halfway, and two processes go on from there. Each also computes what one
process would that holds everything, from the same gradients: its parts of masks,
weights and moments must have the same bits after every step. It prints what it checks,
and draws which part of a mask each process holds, in `out/distributed.png`. No GPU: the
processes talk over gloo. Needs the `demo` extra.
"""

import argparse
import math
import os
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import optree
import torch
from _distributed_report import draw, table
from _options import at_least, fraction, make_folder
from lm import BATCH, GPT, SHOWN, WINDOW, Text, load
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import sparsefn as sf

WIDTH = 48
RATE, EVERY = 3e-3, 3  # learning rate, steps between two changes of the masks


# ---- what every process runs ---------------------------------------------------------


def sharded(characters: int, seed: int) -> nn.Module:
    """The model, whose processes hold a part of every weight: each block is gathered
    when it runs.
    """
    torch.manual_seed(seed)  # equal weights on all processes before they are cut
    model = GPT(characters, WIDTH)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def algorithm(model: nn.Module, chosen: argparse.Namespace) -> sf.Algorithm:
    """RigL in the blocks; embeddings, norms and head are dense."""
    rigl = sf.rigl(
        chosen.sparsity,
        drop_fraction=0.3,
        when=sf.every(EVERY),
        distribution=sf.budgets.erk(),
        where=sf.modules.weights_of(model, skip=["head"]),
        key=sf.random.key(chosen.seed),
    )
    return sf.with_optimizer(rigl, sf.optimizers.adamw(RATE, weight_decay=0.1))


def gradients(
    model: nn.Module, state: sf.State, text: Text, step: int
) -> tuple[float, sf.tree.Tree]:
    """The loss over the windows of all processes, and its gradients: each process has
    its part.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    draws = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(text.train) - WINDOW, (BATCH // ranks,), generator=draws)
    window = text.train[starts[:, None] + torch.arange(WINDOW + 1)]
    sf.distributed.commit(model, state)
    logits = model(window[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    loss.backward()
    grads = sf.distributed.grads_of(model, state)
    mean = loss.detach().clone()
    distributed.all_reduce(mean)
    return float(mean) / ranks / math.log(2), grads


def run(
    rank: int,
    ranks: int,
    first: int,
    last: int,
    folder: str,
    chosen: argparse.Namespace,
) -> None:
    """Train from one step to another, and write down what the processes hold."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # The logits are a view, which torch warns of; no operation writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    meeting = Path(folder, f"meeting{ranks}").as_uri()
    distributed.init_process_group("gloo", meeting, timedelta(minutes=2), ranks, rank)
    text = load()
    model = sharded(len(text.characters), chosen.seed)
    rigl = algorithm(model, chosen)
    state = rigl.init(sf.modules.params_of(model))
    one = rigl.init(full(state.params))  # the same, as one process has it
    if first:
        state, one = (
            sf.distributed.load(template, Path(folder, "saved"))
            for template in (state, one)
        )
    check(state, one, first)
    begin, losses = time.perf_counter(), []
    for step in range(first, last):
        loss, grads = gradients(model, state, text, step)
        state = rigl.update(state, grads, step)
        one = rigl.update(one, full(grads), step)
        check(state, one, step + 1)
        losses.append(loss)
    seconds = time.perf_counter() - begin
    if not first:
        sf.distributed.save(state, Path(folder, "saved"))
    sf.distributed.check_replicas(state)
    part = state.masks[SHOWN].to_local()
    held = sum(x.to_local().numel() for x in state.params.values())
    torch.save(
        {"mask": part.clone(), "held": held}, Path(folder, f"part{ranks}.{rank}")
    )
    if rank == 0:
        result = {
            "losses": losses,
            "seconds": seconds,
            "kept": sf.masks.n_kept(one.masks, one.params),
        }
        sizes = [leaf.numel() for leaf in one.params.values()]
        torch.save({**result, "weights": sum(sizes)}, Path(folder, f"result{ranks}"))
    sf.distributed.leave()


def full(tree: sf.tree.Tree) -> sf.tree.Tree:
    """The tree with the whole of every tensor: all processes take part."""
    return optree.tree_map(
        lambda x: x.full_tensor() if isinstance(x, DTensor) else x.clone(), tree
    )


def check(state: sf.State, one: sf.State, step: int) -> None:
    """Compare the parts that are here with those of the one process, bit by bit."""
    parts = optree.tree_map(
        lambda x: x.to_local() if isinstance(x, DTensor) else x, state
    )
    if not sf.checkpoint.tree_equal(parts, optree.tree_map(cut, one, state)):
        raise RuntimeError(
            f"after {step} steps rank {distributed.get_rank()} has other bits than "
            "one process"
        )


def cut(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a tensor that is here: FSDP2 cuts the first dimension as torch.chunk
    does.
    """
    if not isinstance(like, DTensor):
        return whole
    chunks = whole.chunk(distributed.get_world_size())
    return (
        chunks[distributed.get_rank()]
        if distributed.get_rank() < len(chunks)
        else whole[:0]
    )


# ---- the run -------------------------------------------------------------------------


def processes(
    ranks: int, first: int, last: int, folder: str, chosen: argparse.Namespace
) -> dict[str, Any]:
    """Start so many processes, and read what they have written."""
    torch.multiprocessing.spawn(run, (ranks, first, last, folder, chosen), nprocs=ranks)
    parts = [torch.load(Path(folder, f"part{ranks}.{rank}")) for rank in range(ranks)]
    masks: list[Tensor] = [part["mask"] for part in parts]
    return {
        **torch.load(Path(folder, f"result{ranks}")),
        "held": [part["held"] for part in parts],
        "masks": masks,
    }


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Train a small transformer on four processes, then on two."
    )
    add = parser.add_argument
    add(
        "--steps",
        type=at_least(2),
        help="training steps, half of them on four processes (default: 40)",
    )
    add("--quick", action="store_true", help="8 steps")
    add(
        "--sparsity",
        type=fraction,
        default=0.9,
        help="fraction of zeros in the blocks (default: 0.9)",
    )
    add("--seed", type=at_least(0), default=0, help="of weights and masks (default: 0)")
    add(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for distributed.png (default: out)",
    )
    chosen = parser.parse_args(argv)
    chosen.steps = chosen.steps or (8 if chosen.quick else 40)
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train on four processes, save, go on with two, print and draw."""
    chosen = options()
    half = chosen.steps // 2
    with tempfile.TemporaryDirectory() as folder:
        print(
            f"4 processes train a transformer with {100 * chosen.sparsity:g}% zeros "
            "in its blocks ...",
            flush=True,
        )
        four = processes(4, 0, half, folder, chosen)
        print(f"saved after {half} steps; 2 processes go on ...", flush=True)
        two = processes(2, half, chosen.steps, folder, chosen)
    print(f"\n{table([four, two])}\n")
    print(
        f"bits a character: {four['losses'][0]:.3f} at the first step, "
        f"{two['losses'][-1]:.3f} at the last"
    )
    print(
        f"after each of {chosen.steps} steps masks, weights and moments of all "
        "processes together had the bits of one process with the same gradients"
    )
    draw([four, two], SHOWN, chosen.out / "distributed.png")
    print(f"\nwrote distributed.png to {chosen.out}")


if __name__ == "__main__":
    main()
