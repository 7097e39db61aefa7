"""What processes tell each other to find one mask: collectives and bytes, for 1 to 64
of them, all in this process.

    python benchmarks/sharded.py
    python benchmarks/sharded.py --quick
    python benchmarks/sharded.py --large  # also 1e9 weights (needs 8 GiB of memory)

Each simulated process holds its part of every leaf, cut as `Shard(0)` cuts, and runs
the library's own search on it. Here the searches run in step, and what they ask for is
added or put together by hand and counted: a collective is one `all_reduce` or one
`all_gather`, and its bytes are those that a process has got when it is over. One
competition is measured: `gmp` makes one a change of masks, `rigl` two, of which each is
on the scores of half of the units or fewer. Masks are held against those of one
process.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from _timing import options_of, write

from sparsefn._engine.processes.collectives import Exchange, Gather, Sum
from sparsefn._engine.processes.extent import Extent
from sparsefn._engine.selection.among_processes import Piece, selected
from sparsefn._engine.selection.block_passes import cut
from sparsefn._engine.selection.bracket import write_best
from sparsefn._engine.selection.entries import Arrays

KEPT = 0.1
PIECE = 10**7  # weights that are drawn at a time


class Traffic(NamedTuple):
    """What one competition of all weights, or one a leaf, costs each of some processes.

    `percent` is that of `kib` in the weights of all processes together, in float32.
    """

    name: str
    ranks: int
    leaves: int
    weights: int
    collectives: int
    kib: float
    percent: float
    seconds: float


class Net(NamedTuple):
    """Weights of leaves of one size, end to end, and the mask of one process, in
    bits.
    """

    weights: np.ndarray
    leaves: int
    mask: np.ndarray


# ---- weights -------------------------------------------------------------------------


def normal(n: int) -> np.ndarray:
    """Normal weights, drawn piece by piece."""
    made, draws = np.empty(n, np.float32), np.random.default_rng(0)
    for start in range(0, n, PIECE):
        draws.standard_normal(out=made[start : start + PIECE], dtype=np.float32)
    return made


def pruned(weights: np.ndarray) -> np.ndarray:
    """The weights, of which 95% are zero: so are half of those to keep."""
    draws = np.random.default_rng(1)
    for start in range(0, weights.size, PIECE):
        part = weights[start : start + PIECE]
        part *= draws.random(part.size, np.float32) >= 0.95
    return weights


def rounded(weights: np.ndarray) -> np.ndarray:
    """The weights as multiples of 1/64: very many are equal to the last one that
    wins.
    """
    return np.divide(
        np.rint(np.multiply(weights, 64, out=weights), out=weights), 64, out=weights
    )


# ---- processes -----------------------------------------------------------------------


def searches(
    net: Net, ranks: int, joint: bool, out: np.ndarray
) -> list[list[Exchange[None]]]:
    """The searches of every process: one of all leaves, or one a leaf."""
    size = net.weights.size // net.leaves
    chunk = -(-size // ranks)
    found = []
    for rank in range(ranks):
        start, stop = min(rank * chunk, size), min((rank + 1) * chunk, size)
        pieces = []
        for leaf in range(net.leaves):
            here = slice(leaf * size + start, leaf * size + stop)
            at = Arrays(net.weights[here], None, None, None, out[here], absolute=True)
            extent = Extent((size,), (start,), (stop - start,), ("simulated",))
            pieces.append(Piece(at, extent, leaf * size if joint else 0, True))
        if joint:
            found.append(
                [selected(pieces, round(KEPT * size * net.leaves), size * net.leaves)]
            )
        else:
            found.append(
                [selected([piece], round(KEPT * size), size) for piece in pieces]
            )
    return found


def step(exchange: Exchange[None], answer: Any) -> Sum | Gather | None:
    """What a search asks for next; None where it is over."""
    try:
        return exchange.send(answer)
    except StopIteration:
        return None


def run(processes: Sequence[Sequence[Exchange[None]]]) -> tuple[int, int]:
    """Run the searches of all processes in step, as `collectives.together`; its
    collectives and bytes.
    """
    ranks = len(processes)
    # eight bytes of each first: has one failed, do all see the same?
    collectives, taken = (1, 8 * ranks)
    told: dict[int, Any] = dict.fromkeys(range(len(processes[0])))
    while told:
        asked = {
            i: [step(exchanges[i], answer) for exchanges in processes]
            for i, answer in told.items()
        }
        sums = {
            i: np.sum([x.counts for x in all_], axis=0)
            for i, all_ in asked.items()
            if isinstance(all_[0], Sum)
        }
        values = {
            i: [x.values for x in all_]
            for i, all_ in asked.items()
            if isinstance(all_[0], Gather)
        }
        if sums or values:  # the sizes of messages travel with the sums
            collectives += 1
            taken += 8 * (sum(len(x) for x in sums.values()) + (ranks if values else 0))
        # a message begins with the sizes of its parts, and all take the room of the
        # longest
        if values:
            collectives += 1
            taken += ranks * max(
                sum(8 + x[rank].nbytes for x in values.values())
                for rank in range(ranks)
            )
        told = sums | {i: np.concatenate(x) for i, x in values.items()}
    return collectives, taken


# ---- tables --------------------------------------------------------------------------


def net_of(weights: np.ndarray, leaves: int, joint: bool) -> Net:
    """Leaves of one size, and the mask of one process."""
    size = weights.size // leaves
    weights = weights[: size * leaves]
    out = np.empty(weights.size, np.bool_)
    entries = [Arrays(weights, None, None, None, out, absolute=True)]
    for at in (
        entries
        if joint
        else [cut(entries[0], slice(i * size, (i + 1) * size)) for i in range(leaves)]
    ):
        write_best([at], round(KEPT * at.out.size))
    return Net(weights, leaves, np.packbits(out))


def measured(name: str, net: Net, ranks: int, joint: bool) -> Traffic:
    """One competition of so many processes."""
    out = np.empty(net.weights.size, np.bool_)
    start = time.perf_counter()
    collectives, taken = run(searches(net, ranks, joint, out))
    seconds = time.perf_counter() - start
    if not np.array_equal(np.packbits(out), net.mask):
        raise AssertionError(f"{name}: {ranks} processes have another mask than one")
    n = net.weights.size
    return Traffic(
        name,
        ranks,
        net.leaves,
        n,
        collectives,
        taken / 1024,
        100 * taken / (4 * n),
        seconds,
    )


def exponent(n: int) -> str:
    return f"{n:.2g}".replace("e+0", "e")


def show(title: str, rows: Sequence[Traffic]) -> None:
    """Print one table."""
    width = max(len(row.name) for row in rows)
    print(
        f"\n{title}\n{'':{width}}  {'collectives':>11}  {'KiB':>9}  "
        f"{'% of weights':>12}  {'s, all ranks':>12}"
    )
    for row in rows:
        line = (
            f"{row.name:{width}}  {row.collectives:11}  {row.kib:9.1f}  "
            f"{row.percent:12.4f}  {row.seconds:12.2f}"
        )
        print(line, flush=True)


def main(options: argparse.Namespace) -> dict[str, list[Traffic]]:
    """Every table."""
    shrink = 1000 if options.smoke else 10 if options.quick else 1
    n, tables = 10**7 // shrink, {}

    def table(title: str, rows: list[Traffic]) -> None:
        tables[title] = rows
        show(title, rows)

    for joint in (True, False):
        kind = "one competition of all leaves" if joint else "a competition a leaf"
        net = net_of(normal(n), 10, joint)
        rows = [
            measured(f"{ranks} rank{'s' * (ranks > 1)}", net, ranks, joint)
            for ranks in (1, 2, 4, 8, 16, 32, 64)
        ]
        table(f"{kind}: {exponent(n)} weights in 10 leaves", rows)
        nets = [net_of(net.weights, leaves, joint) for leaves in (1, 10, 100, 1000)]
        rows = [
            measured(
                f"{net.leaves} lea{'ves' if net.leaves > 1 else 'f'}", net, 8, joint
            )
            for net in nets
        ]
        table(f"{kind}: {exponent(n)} weights on 8 ranks", rows)
        rows = []
        for size in [16 * 10**6, 10**8, *([10**9] if options.large else [])]:
            net = net_of(normal(size // shrink), 40 if size < 10**8 else 240, joint)
            name = f"{exponent(size // shrink)} weights"
            rows += [
                measured(f"{name}, {ranks} ranks", net, ranks, joint)
                for ranks in (8, 64)
            ]
        table(f"{kind}: by size", rows)
    values = {
        "normal": normal(n),
        "95% zeros": pruned(normal(n)),
        "multiples of 1/64": rounded(normal(n)),
    }
    rows = [
        measured(name, net_of(weights, 10, True), 8, True)
        for name, weights in values.items()
    ]
    table(
        f"one competition of all leaves: {exponent(n)} weights on 8 ranks, by values",
        rows,
    )
    return tables


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("sharded", main(chosen), chosen)
