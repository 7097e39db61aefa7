import pytest
import torch

import sparsefn as sf
from sparsefn.attached.files import loaded, saved

WEIGHTS = {"w": torch.tensor([[1.0, -2.0, 3.0, 4.0]])}


def own(x):
    return x


@pytest.mark.parametrize("shown", [[], ["w"]])
def test_what_is_saved_is_loaded(shown):
    algorithm = sf.ste(0.5)
    state = algorithm.init(WEIGHTS)
    found = saved(algorithm, state, 7, shown, own)
    again, step = loaded(algorithm, found, algorithm.init({"w": torch.zeros(1, 4)}), {"w": torch.full((1, 4), 9.0)})
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
    with pytest.raises(ValueError, match=r"expected the state_dict\(\) of what attach returned, got something else"):
        loaded(algorithm, {"step": 0}, state, WEIGHTS)
    with pytest.raises(ValueError, match="load_state_dict: expected 'step' to be an int, got '7'"):
        loaded(algorithm, {**found, "step": "7"}, state, WEIGHTS)
    with pytest.raises(ValueError, match=r"expected a state of dense\(\), got one of static\(0.5\)"):
        loaded(sf.dense(), found, state, WEIGHTS)
    with pytest.raises(ValueError, match=r"a state of static\(0.5\) does not fit static\(0.9\): .*'masks.w'"):
        other = {**found["tensors"], "masks.w": torch.ones(3, dtype=torch.bool)}
        loaded(sf.static(0.9), {**found, "tensors": other}, state, WEIGHTS)


def test_a_state_of_other_parts_is_refused():
    like, weights = sf.rigl(0.5).init({"w": torch.ones(2, 2)}), {"w": torch.ones(2, 2)}
    mine, other = (sf.partition([("*", part)]) for part in (sf.rigl(0.5), sf.set(0.5)))
    found = saved(mine, like, 3, ["w"], list)
    with pytest.raises(
        ValueError, match=r"expected a state of partition\(.*set\(0.5\).*, got one of partition\(.*rigl"
    ):
        loaded(other, found, like, weights)
    # Numbers, triggers and schedules may be others: a run may go on with them.
    longer = sf.partition([("*", sf.rigl(0.75, when=sf.every(7)))])
    assert loaded(longer, found, like, weights)[1] == 3
