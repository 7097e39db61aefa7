"""Terms in the gradient of a composed algorithm."""

import torch

import sparsefn as sf


def test_terms_go_with_an_algorithm_into_a_chain_of_one_kind():
    inner = sf.chain(
        sf.static(0.5, init="magnitude"), sf.static(0.75, init="magnitude")
    )
    algorithm = sf.with_optimizer(
        sf.with_terms(inner, sf.terms.l1(1.0)), sf.optimizers.sgd(0.5)
    )
    params = {"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])}
    state = algorithm.update(algorithm.init(params), {"w": torch.zeros(1, 4)}, 0)
    assert state.params["w"].tolist() == [[3.5, 0.0, 0.0, 0.0]]
