"""The search for numbers that work."""

import dataclasses

from sparsefn.shrinking.search import Tried, search


@dataclasses.dataclass
class Dial:
    options: list
    choice: int = 0

    def take(self, choice):
        self.choice = choice


def found(score, *dials, tries=100):
    runs = []

    def run():
        runs.append([dial.options[dial.choice] for dial in dials])
        points = score(*runs[-1])
        return Tried((points, 0), points == 0, "" if points == 0 else "too few")

    best = search(lambda _: dials, run, tries)
    return best, [dial.options[dial.choice] for dial in dials], len(runs)


def test_what_works_at_once_is_run_once():
    best, numbers, runs = found(lambda a: 0, Dial([3, 4]))
    assert best.done and numbers == [3] and runs == 1


def test_one_number_after_the_other():
    best, numbers, _ = found(
        lambda *some: -sum(n != 5 for n in some),
        Dial([1, 5]),
        Dial([5, 2]),
        Dial([1, 2, 5]),
    )
    assert best.done and numbers == [5, 5, 5] and best.why == ""


def test_two_at_once_where_one_alone_is_no_better():
    best, numbers, _ = found(
        lambda a, b: 0 if (a, b) == (2, 3) else -1, Dial([1, 2]), Dial([1, 2, 3])
    )
    assert best.done and numbers == [2, 3]


def test_without_success_the_best_stays():
    best, numbers, runs = found(lambda a, b: -1 - (a != 2), Dial([1, 2]), Dial([1, 2]))
    assert not best.done and best.why == "too few" and numbers == [2, 1] and runs == 5


def test_no_more_runs_than_allowed():
    best, numbers, runs = found(lambda a: a - 50, Dial(list(range(40))), tries=7)
    assert not best.done and runs == 8 and best.score == (numbers[0] - 50, 0)
