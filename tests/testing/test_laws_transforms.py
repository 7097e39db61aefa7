"""The messages of the laws on transforms for algorithms that break them."""

import pytest
import torch

import sparsefn as sf
from sparsefn._engine.transforms import host_number
from sparsefn.testing import Case, Meta, Row
from sparsefn.testing import laws_transforms as laws

W = torch.arange(1.0, 13.0).reshape(3, 4)
_FACTORS = [1.0] * 8
CASE = Case({"w": W}, ({"w": W.flip(1)}, {"w": W.flip(0)}, {"w": W}), 0.5, 0)


def row(make, **flags):
    return Row("mine", lambda sparsity, key, params: make(sparsity, key), Meta(**flags))


def test_a_batch_that_is_no_loop_is_noticed():
    shared = row(
        lambda s, key: sf.static(
            s, key=sf.random.key(0) if host_number(key[0]) is None else key
        )
    )
    with pytest.raises(AssertionError, match="member 0: differs at"):
        laws.vmap_is_a_loop(shared, CASE)
    with pytest.raises(AssertionError, match="member 0, 0: differs at"):
        laws.nested_vmap_is_two_loops(shared, CASE)
    laws.vmap_is_a_loop(row(lambda s, key: sf.static(s, key=key)), CASE)


def test_a_sparsity_that_is_no_tensor_is_not_batched():
    plain = row(lambda s, key: sf.static(float(s), key=key))
    laws.vmap_is_a_loop(plain, CASE)
    laws.nested_vmap_is_two_loops(plain, CASE)


@pytest.mark.deep
def test_a_graph_for_every_step_is_noticed():
    base = sf.gmp(0.5)

    def update(state, grads, step):
        if isinstance(step, int):
            state = state._replace(params={"w": state.params["w"] * _FACTORS[step]})
        return base.update(state, grads, step)

    with pytest.raises(
        AssertionError, match="3 graphs up to step 2, not 2: see sf.triggers.check_step"
    ):
        laws.compiling_changes_nothing(
            row(lambda s, key: sf.Algorithm(base.init, update)), CASE
        )


def test_a_failure_leaves_no_graphs_to_count(monkeypatch):
    def breaking(s, key):
        def update(state, grads, step):
            torch._dynamo.graph_break()
            return state

        return sf.static(s)._replace(update=update)

    real, calls = torch._dynamo.reset, []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: calls.append(real()))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        laws.compiling_changes_nothing(row(breaking), CASE)
    assert calls


def test_one_made_of_the_params_need_not_serve_others():
    def made(sparsity, key, params):
        def update(state, grads, step):
            if state.params["w"].shape != params["w"].shape:
                raise ValueError("of another model")
            return state

        return sf.static(sparsity)._replace(update=update)

    laws.one_compiled_update_serves_two_models(Row("mine", made, Meta()), CASE)
