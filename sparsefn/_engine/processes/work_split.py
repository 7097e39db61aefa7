"""Rows that processes deal out among them where a caller asks for it: each works on its
own, and all get the results of all.

Without this request nothing is dealt out, also where there are process groups. Every
process must make the same calls in the same order; each call first compares what it is
about, so that a different call is an error on all processes, and none waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.processes.agreements import agreement
from sparsefn._engine.processes.collectives import in_step, texts_of_all, values_of_all
from sparsefn._engine.processes.lines import Groups, Line
from sparsefn._engine.transforms import transformed

# bytes of a tensor that a checksum reads: other values differ in more than a few
_READ = 2**19
_dealing: ContextVar[Groups] = ContextVar("dealing", default=())
# the groups whose processes deal out rows here; every change of masks asks
dealing = _dealing.get


@contextmanager
def dealt(groups: Groups) -> Iterator[None]:
    """Code in which the processes of a group deal out rows.

    An error of one of them is raised on all.

    >>> from sparsefn._engine.processes import work_split
    >>> with work_split.dealt(()):
    ...     work_split.own(3)
    range(0, 3)
    """
    with agreement(groups):
        token = _dealing.set(groups)
        try:
            yield
            check_alike("the end")
        finally:
            _dealing.reset(token)


def _is_dealt() -> bool:
    # Compiled code asks nobody.
    return not torch.compiler.is_compiling() and bool(dealing())


def own(n: int) -> range:
    """Which of n things in a row are this process's: runs that follow each other, the
    first processes' no shorter.

    >>> from sparsefn._engine.processes import work_split
    >>> work_split.own(3)
    range(0, 3)
    """
    if not _is_dealt():
        return range(n)
    if transformed():
        raise ValueError(
            "by_rows: expected calls outside of vmap and other transforms of torch.func"
        )
    line = Line(dealing())
    start = -(-n * line.place // line.size)
    stop = -(-n * (line.place + 1) // line.size)
    return range(start, stop)


def gathered(*own: Tensor) -> list[Tensor]:
    """Tensors of which each process has some rows, made whole on every process, in the
    order of the processes.

    >>> from sparsefn._engine.processes import work_split
    >>> work_split.gathered(torch.ones(1))
    [tensor([1.])]
    """
    if not _is_dealt():
        return [*own]
    parts = [_bytes(x) for x in own]
    line = Line(dealing())
    lengths = np.array([len(x) for x in parts])
    (of_all,) = in_step([(dealing(), values_of_all(lengths))])
    sizes = of_all.reshape(line.size, -1).T.tolist()
    whole = []
    for x, part, of_ranks in zip(own, parts, sizes, strict=True):
        every = line.end_to_end(part, of_ranks).view(x.dtype)
        rows = every.reshape(-1, *x.shape[1:])
        whole.append(rows.to(x.device))
    return whole


def check_alike(*what: object) -> None:
    """Raise ValueError on all processes unless all come here with the same: tensors of
    the same values, or words.

    >>> from sparsefn._engine.processes import work_split
    >>> work_split.check_alike("obs", torch.ones(1))
    """
    if not _is_dealt():
        return
    words = re.sub(r" at 0x\w+", "", "\t".join(map(_told, what)))
    (all_words,) = in_step([(dealing(), texts_of_all(words))])
    first, *others = (text.split("\t") for text in all_words)
    for rank, own in enumerate(others, 1):
        same_call = len(first) > 1 and own[0] == first[0]
        where = f"in {own[0]}" if same_call else "they are at"
        for x, y in zip_longest(first, own, fillvalue="nothing"):
            if x != y:
                raise ValueError(
                    "by_rows: expected the same calls with the same values on all "
                    f"processes, but {where}: {x} on process 0, and {y} on process "
                    f"{rank}"
                )


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _told(x: object) -> str:
    if not isinstance(x, Tensor):
        return str(x)
    checksum = _checksum(_bytes(x))
    return f"a tensor of {tuple(x.shape)}, {x.dtype} with checksum {checksum}"


def _checksum(x: Tensor) -> int:
    # Of all bits of a small tensor and of some of a large one, and of their places.
    if x.storage_offset() % 8:
        x = x.clone()
    end = len(x) // 8 * 8
    words = x[:end].view(torch.int64)
    some = words[:: end // _READ + 1]
    numbers = torch.cat([some, x[end:]])
    places = torch.arange(1, len(numbers) + 1, device=x.device)
    return int((numbers * places).sum())
