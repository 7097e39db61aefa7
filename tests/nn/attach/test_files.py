import copy
import pickle

import pytest
import torch

import sparsefn as sf
from sparsefn.nn.attach.files import (
    arguments_by_path,
    arguments_of,
    loaded,
    reads_step,
    saved,
)

WEIGHTS = {"w": torch.tensor([[1.0, -2.0, 3.0, 4.0]])}


def own(x):
    return x


@pytest.mark.parametrize("shown", [[], ["w"]])
def test_what_is_saved_is_loaded(shown):
    algorithm = sf.ste(0.5)
    state = algorithm.init(WEIGHTS)
    found = saved(algorithm, state, 7, shown, own)
    again, step = loaded(
        algorithm,
        found,
        algorithm.init({"w": torch.zeros(1, 4)}),
        {"w": torch.full((1, 4), 9.0)},
    )
    assert step == 7 and torch.equal(again.masks["w"], state.masks["w"])
    wanted = torch.tensor([[0.0, 0.0, 9.0, 9.0]]) if shown else WEIGHTS["w"]
    assert torch.equal(again.params["w"], wanted)


def test_names_have_no_addresses():
    algorithm = sf.Algorithm(sf.static(0.5).init, lambda state, grads, step: state)
    name = saved(algorithm, algorithm.init(WEIGHTS), 0, [], own)["algorithm"]
    assert name.startswith("Algorithm(init=") and "0x" not in name


def test_other_files_are_refused():
    algorithm = sf.static(0.5)
    state = algorithm.init(WEIGHTS)
    found = saved(algorithm, state, 0, [], own)
    with pytest.raises(
        ValueError,
        match=r"expected the state_dict\(\) of what attach returned, got something "
        r"else",
    ):
        loaded(algorithm, {"step": 0}, state, WEIGHTS)
    with pytest.raises(
        ValueError, match="load_state_dict: expected 'step' to be an int, got '7'"
    ):
        loaded(algorithm, {**found, "step": "7"}, state, WEIGHTS)
    with pytest.raises(
        ValueError, match=r"expected a state of dense\(\), got one of static\(0.5\)"
    ):
        loaded(sf.dense(), found, state, WEIGHTS)
    with pytest.raises(
        ValueError,
        match=r"a state of static\(0.5\) does not fit static\(0.9\): .*'masks.w'",
    ):
        other = {**found["tensors"], "masks.w": torch.ones(3, dtype=torch.bool)}
        loaded(
            sf.static(0.9), {**found, "tensors": other}, state, WEIGHTS, strict=False
        )


def test_a_state_of_other_parts_is_refused():
    like, weights = sf.rigl(0.5).init({"w": torch.ones(2, 2)}), {"w": torch.ones(2, 2)}
    mine, other = (sf.partition([("*", part)]) for part in (sf.rigl(0.5), sf.set(0.5)))
    found = saved(mine, like, 3, ["w"], own)
    with pytest.raises(
        ValueError,
        match=r"expected a state of partition\(.*set\(0.5\).*, got one of "
        r"partition\(.*rigl",
    ):
        loaded(other, found, like, weights)
    longer = sf.partition([("*", sf.rigl(0.75, when=sf.every(7)))])
    with pytest.raises(
        ValueError,
        match=r"whose 'parts.0.1.sparsity' is 0.5 and not 0.75; strict=False takes it",
    ):
        loaded(longer, found, like, weights)
    assert loaded(longer, found, like, weights, strict=False)[1] == 3


@pytest.mark.parametrize(
    ("mine", "other", "path"),
    [
        (sf.rigl(0.5), sf.rigl(0.8), "sparsity"),
        (sf.iterative(0.5), sf.iterative(0.5, pruned="keep"), "pruned"),
        (sf.gmp(0.5, when=sf.every(2)), sf.gmp(0.5, when=sf.every(3)), "when"),
        (sf.rigl(0.5, key=sf.random.key(0)), sf.rigl(0.5, key=sf.random.key(1)), "key"),
        (
            sf.gmp(sf.schedules.linear(0.5, 0.1)),
            sf.gmp(sf.schedules.linear(0.5, 0.2)),
            "sparsity.slope",
        ),
        (
            sf.gmp(0.5, score=sf.scores.magnitude),
            sf.gmp(0.5, score=sf.scores.random),
            "score",
        ),
        (
            sf.from_masks({"w": torch.ones(9, 9) > 0}),
            sf.from_masks({"w": torch.eye(9) > 0}),
            "masks.w",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arguments_are_compared_and_not_words(mine, other, path):
    differ = [
        name
        for name, text in arguments_by_path(mine).items()
        if arguments_by_path(other).get(name) != text
    ]
    assert differ == [path] or differ[0].startswith(path)
    state = sf.static(0.5).init(WEIGHTS)
    with pytest.raises(ValueError, match=rf"whose '{path}.*strict=False takes it"):
        loaded(other, saved(mine, state, 0, ["w"], own), state, WEIGHTS)


def test_one_call_has_one_text_however_it_is_written():
    one = arguments_by_path(sf.gmp(0.5, when=sf.every(2)))
    assert one == arguments_by_path(
        sf.gmp(sparsity=0.5, when=sf.every(n=2, start=0), where=sf.default_where)
    )
    again = pickle.loads(pickle.dumps(sf.gmp(0.5, when=sf.every(2))))
    assert (
        arguments_by_path(again) == one
        and arguments_by_path(copy.deepcopy(again)) == one
    )


def test_what_is_saved_needs_no_code_to_be_read(tmp_path):
    state = sf.static(0.5).init(WEIGHTS)
    torch.save(
        saved(sf.rigl(0.5, key=sf.random.key(0)), state, 0, [], own), tmp_path / "x.pt"
    )
    assert torch.load(tmp_path / "x.pt", weights_only=True)["arguments"][""] == "rigl"


def test_gradients_that_depend_on_the_step():
    own_view = sf.dense()._replace(
        view=sf.dense().view._replace(get=lambda state: state.params)
    )
    assert not reads_step(sf.partition([("*", sf.rigl(0.5))])) and reads_step(own_view)
    assert reads_step(
        sf.partition([("*", sf.with_terms(sf.rigl(0.5), sf.terms.pruned_decay(0.1)))])
    )


def test_arguments_of_all_parts():
    algorithm = sf.partition(
        [
            ("0.*", sf.rigl(0.5)),
            ("*", sf.with_terms(sf.gmp(0.8, steps=20), sf.terms.l2(0.1))),
        ]
    )
    found = [
        value
        for name, value in arguments_of(algorithm)
        if name == "when" and value is not None
    ]
    assert list(dict.fromkeys(found)) == [sf.every(100), sf.every(1, stop=15)]
    own = sf.Algorithm(sf.static(0.5).init, lambda state, grads, step: state)
    assert list(arguments_of(own)) == []
