"""A card for each published method that changes masks while it trains: its mask over time, its code, its paper.

    python examples/gallery.py
    python examples/gallery.py --methods rigl set --steps 400

All of them train one layer of 32 x 32 weights to be a layer whose weights are zero outside of a drawing, from random
inputs. Methods that are not in `sf.methods` yet, or have no card, are left out. It writes `out/methods.png`. Needs the
`demo` extra.
"""

import argparse
import inspect
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _options import at_least, make_folder
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

import sparsefn as sf

SIZE, SPARSITY, BATCH = 32, 0.8, 64
COLUMNS, SHOWN = 3, 5  # cards in a row, masks on a card
LONGEST = 26  # characters of a title
ON, OFF = "#D55E00", "#3B5B75"  # kept weights inside of the drawing, and outside
PAPER = re.compile(r"[A-Z][\w-]+(?:,? (?:et al\.|(?:&|and) [\w-]+|[A-Z][\w-]+))* (?:19|20)\d\d, arXiv \d{4}\.\d{4,5}")

# Five lines at most, each run as it is shown: `steps` is the length of the run, `adam` an optimizer. Where no optimizer
# is named, the algorithm trains with it.
CARDS = {
    "set": "algorithm = sf.methods.set(0.8, steps=steps)",
    "rigl": "algorithm = sf.methods.rigl(0.8, steps=steps)",
    "snfs": "algorithm = sf.methods.snfs(0.8, steps=steps)",
    "granet": "often = sf.every(steps // 20, stop=steps // 2)\n"
    "algorithm = sf.methods.granet(\n    0.8, steps=steps // 2, when=often)",
    "mest": "often = sf.every(steps // 40, stop=3 * steps // 4)\n"
    "algorithm = sf.methods.mest(\n    0.8, extra=0.05, when=often)",
    "top_kast": "algorithm = sf.methods.top_kast(\n    0.8, backward=0.6)",
    "srigl": "often = sf.every(steps // 20, stop=steps // 2)\n"
    "algorithm = sf.methods.srigl(\n    0.8, steps=steps, when=often)",
    "deep_rewiring": "rewiring = sf.methods.deep_rewiring(0.8)\n"
    "sgd = sf.optimizers.sgd(0.3)\nalgorithm = sf.with_optimizer(rewiring, sgd)",
    "dsr": "often = sf.every(steps // 40, stop=3 * steps // 4)\n"
    "algorithm = sf.methods.dsr(\n    0.8, when=often, target=20, tau=0.05)",
    "chts": "often = sf.every(steps // 20, stop=steps // 2)\n"
    "algorithm = sf.methods.chts(\n    0.8, steps=steps, when=often)",
    "imp": "rounds = sf.every(steps // 8, start=steps // 8)\n"
    "imp = sf.methods.imp(0.2, when=rounds)\n"
    "algorithm = sf.with_optimizer(imp, adam, reset=rounds)",
    "force": "rounds = sf.every(1, stop=10)\nforce = sf.methods.force(0.8)\n"
    "algorithm = sf.with_optimizer(force, adam, skip=rounds)",
    "gmp": "rise = sf.schedules.polynomial(\n    0.0, 0.8, begin=0, end=steps // 2)\n"
    "algorithm = sf.gmp(rise, when=sf.every(5))",
    "ac_dc": "sparse = sf.at([steps // 4, 3 * steps // 4])\ndense = sf.at([steps // 2])\n"
    "ac_dc = sf.methods.ac_dc(\n    0.8, sparse=sparse, dense=dense)\n"
    "algorithm = sf.with_optimizer(ac_dc, adam, reset=dense)",
    "ste": "algorithm = sf.ste(0.8)",
    "edge_popup": "popup = sf.methods.edge_popup(0.8)\n"
    "sgd = sf.optimizers.sgd(0.1, momentum=0.9)\nalgorithm = sf.with_optimizer(popup, sgd)",
    "movement": "algorithm = sf.methods.movement(\n    0.8, steps=steps)",
    "soft_movement": "algorithm = sf.methods.soft_movement(\n    0.4, steps=steps, strength=100.0)",
    "str_": "algorithm = sf.methods.str_(init=-5.0)",
    "powerprop": "rise = sf.schedules.polynomial(\n    0.0, 0.8, begin=steps // 4, end=3 * steps // 4)\n"
    "gmp = sf.gmp(rise, when=sf.every(5))\nalgorithm = sf.methods.powerprop(gmp)",
    "hard_concrete": "l0 = sf.methods.hard_concrete(1e-2)\nfaster = sf.optimizers.adam(0.05)\n"
    "algorithm = sf.with_optimizer(l0, faster)",
    "continuous_sparsification": "algorithm = (\n    sf.methods.continuous_sparsification(\n"
    "        steps=steps, init=0.05))",
    "sr_ste": "algorithm = sf.methods.sr_ste(2, 4)",
    "proximal": "lasso = sf.methods.proximal(0.2, rate=0.1)\nsgd = sf.optimizers.sgd(0.1)\n"
    "algorithm = sf.with_optimizer(lasso, sgd)",
}


class Card(NamedTuple):
    """What is drawn of a method."""

    name: str
    title: str
    code: str
    paper: str
    masks: list[np.ndarray]  # at the steps that are shown
    steps: list[int]
    kept: list[float]  # the share of the weights, at each step
    inside: float  # the share of the last mask that is inside of the drawing


# ---- the task ------------------------------------------------------------------------------------


def drawing() -> Tensor:
    """The entries of the layer that are not zero: a ring and a disc."""
    place = torch.arange(SIZE) - (SIZE - 1) / 2
    radius = (place[:, None].square() + place.square()).sqrt()
    return ((radius - 0.36 * SIZE).abs() < 0.04 * SIZE) | (radius < 0.11 * SIZE)


