"""A picture for each published method that changes masks while it trains: its mask over
time.

    python examples/gallery.py
    python examples/gallery.py --methods rigl set --steps 400

All of them train one layer of 32 x 32 weights to be a layer whose weights are zero
outside of a drawing, from random inputs. It writes `out/gallery/rigl.png` and so on,
the pictures of docs/methods.md. Needs the `demo` extra.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _options import at_least, make_folder
from matplotlib.figure import Figure
from torch import Tensor

import sparsefn as sf

SIZE, SPARSITY, BATCH = 32, 0.8, 64
SHOWN = 5  # masks in a picture
ON, OFF = "#D55E00", "#3B5B75"  # kept weights inside of the drawing, and outside

# `steps` is the length of the run, `adam` an optimizer. Where no optimizer is named,
# the algorithm trains with it.
CARDS = {
    "set": "algorithm = sf.methods.set(0.8, steps=steps)",
    "rigl": "algorithm = sf.methods.rigl(0.8, steps=steps)",
    "snfs": "algorithm = sf.methods.snfs(0.8, steps=steps)",
    "granet": (
        "often = sf.every(steps // 20, stop=steps // 2)\n"
        "algorithm = sf.methods.granet(\n"
        "    0.8, steps=steps // 2, when=often)"
    ),
    "mest": (
        "often = sf.every(steps // 40, stop=3 * steps // 4)\n"
        "algorithm = sf.methods.mest(\n"
        "    0.8, extra=0.05, when=often)"
    ),
    "top_kast": "algorithm = sf.methods.top_kast(\n    0.8, backward=0.6)",
    "srigl": (
        "often = sf.every(steps // 20, stop=steps // 2)\n"
        "algorithm = sf.methods.srigl(\n"
        "    0.8, steps=steps, when=often)"
    ),
    "deep_rewiring": (
        "rewiring = sf.methods.deep_rewiring(0.8)\n"
        "sgd = sf.optimizers.sgd(0.3)\n"
        "algorithm = sf.with_optimizer(rewiring, sgd)"
    ),
    "dsr": (
        "often = sf.every(steps // 40, stop=3 * steps // 4)\n"
        "algorithm = sf.methods.dsr(\n"
        "    0.8, when=often, target=20, tau=0.05)"
    ),
    "chts": (
        "often = sf.every(steps // 20, stop=steps // 2)\n"
        "algorithm = sf.methods.chts(\n"
        "    0.8, steps=steps, when=often)"
    ),
    "imp": (
        "rounds = sf.every(steps // 8, start=steps // 8)\n"
        "imp = sf.methods.imp(0.2, when=rounds)\n"
        "algorithm = sf.with_optimizer(imp, adam, reset=rounds)"
    ),
    "force": (
        "rounds = sf.every(1, stop=10)\n"
        "force = sf.methods.force(0.8)\n"
        "algorithm = sf.with_optimizer(force, adam, skip=rounds)"
    ),
    "gmp": (
        "rise = sf.schedules.polynomial(\n"
        "    0.0, 0.8, begin=0, end=steps // 2)\n"
        "algorithm = sf.gmp(rise, when=sf.every(5))"
    ),
    "ac_dc": (
        "sparse = sf.at([steps // 4, 3 * steps // 4])\n"
        "dense = sf.at([steps // 2])\n"
        "ac_dc = sf.methods.ac_dc(\n"
        "    0.8, sparse=sparse, dense=dense)\n"
        "algorithm = sf.with_optimizer(ac_dc, adam, reset=dense)"
    ),
    "edge_popup": (
        "popup = sf.methods.edge_popup(0.8)\n"
        "sgd = sf.optimizers.sgd(0.1, momentum=0.9)\n"
        "algorithm = sf.with_optimizer(popup, sgd)"
    ),
    "movement": "algorithm = sf.methods.movement(\n    0.8, steps=steps)",
    "soft_movement": (
        "algorithm = sf.methods.soft_movement(\n    0.4, steps=steps, strength=100.0)"
    ),
    "str_": "algorithm = sf.methods.str_(init=-5.0)",
    "powerprop": (
        "rise = sf.schedules.polynomial(\n"
        "    0.0, 0.8, begin=steps // 4, end=3 * steps // 4)\n"
        "gmp = sf.gmp(rise, when=sf.every(5))\n"
        "algorithm = sf.methods.powerprop(gmp)"
    ),
    "hard_concrete": (
        "l0 = sf.methods.hard_concrete(1e-2)\n"
        "faster = sf.optimizers.adam(0.05)\n"
        "algorithm = sf.with_optimizer(l0, faster)"
    ),
    "continuous_sparsification": (
        "algorithm = (\n"
        "    sf.methods.continuous_sparsification(\n"
        "        steps=steps, init=0.05))"
    ),
    "sr_ste": "algorithm = sf.methods.sr_ste(2, 4)",
    "proximal": (
        "lasso = sf.methods.proximal(0.2, rate=0.1)\n"
        "sgd = sf.optimizers.sgd(0.1)\n"
        "algorithm = sf.with_optimizer(lasso, sgd)"
    ),
}


class Card(NamedTuple):
    """What is drawn of a method."""

    name: str
    masks: list[np.ndarray]  # at the steps that are shown
    steps: list[int]
    kept: list[float]  # the share of the weights, at each step
    inside: float  # the share of the last mask that is inside of the drawing


# ---- the task ------------------------------------------------------------------------


def drawing() -> Tensor:
    """The entries of the layer that are not zero: a ring and a disc."""
    place = torch.arange(SIZE) - (SIZE - 1) / 2
    radius = (place[:, None].square() + place.square()).sqrt()
    return ((radius - 0.36 * SIZE).abs() < 0.04 * SIZE) | (radius < 0.11 * SIZE)


def target(seed: int) -> Tensor:
    """The weights of the layer that is to be learned."""
    generator = torch.Generator().manual_seed(seed)
    size = 0.5 + torch.rand(SIZE, SIZE, generator=generator)
    return torch.where(
        drawing(),
        size * (torch.randint(2, (SIZE, SIZE), generator=generator) * 2.0 - 1),
        0.0,
    )


def run(name: str, code: str, steps: int, seed: int = 0) -> Card:
    """Train a layer by the code of a card, and keep its masks."""
    adam = sf.optimizers.adam(0.02)
    scope: dict[str, Any] = {"sf": sf, "steps": steps, "adam": adam}
    exec(code, scope)
    algorithm: sf.Algorithm = scope["algorithm"]
    if "with_optimizer" not in code:
        algorithm = sf.with_optimizer(algorithm, adam)
    wanted, generator = target(seed), torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5
    state = algorithm.init({"weight": weight})
    shown = [round(i * steps / (SHOWN - 1)) for i in range(SHOWN)]
    masks, kept = [mask_of(algorithm, state)], [float(mask_of(algorithm, state).mean())]
    for step in range(steps):
        x = torch.randn(BATCH, SIZE, generator=generator)
        error = x @ (sf.effective(state)["weight"] - wanted).T
        state = algorithm.update(state, {"weight": error.T @ x / BATCH}, step)
        mask = mask_of(algorithm, state)
        kept.append(float(mask.mean()))
        if step + 1 in shown[1:]:
            masks.append(mask)
    inside = float(masks[-1][drawing().numpy()].sum() / max(masks[-1].sum(), 1))
    return Card(name, masks, shown, kept, inside)


def mask_of(algorithm: sf.Algorithm, state: sf.State) -> np.ndarray:
    """The mask to evaluate with."""
    mask: Tensor = sf.settled(algorithm, state).masks["weight"]
    return mask.expand(SIZE, SIZE).float().numpy()


# ---- the picture ---------------------------------------------------------------------


def draw(card: Card, file: Path) -> None:
    """The masks of a method in a row, and how many weights it kept at each step."""
    figure = Figure(figsize=(7.2, 1.5))
    inside = drawing().numpy()
    colours = np.array(
        [
            [255, 255, 255],
            *[[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (OFF, ON)],
        ],
        np.uint8,
    )
    for i, (mask, step) in enumerate(zip(card.masks, card.steps, strict=True)):
        axes = figure.add_axes((0.005 + 0.163 * i, 0.24, 0.15, 0.73))
        axes.imshow(
            colours[(mask * (1 + inside)).astype(int)],
            interpolation="nearest",
            aspect="equal",
        )
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color("0.8")
        axes.set_xlabel(f"step {step}", fontsize=12, labelpad=2)
    line = figure.add_axes((0.845, 0.24, 0.147, 0.73))
    line.plot(card.kept, color=OFF, linewidth=1.3)
    line.fill_between(range(len(card.kept)), card.kept, color=OFF, alpha=0.15)
    line.set_ylim(0, 1.05)
    line.set_xlim(0, len(card.kept) - 1)
    line.set_xticks([])
    line.set_yticks([0, 1], ["0", "1"], fontsize=11)
    line.tick_params(length=0, pad=2)
    line.spines[["top", "right"]].set_visible(False)
    line.set_xlabel(f"kept {100 * card.kept[-1]:.0f}%", fontsize=12, labelpad=2)
    figure.savefig(file, dpi=100)


# ---- command line --------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Draw the masks of each method that changes them while it trains."
    )
    add = parser.add_argument
    add("--steps", type=at_least(40), default=400, help="training steps (default: 400)")
    add("--methods", nargs="+", choices=CARDS, default=[*CARDS], help="default: all")
    add(
        "--out",
        type=Path,
        default=Path("out/gallery"),
        help="folder (default: out/gallery)",
    )
    chosen = parser.parse_args(argv)
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train with every method, and draw its masks."""
    chosen = options()
    for name in chosen.methods:
        begin = time.perf_counter()
        card = run(name, CARDS[name], chosen.steps)
        seconds = time.perf_counter() - begin
        print(
            f"{name:26} keeps {card.kept[-1]:.3f}, {card.inside:.3f} of it inside the "
            f"drawing, {seconds:.1f} s"
        )
        draw(card, chosen.out / f"{name}.png")
    print(f"wrote {len(chosen.methods)} pictures to {chosen.out}")


if __name__ == "__main__":
    main()
