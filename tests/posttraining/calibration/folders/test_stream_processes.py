"""Statistics added over processes, and weights of which each of them makes some
rows.
"""

import pytest
import torch
from nn.distributed.harness import on_ranks

import sparsefn as sf
from sparsefn._engine.processes import agreement
from sparsefn.nn.distributed.ends import everyone
from sparsefn.posttraining.calibration.blocks import added_stats
from sparsefn.posttraining.calibration.folders.stream import place, share, together
from sparsefn.posttraining.solve import sparsegpt


def stats_of(rank):
    # one tensor of two leaves
    gram = torch.tensor([[3.0, 1.0], [1.0, 2.0]]) * (rank + 1)
    return {
        "a": {
            "count": torch.tensor(2 + rank),
            "square": torch.tensor([1.0, rank]),
            "gram": gram,
        },
        "b": {
            "count": torch.tensor(2 + rank),
            "square": torch.tensor([1.0, rank]),
            "gram": gram,
        },
    }


def test_one_process_has_all():
    def prune(stats):
        return sf.dense()

    assert together(prune) is prune and place() == (0, 1) and share([1, 2]) == [1, 2]


def cases():
    rank = place()[0]
    params = {"a": torch.tensor([[1.0, 2.0]] * 4), "b": torch.tensor([[3.0, 1.0]])}
    seen = []

    def prune(stats):
        seen.append(stats)
        return sf.one_shot(
            0.5, sf.scores.wanda(stats), pattern=sf.patterns.row_balanced(), where="*"
        )

    def sums_and_masks():
        algorithm = together(prune)(stats_of(rank))
        state = algorithm.init(params)
        state = algorithm.update(state, params, 0)
        (of,) = seen
        stats = of["a"]
        assert int(stats["count"]) == 9 and stats["square"].tolist() == [3, 3]
        assert (
            stats["gram"].tolist() == [[18, 6], [6, 12]]
            and of["b"]["gram"] is stats["gram"]
        )
        assert state.masks["a"].tolist() == [[False, True]] * 4 and state.masks[
            "b"
        ].tolist() == [[True, False]]
        assert sf.effective(state)["a"].tolist() == [[0, 2]] * 4

    def solved_rows():
        def solver(stats):
            return sf.methods.sparsegpt(0.5, stats, where="*")

        sparsegpt.ENTRIES, wide = (
            (16 * 8, 16 * 8),
            {"w": torch.randn(40, 8, generator=torch.Generator().manual_seed(0))},
        )
        parts = [
            torch.randn(30, 8, generator=torch.Generator().manual_seed(1 + i))
            for i in range(3)
        ]
        every = [
            {
                "w": {
                    "count": torch.tensor(30),
                    "square": x.square().sum(0),
                    "gram": x.T @ x,
                }
            }
            for x in parts
        ]
        algorithm = together(solver)(every[rank])
        shared = algorithm.update(algorithm.init(wide), wide, 0)
        algorithm = solver(added_stats(added_stats(every[0], every[1]), every[2]))
        alone = algorithm.update(algorithm.init(wide), wide, 0)
        assert (
            sf.checkpoint.tree_equal(shared, alone)
            and int(shared.masks["w"].sum()) == 160
        )

    def sums_in_the_order_of_the_processes():
        # 1 is less than half of a bit of the first
        gram = torch.tensor([[2.0**24, 1.0, 1.0][rank]])
        total = []
        together(lambda stats: total.append(stats) or sf.dense())({"a": {"gram": gram}})
        assert total[0]["a"]["gram"].tolist() == [2.0**24] and gram.tolist() != [0.0]

    def parts_of_data():
        parts = [list(range(7))[7 * i // 3 : 7 * (i + 1) // 3] for i in range(3)]
        assert share(range(7)) == range(7)[parts[rank][0] : parts[rank][-1] + 1] and [
            x for part in parts for x in part
        ] == list(range(7))

    def an_error_on_one_is_one_on_all():
        with (
            pytest.raises((ValueError, RuntimeError), match="no data on the last"),
            agreement(everyone()),
        ):
            if rank == 2:
                raise ValueError("no data on the last")
            together(prune)(stats_of(rank))

    def an_error_of_the_last_is_one_on_all():
        def fails(stats):
            if rank == 2:
                raise ValueError("no such pattern")
            return prune(stats)

        with (
            pytest.raises((ValueError, RuntimeError), match="no such pattern"),
            agreement(everyone()),
        ):
            algorithm = together(fails)(stats_of(rank))
            algorithm.update(algorithm.init(params), params, 0)

    def no_algorithm():
        told = pytest.raises(
            (TypeError, RuntimeError),
            match="expected prune to give an Algorithm, got dict",
        )
        with told, agreement(everyone()):
            algorithm = together(lambda stats: stats)(stats_of(rank))
            algorithm.update(algorithm.init(params), params, 0)

    def other_functions():
        def prunes_more(stats):
            return sf.one_shot(0.5 if rank else 1.0, where="*")

        def draws(path, weight, mask, step):
            return weight + rank, mask

        for other, text in (
            (prunes_more, "in a selection: 0 on process 0, and 4 on process 1"),
            (
                lambda stats: prune(stats) if rank else sf.dense(),
                "they are at: what prune made on process 0, and a sel",
            ),
            (
                lambda stats: sf.rewrite(draws, where="*"),
                r"in what prune made: a tensor of \(4, 2\), torch.float32 with",
            ),
        ):
            with pytest.raises(
                ValueError,
                match=f"same calls with the same values on all processes, but {text}",
            ):
                algorithm = together(other)(stats_of(rank))
                algorithm.update(algorithm.init(params), params, 0)

    def other_leaves():
        stats = stats_of(rank)
        if rank == 1:
            del stats["b"]
        with pytest.raises(
            ValueError,
            match="data of the same leaves on all processes, but 1 and 0 differ at 'b'",
        ):
            together(prune)(stats)

    yield "sums and masks", sums_and_masks
    yield "solved rows", solved_rows
    yield "order", sums_in_the_order_of_the_processes
    yield "parts of data", parts_of_data
    yield "an error on one", an_error_on_one_is_one_on_all
    yield "an error of the last", an_error_of_the_last_is_one_on_all
    yield "no algorithm", no_algorithm
    yield "other functions", other_functions
    yield "other leaves", other_leaves


def test_on_three_processes():
    on_ranks(3, cases)
