"""What a map may say beside its values: a test-time map, a projection, and trees that
do not train.
"""

import torch

import sparsefn as sf
from sparsefn.algorithms.reparam import Reparametrisation


def frozen_at_start(project=None):
    """w = v on the half of the largest |v|, and the first weights off it."""

    def start(leaves, key):
        return {
            "latent": dict(leaves),
            "first": {path: x.clone() for path, x in leaves.items()},
        }

    def apply(latents, step, key):
        rows = {
            p: (v, latents["first"][p], sf.masks.topk_mask(v.abs(), v.numel() // 2))
            for p, v in latents["latent"].items()
        }
        return {p: torch.where(m, v, w) for p, (v, w, m) in rows.items()}, {}

    return Reparametrisation(start, apply, project=project, held=("first",))


def test_held_trees_are_not_trained_and_stay():
    algorithm = sf.reparametrised(frozen_at_start())
    trained = sf.with_optimizer(algorithm, sf.optimizers.adamw(0.1, weight_decay=0.5))
    params = {"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]]), "b": torch.ones(2)}
    state = trained.init(params)
    assert list(algorithm.view.get(state)["latent"]) == ["latent"]
    for step in range(3):
        state = trained.update(state, {"w": torch.ones(1, 4), "b": torch.ones(2)}, step)
    assert torch.equal(state.scores["latent"]["first"]["w"], params["w"])
    weights = sf.effective(state)["w"]
    assert (
        weights[0, 2:].tolist() == [2.0, 1.0]
        and (weights[0, :2] < params["w"][0, :2]).all()
    )


def test_a_projection_comes_after_the_step_and_before_the_weights():
    def project(latents, step):
        return {
            **latents,
            "latent": {p: v.clamp(-3.0, 3.0) for p, v in latents["latent"].items()},
        }

    algorithm = sf.with_optimizer(
        sf.reparametrised(frozen_at_start(project)), sf.optimizers.sgd(1.0)
    )
    state = algorithm.init({"w": torch.tensor([[4.0, 3.5, 2.0, 1.0]])})
    state = algorithm.update(state, {"w": torch.tensor([[0.0, 1.0, 0.0, 0.0]])}, 0)
    assert state.scores["latent"]["latent"]["w"].tolist() == [[3.0, 2.5, 2.0, 1.0]]
    assert sf.effective(state)["w"].tolist() == [[3.0, 2.5, 2.0, 1.0]]
