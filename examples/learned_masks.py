"""2:4 masks of a small transformer that are learned, beside masks from one pass.

    python examples/learned_masks.py
    python examples/learned_masks.py --quick
    python examples/learned_masks.py --seeds 1 --steps 50 --methods wanda prox_sparse

The model is the one of `prune.py`, with the same calibration windows. Its weights stay;
MaskLLM, ProxSparse and MaskPro learn masks on the windows. MaskLLM and MaskPro start
from Wanda's masks. It prints bits per held-out character before and after, and writes
`out/learned_masks.json`. Needs the `demo` extra.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lm
import prune
import torch
from _options import Kept, at_least, level, make_folder
from _progress import progress
from torch import Tensor, nn

import sparsefn as sf

KEPT: Kept = level("2:4")
ONE_PASS = ["magnitude", "wanda", "ria", "sparsegpt"]
LEARNED = ["maskllm", "prox_sparse", "maskpro"]


def batch_of(windows: Tensor, step: int) -> Tensor:
    """Some of the windows, in turn."""
    places = torch.arange(step * lm.BATCH, (step + 1) * lm.BATCH) % len(windows)
    return windows[places]


def frozen_but(rate: float) -> Any:
    """Adam for latents that choose masks; leaves without a mask do not change."""
    return sf.optimizers.by_path(
        [("latent.*", sf.optimizers.adam(rate)), ("*", sf.optimizers.sgd(0.0))]
    )


def by_gradients(
    algorithm: sf.Algorithm, model: nn.Module, windows: Tensor, steps: int
) -> sf.State:
    """The final state, with 2:4 masks, of an algorithm that trains on gradients."""
    state = algorithm.init(sf.modules.params_of(model))
    for step in range(steps):
        batch = batch_of(windows, step)
        grad = torch.func.grad(lambda params, x=batch: prune.loss(model, params, x))
        state = algorithm.update(state, grad(sf.effective(state)), step)
    return sf.settled(algorithm, state)


def maskllm(
    model: nn.Module, windows: Tensor, prior: sf.State, where: Any, steps: int
) -> sf.State:
    """A Gumbel softmax over the six masks of each group."""
    learned = sf.methods.maskllm(
        steps=steps, prior=prior.masks, norm=0.0, axis=-1, where=where
    )
    return by_gradients(
        sf.with_optimizer(learned, frozen_but(1e-3)), model, windows, steps
    )


def prox_sparse(
    model: nn.Module, windows: Tensor, prior: sf.State, where: Any, steps: int
) -> sf.State:
    """Weights that train, drawn towards 2 of 4, and are put back."""
    learned = sf.methods.prox_sparse(2.0, axis=-1, where=where)
    return by_gradients(
        sf.with_optimizer(learned, frozen_but(1e-4)), model, windows, steps
    )


def maskpro(
    model: nn.Module, windows: Tensor, prior: sf.State, where: Any, steps: int
) -> sf.State:
    """Draws of masks, scored by the loss minus the loss under Wanda's masks."""
    learned = sf.methods.maskpro(prior=prior.masks, axis=-1, where=where)
    algorithm = sf.with_optimizer(learned, sf.optimizers.sgd(50.0))
    params = sf.modules.params_of(model)
    state = algorithm.init({**params, "loss": torch.tensor(0.0)})
    first = sf.effective(prior)
    # maskpro reads no gradient but the loss
    zeros = {path: torch.zeros(()).expand(leaf.shape) for path, leaf in params.items()}
    for step in range(steps):
        batch = batch_of(windows, step)
        weights = sf.effective(state)
        del weights["loss"]
        with torch.no_grad():
            residual = prune.loss(model, weights, batch)
            residual -= prune.loss(model, first, batch)
        state = algorithm.update(state, {**zeros, "loss": residual}, step)
    settled = sf.settled(algorithm, state)
    masks = {path: mask for path, mask in settled.masks.items() if path != "loss"}
    return sf.State(sf.apply_masks(params, masks), masks)


def pruned(
    name: str, model: nn.Module, windows: Tensor, prior: sf.State, steps: int
) -> sf.State:
    """The weights and masks by the method of a name."""
    if name in ONE_PASS:
        return prune.prune(name, model, windows, KEPT)
    where = [path for path, mask in prior.masks.items() if mask.ndim]
    make = {"maskllm": maskllm, "prox_sparse": prox_sparse, "maskpro": maskpro}[name]
    return make(model, windows, prior, where, steps)


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Learn 2:4 masks of a small trained transformer."
    )
    add = parser.add_argument
    add("--seeds", type=at_least(1), default=3, help="models (default: 3)")
    add("--steps", type=at_least(1), default=200, help="of learning (default: 200)")
    every = ONE_PASS + LEARNED
    add("--methods", nargs="+", choices=every, default=every, help="default: all")
    add("--out", type=Path, default=Path("out"), help="folder (default: out)")
    add("--quick", action="store_true", help="does it run: a few steps of one model")
    chosen = parser.parse_args(argv)
    chosen.model_steps = 400
    chosen.windows = 128
    if chosen.quick:
        chosen.seeds = 1
        chosen.steps = 3
        chosen.model_steps = 20
        chosen.windows = 8
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train, prune, learn and print."""
    chosen = options()
    text = lm.load(lm.HELD // 8 if chosen.quick else lm.HELD)
    results = []
    work = chosen.model_steps + len(chosen.methods)
    with progress(chosen.seeds * work, "training") as bar:
        for seed in range(chosen.seeds):
            trained = lm.train("dense", 0.0, text, chosen.model_steps, seed, bar)
            model, before = trained.model, trained.result["bits"]
            windows = prune.calibration(text, chosen.windows, seed)
            prior = prune.prune("wanda", model, windows, KEPT)
            for name in chosen.methods:
                begin = time.perf_counter()
                state = pruned(name, model, windows, prior, chosen.steps)
                seconds = time.perf_counter() - begin
                after = lm.bits(sf.modules.bake(model, state), text.held)
                results.append(
                    {
                        "seed": seed,
                        "method": name,
                        "before": before,
                        "bits": after,
                        "seconds": seconds,
                    }
                )
                bar.update()
                print(f"seed {seed} {name}: {before:.3f} {after:.3f} {seconds:.1f} s")
    path = chosen.out / "learned_masks.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