def target(seed: int) -> Tensor:
    """The weights of the layer that is to be learned."""
    generator = torch.Generator().manual_seed(seed)
    size = 0.5 + torch.rand(SIZE, SIZE, generator=generator)
    return torch.where(drawing(), size * (torch.randint(2, (SIZE, SIZE), generator=generator) * 2.0 - 1), 0.0)


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
    return Card(name, title(name), code, paper(name), masks, shown, kept, inside)


def mask_of(algorithm: sf.Algorithm, state: sf.State) -> np.ndarray:
    """The mask to evaluate with."""
    mask: Tensor = sf.settled(algorithm, state).masks["weight"]
    return mask.expand(SIZE, SIZE).float().numpy()


# ---- what is known of a method -------------------------------------------------------------------


def made(name: str) -> Any:
    """The function of a name: of `sf.methods`, else of the top level, else None."""
    return getattr(sf.methods, name, None) or getattr(sf, name, None)


def names() -> list[str]:
    """The cards of methods that are here."""
    return [name for name, code in CARDS.items() if made(name) and (hasattr(sf.methods, name) or "methods" not in code)]


def title(name: str) -> str:
    """The name as its docstring says it, or an abbreviation where that is too long for a card."""
    first, *rest = inspect.cleandoc(made(name).__doc__).splitlines()[0].split(": ")
    return first if rest and len(first) <= LONGEST else name.upper()


def paper(name: str) -> str:
    """The paper that the docstring names first."""
    if not (found := PAPER.search(" ".join(inspect.cleandoc(made(name).__doc__).split()))):
        return ""
    authors, year = re.split(r" (?=(?:19|20)\d\d, )", found[0])
    first = authors.split(",")[0] + " et al." if "," in authors else authors
    return f"{first} {year}"


# ---- the sheet -----------------------------------------------------------------------------------


def draw(cards: list[Card], file: Path) -> None:
    """All cards on one sheet."""
    rows = -(-len(cards) // COLUMNS)
    figure = Figure(figsize=(5.3 * COLUMNS, 2.3 * rows + 0.6))
    parts = figure.subfigures(rows + 1, 1, height_ratios=[0.6, *[2.3] * rows], hspace=0)
    share = 100 * float(drawing().float().mean())
    parts[0].text(
        0.02,
        0.35,
        "One layer of 32 x 32 weights learns a layer that is zero outside of a ring and a disc, "
        f"{share:.0f}% of its entries.\nOrange: kept weights inside of the drawing; blue: kept outside.",
        fontsize=11,
        va="center",
    )
    for row, part in enumerate(parts[1:]):
        places = part.subfigures(1, COLUMNS, squeeze=False)[0]
        for place, card in zip(places, cards[row * COLUMNS : (row + 1) * COLUMNS], strict=False):
            draw_card(place, card)
    figure.savefig(file, dpi=85)


def draw_card(place: SubFigure, card: Card) -> None:
    """The masks of a method in a row, its sparsity below, and its code beside it."""
    place.text(0.04, 0.93, card.title, fontsize=11, weight="bold", va="center")
    place.text(0.96, 0.93, card.paper, fontsize=6.5, color="0.4", va="center", ha="right")
    inside = drawing().numpy()
    colours = np.array([[255, 255, 255], *[[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (OFF, ON)]], np.uint8)
    for i, (mask, step) in enumerate(zip(card.masks, card.steps, strict=True)):
        axes = place.add_axes((0.04 + 0.187 * i, 0.45, 0.172, 0.40))
        axes.imshow(colours[(mask * (1 + inside)).astype(int)], interpolation="nearest", aspect="equal")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color("0.8")
        axes.set_xlabel(f"step {step}" if i == 0 else str(step), fontsize=7, labelpad=2)
    line = place.add_axes((0.71, 0.11, 0.245, 0.21))
    line.plot(card.kept, color=OFF, linewidth=1.3)
    line.fill_between(range(len(card.kept)), card.kept, color=OFF, alpha=0.15)
    line.set_ylim(0, 1.05)
    line.set_xlim(0, len(card.kept) - 1)
    line.set_xticks([])
    line.set_yticks([0, 1], ["0", "1"], fontsize=6)
    line.tick_params(length=0, pad=2)
    line.spines[["top", "right"]].set_visible(False)
    line.set_title(f"kept: {100 * card.kept[-1]:.0f}%, {100 * card.inside:.0f}% of it inside", fontsize=7, pad=2)
    place.text(0.04, 0.33, card.code, fontsize=7, family="monospace", va="top", linespacing=1.25)


# ---- command line --------------------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(description="Draw a card for each method that changes masks while it trains.")
    add = parser.add_argument
    add("--steps", type=at_least(40), default=400, help="training steps (default: 400)")
    add("--methods", nargs="+", choices=names(), default=names(), help="default: all that are here")
    add("--out", type=Path, default=Path("out"), help="folder for methods.png (default: out)")
    chosen = parser.parse_args(argv)
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train every method, and draw the sheet."""
    chosen, cards = options(), []
    for name in chosen.methods:
        begin = time.perf_counter()
        card = run(name, CARDS[name], chosen.steps)
        cards.append(card)
        seconds = time.perf_counter() - begin
        print(f"{name:26} keeps {card.kept[-1]:.3f}, {card.inside:.3f} of it inside the drawing, {seconds:.1f} s")
    draw(cards, chosen.out / "methods.png")
    print(f"wrote methods.png to {chosen.out}")


if __name__ == "__main__":
    main()
