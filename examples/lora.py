"""A pruned transformer, fine-tuned with low-rank updates: merged without care, and so
that its zeros stay.

    python examples/lora.py
    python examples/lora.py --quick
    python examples/lora.py --level 2:4 --method wanda --rank 16

The model is that of `lm.py`, pruned as by `prune.py`; each way of tuning gets the same
pruned model and the same batches. It prints a table of the held-out loss and of the
zeros that are left, and writes `out/lora.json`, which holds every number. Needs the
`demo` extra.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import lm
import prune
import torch
from _options import at_least, make_folder
from _progress import progress
from _tables import aligned
from torch import Tensor, nn
from torch.nn import functional

import sparsefn as sf

# Peak learning rates: for each the best of 1, 2, 4, ... and 64e-3 with the options that
# are the default, and seed 100.
RATES = {"careless": 1.6e-2, "kept": 3.2e-2, "full": 1.6e-2}

PRUNED = "pruned"
CARELESS = "LoRA, merged"
MASKED = "LoRA, merged, masked again"
KEPT = "LoRA that keeps the zeros"
FULL = "all weights that are kept"


# ---- ways to tune --------------------------------------------------------------------


def careless(rank: int, alpha: float) -> sf.reparam.Reparametrisation:
    """W + alpha / rank * B A, without the mask: plain LoRA."""

    def apply(
        latents: Any, step: Any, key: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        a, b = latents["a"], latents["b"]
        weights = {
            path: base + alpha / rank * (b[path] @ a[path])
            for path, base in latents["base"].items()
        }
        return weights, {
            path: torch.ones_like(base, dtype=torch.bool)
            for path, base in latents["base"].items()
        }

    return sf.reparam.low_rank(rank, alpha)._replace(apply=apply, settled=None)


def tuned(
    base: nn.Module,
    algorithm: sf.Algorithm,
    rate: float,
    text: lm.Text,
    steps: int,
    seed: int,
    bar: Any,
) -> Any:
    """A copy of a pruned model, trained in an ordinary loop."""
    model = copy.deepcopy(base)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=rate
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lm.rate(steps))
    sparse = sf.attach(algorithm, model, optimizer)
    for step, starts in enumerate(lm.batches(text.train, steps, 2000 + seed)):
        window = text.train[starts[:, None] + torch.arange(lm.WINDOW + 1)]
        logits = model(window[:, :-1])
        functional.cross_entropy(
            logits.flatten(0, 1), window[:, 1:].flatten()
        ).backward()
        sparse.before_step()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        sparse.after_step(step)
        bar.update()
    sparse.detach()
    return model


def rows(
    base: nn.Module,
    masks: Any,
    chosen: argparse.Namespace,
    text: lm.Text,
    seed: int,
    bar: Any,
) -> list[Any]:
    """A result for each way to tune a pruned model."""
    rank, alpha = chosen.rank, 2.0 * chosen.rank
    where = sf.modules.weights_of(base, skip=["head"])
    sizes = {path: p.shape for path, p in base.named_parameters() if where(path, p)}
    few = sum(rank * sum(shape) for shape in sizes.values())
    every = sum(p.numel() for p in base.parameters()) - sum(
        int((~mask).sum()) for mask in masks.values() if mask.ndim
    )
    results = []

    def add(name: str, model: nn.Module, trained: int) -> None:
        zeros = sum(int((model.get_parameter(path) == 0).sum()) for path in sizes)
        bits = lm.bits(model, text.held)
        results.append(
            {
                "seed": seed,
                "way": name,
                "bits": bits,
                "zeros": zeros,
                "trained": trained,
            }
        )

    frozen = copy.deepcopy(base)  # but for the matrices, whose gradients train A and B
    for path, parameter in frozen.named_parameters():
        parameter.requires_grad_(path in sizes)

    def low(reparam: sf.reparam.Reparametrisation, kind: str) -> nn.Module:
        algorithm = sf.reparametrised(reparam, where=where)
        return tuned(frozen, algorithm, RATES[kind], text, chosen.tune, seed, bar)

    add(PRUNED, base, 0)
    merged = low(careless(rank, alpha), "careless")
    add(CARELESS, merged, few)
    add(
        MASKED,
        sf.modules.bake(merged, sf.apply_masks(sf.modules.params_of(merged), masks)),
        few,
    )
    add(KEPT, low(sf.reparam.low_rank(rank, alpha), "kept"), few)
    same = sf.static(None, init="from_zeros", where=where)
    add(FULL, tuned(base, same, RATES["full"], text, chosen.tune, seed, bar), every)
    return results


# ---- command line --------------------------------------------------------------------


def run(
    chosen: argparse.Namespace, seed: int, text: lm.Text, bar: Any
) -> list[dict[str, Any]]:
    """Train a model, prune it, and tune it in every way."""
    bar.set_description(f"seed {seed}, training")
    trained = lm.train("dense", 0.0, text, chosen.steps, seed, bar)
    bar.set_description(f"seed {seed}, tuning")
    state = prune.prune(
        chosen.method,
        trained.model,
        prune.calibration(text, chosen.windows, seed),
        chosen.level,
    )
    pruned = sf.modules.bake(trained.model, state)
    dense = {
        "seed": seed,
        "way": "dense",
        "bits": trained.result["bits"],
        "zeros": 0,
        "trained": 0,
    }
    return [dense, *rows(pruned, state.masks, chosen, text, seed, bar)]


def table(results: list[dict[str, Any]], total: int) -> str:
    """A row for each way, with means over seeds."""
    lines = []
    for way in dict.fromkeys(r["way"] for r in results):
        rs = [r for r in results if r["way"] == way]
        bits = sum(r["bits"] for r in rs) / len(rs)
        zeros = "".join(sorted({f"{100 * r['zeros'] / total:.2f}%" for r in rs}))
        each = " ".join(f"{r['bits']:.3f}" for r in rs)
        lines.append((way, f"{bits:.3f}", each, zeros, f"{rs[0]['trained']:,}"))
    return aligned(
        ("", "bits", "each seed", "zeros in the blocks", "numbers that train"),
        lines,
        left=1,
    )


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a pruned transformer with low-rank updates."
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
        "--tune",
        type=at_least(1),
        help="steps of tuning (default: 200; 8 with --quick)",
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
        "--level",
        type=prune.level,
        default=prune.level("0.7"),
        help="fraction of zeros, or n:m (default: 0.7)",
    )
    add(
        "--method",
        choices=prune.METHODS,
        default="sparsegpt",
        help="default: sparsegpt",
    )
    add("--rank", type=at_least(1), default=8, help="of the updates (default: 8)")
    add(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for lora.json (default: out)",
    )
    chosen = parser.parse_args(argv)
    for name, full, quick in (
        ("seeds", 3, 1),
        ("steps", 400, 24),
        ("tune", 200, 8),
        ("windows", 128, 8),
    ):
        setattr(
            chosen, name, getattr(chosen, name) or (quick if chosen.quick else full)
        )
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train, prune, tune and print."""
    chosen = options()
    text = lm.load(lm.HELD // 8 if chosen.quick else lm.HELD)
    results = []
    with progress(chosen.seeds * (chosen.steps + 3 * chosen.tune), "training") as bar:
        for seed in range(chosen.seeds):
            results += run(chosen, seed, text, bar)
    model = lm.GPT(len(text.characters), lm.WIDTH)
    where = sf.modules.weights_of(model, skip=["head"])
    total = sum(p.numel() for path, p in model.named_parameters() if where(path, p))
    seeds = f"{chosen.seeds} seeds" if chosen.seeds > 1 else "one seed"
    print(
        f"\nBits per held-out character, {chosen.level.name} zeros by "
        f"{prune.METHODS[chosen.method]}, {seeds};"
    )
    print(
        f"then {chosen.tune} steps, updates of rank {chosen.rank}\n\n"
        f"{table(results, total)}"
    )
    about = {
        "seeds": chosen.seeds,
        "steps": chosen.steps,
        "tune": chosen.tune,
        "rank": chosen.rank,
        "total": total,
    }
    about |= {
        "level": chosen.level.name,
        "method": prune.METHODS[chosen.method],
        "rates": RATES,
    }
    (chosen.out / "lora.json").write_text(
        json.dumps({**about, "results": results}, indent=1) + "\n", encoding="utf-8"
    )
    print(f"\nwrote lora.json to {chosen.out}")


if __name__ == "__main__":
    main()
