"""Many cases on gloo ranks: one start runs them all, and a failure names its case and
rank.
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

Cases = Iterable[tuple[str, Callable[[], object]]]

COLLECTIVE = timedelta(seconds=60)  # how long one collective may take
SHOWN = 4  # failures that are told in full
# Ranks are forked from a process that has imported these, which takes five seconds,
# once.
IMPORTED = [
    "torchopt",
    "sparsefn.nn.distributed",
    "sparsefn.testing",
    "torch.distributed.checkpoint",
]
IMPORTED += [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
]


def on_ranks(
    count: int, cases: Callable[..., Cases], *args: object, seconds: float = 300
) -> None:
    """Run the cases that `cases(*args)` yields on all of so many processes, in the same
    order on each.

    A case fails by raising. If it fails on some ranks only, the ranks may be at
    different messages, and the run ends. After `seconds` each rank prints where it is,
    and ends.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        rank_of = partial(context.Process, target=_run)
        ranks = [
            rank_of(args=(rank, count, folder, seconds, cases, args))
            for rank in range(count)
        ]
        for process in ranks:
            process.start()
        # a rank takes seconds to start, more on a busy machine
        end = time.monotonic() + seconds + 60
        while any(process.is_alive() for process in ranks) and time.monotonic() < end:
            # the others would wait for it
            if any(process.exitcode for process in ranks):
                end = min(end, time.monotonic() + 2)
            time.sleep(0.02)
        for process in ranks:
            if process.is_alive():
                os.kill(process.pid, signal.SIGABRT)  # it prints where it is
            process.join(5)
            process.kill()
        _report(folder, [process.exitcode for process in ranks])


def _run(
    rank: int,
    count: int,
    folder: Path,
    seconds: float,
    cases: Callable[..., Cases],
    args: tuple,
) -> None:
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=COLLECTIVE
    )
    # a case that failed may have left messages in the groups it used
    own = dist.new_group()
    failures = {}
    for name, case in cases(*args):
        print(f"case {name}", flush=True)
        try:
            case()
        except BaseException:  # pytest's failures are no Exceptions
            failures[name] = traceback.format_exc()
        failed = torch.tensor([name in failures], dtype=torch.int64)
        dist.all_reduce(failed, group=own)
        if 0 < int(failed) < count:
            break
    (folder / f"{rank}.json").write_text(json.dumps(failures), encoding="utf-8")
    # No rank leaves before all are done, as closing a socket that holds unread bytes
    # resets the connection of the peer.
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(count)], COLLECTIVE)
    # Not by the interpreter's end: gloo's threads outlive destroy_process_group where a
    # mesh keeps a group alive, and one that then drops the last tensor of a message
    # asks for the GIL of a dying interpreter, which aborts (SIGABRT).
    os._exit(0)


def _report(folder: Path, codes: list[int | None]) -> None:
    """Raise what went wrong on which rank."""
    said: dict[str, list[int]] = {}
    for rank, code in enumerate(codes):
        outcome = folder / f"{rank}.json"
        if outcome.exists():
            for name, text in json.loads(outcome.read_text(encoding="utf-8")).items():
                said.setdefault(f"{name}:\n{text}", []).append(rank)
        if code or not outcome.exists():
            log = folder / f"{rank}.log"
            text = (
                log.read_text(encoding="utf-8", errors="replace")[-6000:]
                if log.exists()
                else "never started"
            )
            said.setdefault(
                f"ended with exit code {code}; the end of what it printed:\n{text}", []
            ).append(rank)
    texts = [
        f"rank {', '.join(map(str, ranks))}, {text}" for text, ranks in said.items()
    ]
    short = [
        " ".join([text.splitlines()[0], text.splitlines()[-1]])[:200]
        for text in texts[SHOWN:]
    ]
    assert not texts, "\n".join(texts[:SHOWN] + short)


def grid_of_four(*counted: str) -> tuple[int, str, str, str, dict[str, int]]:
    """Of one process in two rows and two columns: its rank, the names of its row,
    column and of all, and counts.

    The counts are those of the messages named, by name, from now on.
    """
    rank = dist.get_rank()
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    sent: dict[str, int] = {}
    for name in counted:

        def counting(
            *args: object, name: str = name, send=getattr(dist, name), **options: object
        ) -> object:
            sent[name] = sent.get(name, 0) + 1
            return send(*args, **options)

        setattr(dist, name, counting)
    names = [
        group.group_name
        for group in (rows[rank // 2], columns[rank % 2], dist.group.WORLD)
    ]
    return rank, *names, sent
