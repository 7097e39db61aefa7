"""The messages of the laws on states for algorithms that break them."""

import itertools

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.testing import Case, Meta, Row
from sparsefn.testing import laws_states as laws
from sparsefn.testing.laws_states import processes_do_not_matter
from sparsefn.testing.strategies import large

W = torch.arange(1.0, 13.0).reshape(3, 4)
CASE = Case(
    {"w": W, "b": torch.ones(3)}, ({"w": W.flip(1), "b": torch.ones(3)},) * 3, 0.5, 0
)


def row(init=None, update=None, where=sf.default_where):
    base = sf.gmp(0.5)
    algorithm = sf.Algorithm(init or base.init, update or base.update)
    return Row("mine", lambda sparsity, key, params: algorithm, Meta(where=where))


def changed(change):
    base = sf.gmp(0.5)
    return lambda state, grads, step: change(base.update(state, grads, step), grads)


def in_place(state, grads, step):
    state.params["w"].mul_(1.0)
    return state


def a_part(state, grads):
    return state._replace(
        params={**state.params, "b": grads["b"][:2].repeat(2)[:3]},
        scores={"g": grads["w"][:1]},
    )


calls = itertools.count()


@pytest.mark.parametrize(
    ("law", "broken", "message"),
    [
        (
            laws.states_keep_their_structure,
            row(update=changed(lambda s, g: s._replace(scores=g))),
            "an update changes the structure",
        ),
        (
            laws.states_keep_their_structure,
            row(
                update=changed(
                    lambda s, g: s._replace(
                        params=optree.tree_map(torch.Tensor.double, s.params)
                    )
                )
            ),
            "an update changes params.",
        ),
        (laws.states_keep_their_structure, row(where="b"), "w is sparsified"),
        (
            laws.functions_are_pure,
            row(update=in_place),
            "update writes to its input at params.w",
        ),
        (
            laws.functions_are_pure,
            row(update=changed(a_part)),
            "update returns a part or a view of an input at scores.g",
        ),
        (
            laws.functions_are_pure,
            row(update=changed(lambda s, g: s._replace(key=torch.rand(1)))),
            "update reads or advances a global generator",
        ),
        (
            laws.runs_repeat,
            row(
                update=changed(
                    lambda s, g: s._replace(key=torch.tensor([0, next(calls)]))
                )
            ),
            "run 1, state 1: differs at key",
        ),
        (
            laws.threads_do_not_matter,
            row(
                update=changed(
                    lambda s, g: s._replace(
                        key=torch.tensor([0, torch.get_num_threads()])
                    )
                )
            ),
            "state with 2 threads: differs at key",
        ),
        (
            laws.steps_may_be_tensors,
            row(
                update=lambda s, g, step: s._replace(
                    key=torch.tensor([0, int(isinstance(step, int))])
                )
            ),
            "state 1: differs at key",
        ),
        (
            laws.runs_resume,
            row(
                update=lambda s, g, step: s._replace(key=torch.tensor([0, next(calls)]))
            ),
            "resumed at 1: differs at key",
        ),
    ],
)
def test_what_is_said(law, broken, message):
    with pytest.raises(AssertionError, match=message):
        law(
            broken,
            CASE._replace(grads=CASE.grads[:1])
            if law is laws.states_keep_their_structure
            else CASE,
        )


def test_threads_and_generators_are_left_as_they_were():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    laws.threads_do_not_matter(row(), CASE)
    laws.runs_repeat(row(), CASE)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


LARGE = large()


def static(sparsity, key, params):
    return sf.static(sparsity, key=key)


def importable(reference):
    return Row("static", static, Meta(), reference)


def test_what_cannot_be_imported_is_not_tried():
    processes_do_not_matter(importable(None), LARGE)


@pytest.mark.deep
def test_a_function_that_can_be_imported_gives_the_same_bits():
    processes_do_not_matter(importable(f"{__name__}:static"), LARGE)


@pytest.mark.deep
def test_an_error_there_is_shown_here():
    with pytest.raises(
        AssertionError, match="another process fails:\n(.|\n)*No module named 'nowhere'"
    ):
        processes_do_not_matter(importable("nowhere:static"), LARGE)
