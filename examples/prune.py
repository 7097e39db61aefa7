"""A small transformer, trained by `lm.py` and then pruned with data, without training
it again.

    python examples/prune.py
    python examples/prune.py --quick
    python examples/prune.py --seeds 1 --levels 0.6 4:8 --methods magnitude wanda

Every method gets the same trained model and the same windows of its text. It prints the
held-out loss before and after, and whether SparseGPT is better than Wanda, and Wanda
than magnitude, in how many seeds. It writes `out/prune.png` and `out/prune.json`, which
holds every number. Needs the `demo` extra.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import lm
import torch
from _options import Kept, at_least, level, make_folder
from _progress import progress
from _prune_report import draw, findings, table
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparsefn as sf

METHODS = {
    "magnitude": "magnitude",
    "wanda": "Wanda",
    "swaps": "Wanda, swaps",
    "ria": "RIA",
    "sparsegpt": "SparseGPT",
    "woodfisher": "WoodFisher",
}
BLOCKS = [f"blocks.{i}.*" for i in range(lm.BLOCKS)]
CHUNK = 32  # windows in memory at a time
DAMP = 1e-5  # added to the diagonal of the Fisher matrix
SHOWN = f"blocks.{lm.BLOCKS - 1}.down.weight"  # the matrix whose inputs are drawn


# ---- methods -------------------------------------------------------------------------


def by_size(model: nn.Module, kept: Kept) -> sf.State:
    """The largest weights of each matrix stay; no data."""
    where = sf.modules.weights_of(model, skip=["head"])
    return at_once(one_shot(kept, sf.scores.magnitude, where=where), model)


def wanda(model: nn.Module, windows: Tensor, kept: Kept) -> sf.State:
    """Weights count with their inputs, and compete inside of their output."""
    rows = in_rows(kept)
    return sf.calibration.in_order(
        model,
        None,
        BLOCKS,
        lambda stats: one_shot(rows, sf.scores.wanda(stats)),
        windows[:, :-1],
        of="square",
        chunk_size=CHUNK,
    )


def swaps(model: nn.Module, windows: Tensor, kept: Kept) -> sf.State:
    """Wanda's masks, whose weights then change places inside of their output."""
    rows = in_rows(kept)

    def refined(weight: Tensor, gram: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return weight, sf.solve.swaps(weight, gram, mask, rows.pattern)

    def prune(stats: Any) -> sf.Algorithm:
        # what Wanda prunes keeps its value until masks are final
        first = one_shot(rows, sf.scores.wanda(stats), pruned="keep")
        return sf.sequence(first, sf.rewrite(sf.solve.layerwise(stats, refined)))

    return sf.calibration.in_order(
        model, None, BLOCKS, prune, windows[:, :-1], chunk_size=CHUNK
    )


def ria(model: nn.Module, windows: Tensor, kept: Kept) -> sf.State:
    """Shares of rows and columns count with the inputs; weights compete inside of their
    matrix.
    """
    return sf.calibration.in_order(
        model,
        None,
        BLOCKS,
        lambda stats: one_shot(kept, sf.scores.ria(stats)),
        windows[:, :-1],
        of="square",
        chunk_size=CHUNK,
    )


def sparsegpt(model: nn.Module, windows: Tensor, kept: Kept) -> sf.State:
    """The kept weights of each output make up for those that are pruned."""
    share = None if kept.sparsity is None else 1 - kept.sparsity

    def prune(stats: Any) -> sf.Algorithm:
        def solve(
            path: str, weight: Tensor, mask: Tensor, step: int
        ) -> tuple[Tensor, Tensor]:
            return sf.solve.obs(
                weight, stats[path]["gram"], keep=share, pattern=kept.pattern
            )

        return sf.rewrite(solve, when=sf.at([0]))

    return sf.calibration.in_order(
        model, None, BLOCKS, prune, windows[:, :-1], chunk_size=CHUNK
    )


def woodfisher(model: nn.Module, windows: Tensor, kept: Kept) -> sf.State:
    """The gradients of each window say what the loss loses; the Fisher matrix has a
    block for each row of a weight.
    """
    weights = sf.modules.params_of(model)
    where = sf.modules.weights_of(model, skip=["head"])
    chosen = {path: weight for path, weight in weights.items() if where(path, weight)}
    # vmap goes through fused attention one example at a time
    with sdpa_kernel(SDPBackend.MATH):
        gradients = sf.curvature.example_gradients(
            partial(loss, model), chosen, (windows,)
        )

    def surgeon(
        path: str, weight: Tensor, mask: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        # (rows, inputs, inputs)
        inverse = sf.solve.fisher_inverse(gradients[path], DAMP, block=weight.shape[1])
        scale = weight / inverse.diagonal(dim1=1, dim2=2)
        score = weight * scale  # twice what the loss rises by
        if kept.pattern is None:
            mask = sf.masks.topk_mask(
                score, sf.budgets.n_kept(weight.numel(), kept.sparsity)
            )
        else:
            mask = sf.masks.topk_mask(score, None, pattern=kept.pattern)
        # The changes for all pruned weights are added up, as the authors do.
        change = torch.einsum("rij,rj->ri", inverse, scale.masked_fill(mask, 0.0))
        return (weight - change).masked_fill(~mask, 0.0), mask

    return at_once(sf.rewrite(surgeon, when=sf.at([0]), where=where), model)


def loss(model: nn.Module, params: Any, windows: Tensor) -> Tensor:
    """The mean over the characters of some windows."""
    logits = sf.modules.call(model, params, windows[:, :-1], partial=True)
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def in_rows(kept: Kept) -> Kept:
    """The same sparsity or N:M, with weights that compete inside of their output."""
    if kept.pattern is not None:
        return kept
    return kept._replace(pattern=sf.patterns.row_balanced())


def one_shot(kept: Kept, score: Any, **options: Any) -> sf.Algorithm:
    """Prune once, by a score."""
    if kept.pattern is not None:
        options["pattern"] = kept.pattern
    return sf.one_shot(kept.sparsity, score, **options)


def at_once(algorithm: sf.Algorithm, model: nn.Module) -> sf.State:
    """The state after an algorithm pruned the whole model; its scores read no
    gradients.
    """
    state = algorithm.init(sf.modules.params_of(model))
    return algorithm.update(state, state.params, 0)


def prune(name: str, model: nn.Module, windows: Tensor, kept: Kept) -> sf.State:
    """The pruned weights and their masks, by the method of a name."""
    if name == "magnitude":
        return by_size(model, kept)
    return {
        "wanda": wanda,
        "swaps": swaps,
        "ria": ria,
        "sparsegpt": sparsegpt,
        "woodfisher": woodfisher,
    }[name](model, windows, kept)


# ---- runs ----------------------------------------------------------------------------


def calibration(text: lm.Text, count: int, seed: int) -> Tensor:
    """Windows of the text that the model was trained on, and the character after
    each.
    """
    starts = lm.batches(text.train, -(-count // lm.BATCH), 1000 + seed).flatten()[
        :count
    ]
    return text.train[starts[:, None] + torch.arange(lm.WINDOW + 1)]


def run(
    chosen: argparse.Namespace, seed: int, text: lm.Text, bar: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train a model and prune it in every way: a result for each, and what is drawn of
    one matrix.
    """
    bar.set_description(f"seed {seed}, training")
    trained = lm.train("dense", 0.0, text, chosen.steps, seed, bar)
    model, before, windows = (
        trained.model,
        trained.result["bits"],
        calibration(text, chosen.windows, seed),
    )
    results, masks = [], {}
    for kept in chosen.levels:
        for name in chosen.methods:
            bar.set_description(f"seed {seed}, {kept.name}, {METHODS[name]}")
            begin = time.perf_counter()
            state = prune(name, model, windows, kept)
            seconds = time.perf_counter() - begin
            pruned = sf.modules.bake(model, state)
            counts = lm.counted(model, state)
            about = {
                "seed": seed,
                "level": kept.name,
                "method": METHODS[name],
                "seconds": seconds,
            }
            after = {
                "kept": counts["kept"],
                "total": counts["total"],
                "bits": lm.bits(pruned, text.held),
            }
            results.append({**about, "before": before, **after})
            masks[kept.name, METHODS[name]] = state.masks[SHOWN]
            bar.update()
    stats = sf.calibration.inputs(
        model, None, windows[:, :-1], paths=SHOWN, of="square"
    )[SHOWN]
    return results, {"norms": (stats["square"] / stats["count"]).sqrt(), "masks": masks}


# ---- command line --------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Prune a small trained transformer with data."
    )
    add = parser.add_argument
    add(
        "--seeds",
        type=at_least(1),
        help="how many models are trained and pruned (default: 3; 1 with --quick)",
    )
    add(
        "--steps",
        type=at_least(lm.CURVE),
        help="training steps (default: 400; 24 with --quick)",
    )
    add(
        "--windows",
        type=at_least(1),
        help="calibration windows (default: 128; 8 with --quick)",
    )
    add(
        "--quick",
        action="store_true",
        help="one model, few steps and windows, a small part of the held-out text",
    )
    add(
        "--levels",
        nargs="+",
        type=level,
        default=[level(text) for text in ("0.5", "0.7", "2:4")],
    )
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="default: all",
    )
    add(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for prune.png and prune.json (default: out)",
    )
    chosen = parser.parse_args(argv)
    for name, full, quick in (("seeds", 3, 1), ("steps", 400, 24), ("windows", 128, 8)):
        setattr(
            chosen, name, getattr(chosen, name) or (quick if chosen.quick else full)
        )
    chosen.methods = [name for name in METHODS if name in chosen.methods]
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train, prune, print and draw."""
    chosen = options()
    text = lm.load(lm.HELD // 8 if chosen.quick else lm.HELD)
    results, shown = [], {}
    work = chosen.steps + len(chosen.levels) * len(chosen.methods)
    with progress(chosen.seeds * work, "training") as bar:
        for seed in range(chosen.seeds):
            more, matrix = run(chosen, seed, text, bar)
            results += more
            shown = shown or matrix

    seeds = f"{chosen.seeds} seeds" if chosen.seeds > 1 else "one seed"
    windows = f"{chosen.windows} windows of {lm.WINDOW} characters"
    print(
        f"\nBits per held-out character before and after pruning with {windows}, "
        f"{seeds}\n\n{table(results)}\n"
    )
    print("\n".join(findings(results)))
    about = {"seeds": chosen.seeds, "steps": chosen.steps, "windows": chosen.windows}
    report = {**about, "results": results, "findings": findings(results)}
    (chosen.out / "prune.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    draw(results, shown, chosen.out / "prune.png")
    print(f"\nwrote prune.png and prune.json to {chosen.out}")


if __name__ == "__main__":
    main()
