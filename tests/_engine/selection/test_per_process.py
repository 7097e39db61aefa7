"""Competitions that processes deal out: the winners of one process."""

import torch
from nn.distributed.harness import on_ranks

import sparsefn as sf
from sparsefn._engine.selection import Entry, dealt_winners, winners

SHAPES = [
    (5, 4),
    (3, 200),
    (2, 4, 3),
    (1, 4, 5),
    (1, 300, 3),
    (3, 300, 2),
    (1, 50),
    (1, 5, 1),
    (2, 0),
    (4, 1),
]


def entry_of(shape, flags):
    generator = torch.Generator().manual_seed(len(shape))
    scores = torch.randint(9, shape, generator=generator).float()
    drawn = [torch.rand(shape, generator=generator) < 0.7 for _ in range(2)]
    return Entry(scores, *(drawn if flags else (None, None)), absolute=flags)


def cases():
    def the_winners_of_one_process(flags, kind):
        entries = [entry_of(shape, flags) for shape in SHAPES]
        numbers = [
            torch.arange(x.scores.shape[0] * (x.scores[0, 0:1].numel() or 1)) % 4
            for x in entries
        ]
        counts = {
            "ints": [i % 3 for i in range(len(entries))],
            "tensors": numbers,
            "one": torch.cat(numbers),
        }[kind]
        alone = winners(entries, counts)
        with sf.distributed.by_rows():
            shared = dealt_winners(entries, counts)
        for shape, x, y in zip(SHAPES, alone, shared, strict=True):
            assert torch.equal(x, y), (shape, x, y)

    def segments_are_found_by_each(flags):
        ends = entry_of((6,), flags)._replace(segments=[4, 2])
        entries = [ends, entry_of((3, 4), flags)]
        counts = torch.tensor([1, 2, 0, 3, 1])
        alone = winners(entries, counts)
        with sf.distributed.by_rows():
            shared = dealt_winners(entries, counts)
        assert all(torch.equal(x, y) for x, y in zip(alone, shared, strict=True))

    for flags in (False, True):
        yield f"{flags} segments", lambda f=flags: segments_are_found_by_each(f)
        for kind in ("ints", "tensors", "one"):
            yield (
                f"{flags} {kind}",
                lambda f=flags, k=kind: the_winners_of_one_process(f, k),
            )


def test_two_processes():
    on_ranks(2, cases)
