"""A small character-level transformer on the reference text of Python's `help()`,
trained dense and sparse.

    python examples/lm.py
    python examples/lm.py --quick
    python examples/lm.py --steps 1000 --sparsity 0.95 --methods static rigl

The model and the loop are plain torch.nn and torch.optim; `sf.attach` is what makes it
sparse. It prints a table and a sample of each kind of model, and writes `out/lm.png`
and `out/lm.json`, which holds every number. `sf.report.plot` and `plot_masks` draw the
run with RigL, in `out/lm_run.png` and `out/lm_masks.png`. Needs the `demo` extra.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from textwrap import indent
from typing import Any, NamedTuple

import torch
from _lm_report import draw, findings, ranked, table
from _options import at_least, fraction, make_folder
from _progress import progress
from torch import Tensor, nn
from torch.nn import functional

import sparsefn as sf

WIDTH, BLOCKS, HEADS = 128, 3, 4
NARROW = (
    48  # a dense model of this width has as many weights as a sparse one with 90% zeros
)
WINDOW, BATCH = 64, 16  # characters in a window, windows in a batch
HELD = 16_384  # characters held out
RATE, WARMUP = 8e-3, 0.05  # peak learning rate; part of the steps in which it rises
CURVE = 12  # times that the held-out loss is taken
SHOWN = "blocks.0.qkv.weight"  # the matrix whose masks are drawn

# Each is trained in the same loop. A sparsity is the fraction of zeros in the weights
# of the blocks.
METHODS = {
    "dense": "dense",
    "small": "small dense",
    "static": "static",
    "set": "SET",
    "rigl": "RigL",
    "gmp": "GMP",
    "ste": "STE",
    "2:4": "SR-STE 2:4",
}


class Trained(NamedTuple):
    """A model, the state of its algorithm, what was logged, and numbers for the table,
    the figure and the JSON file.
    """

    model: nn.Module
    state: sf.State
    history: list[dict[str, float]]
    result: dict[str, Any]


class Text(NamedTuple):
    """The characters that occur, and the text as indices into them: a part to train on,
    a part held out.
    """

    characters: str
    train: Tensor
    held: Tensor


# ---- text ----------------------------------------------------------------------------


def load(held: int = HELD) -> Text:
    """The texts of `help("topics")`, each paragraph once; the last characters are held
    out.

    Topics repeat each other's paragraphs, so without this many held-out paragraphs
    would also be trained on.
    """
    paragraphs = dict.fromkeys(
        part.strip("\n")
        for name in sorted(topics)
        for part in topics[name].split("\n\n")
    )
    text = "\n\n".join(paragraphs).encode("ascii", "replace").decode()
    characters = "".join(sorted(set(text)))
    index = torch.tensor([characters.index(c) for c in text])
    return Text(characters, index[:-HELD], index[-HELD:][:held])


def batches(train: Tensor, steps: int, seed: int) -> Tensor:
    """Where the windows of every step begin: the same for all methods."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(train) - WINDOW, (steps, BATCH), generator=generator)


# ---- model ---------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to earlier characters, then an MLP; each adds to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, characters, width) to the same."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Characters to logits of the next one."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(characters, width),
            nn.Embedding(WINDOW, width),
        )
        self.blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, index: Tensor) -> Tensor:
        """(batch, characters) to (batch, characters, logits)."""
        x = self.tokens(index) + self.places.weight[: index.shape[1]]
        return self.head(self.norm(self.blocks(x)))


# ---- methods -------------------------------------------------------------------------


def method(name: str, sparsity: float, steps: int, model: nn.Module) -> sf.Algorithm:
    """The algorithm of a name: it masks the weights of the blocks, and leaves
    embeddings, norms and head dense.
    """
    where = sf.modules.weights_of(model, skip=["head"])
    erk = sf.budgets.erk()
    every = max(1, steps // 100)
    stop = 3 * steps // 4 // every * every  # the last quarter trains a fixed mask
    cubic = sf.schedules.polynomial(0.0, sparsity, begin=0, end=stop)
    match name:
        case "static":
            return sf.static(sparsity, distribution=erk, where=where)
        case "set":
            return sf.set(sparsity, steps=steps, distribution=erk, where=where)
        case "rigl":
            return sf.rigl(sparsity, steps=steps, distribution=erk, where=where)
        case "gmp":
            return sf.gmp(
                cubic,
                when=sf.every(every, stop=stop + 1),
                distribution=erk,
                where=where,
            )
        case "ste":
            return sf.ste(sparsity, distribution=erk, where=where)
        case "2:4":
            two_of_four = sf.ste(None, pattern=sf.patterns.nm(2, 4), where=where)
            return sf.with_terms(two_of_four, sf.terms.pruned_decay(2e-4))
        case _:
            return sf.dense()


# ---- training ------------------------------------------------------------------------


def rate(steps: int) -> Callable[[int], float]:
    """The factor of the learning rate: a short rise, then half a cosine wave."""
    rise = max(1, round(WARMUP * steps))
    return lambda step: (
        min(1.0, (step + 1) / rise) * (1 + math.cos(math.pi * step / steps)) / 2
    )


def train(
    name: str, sparsity: float, text: Text, steps: int, seed: int, bar: Any
) -> Trained:
    """Train one model in an ordinary loop of torch."""
    torch.manual_seed(seed)
    model = GPT(len(text.characters), NARROW if name == "small" else WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate(steps))
    sparse = sf.attach(method(name, sparsity, steps, model), model, optimizer)
    marks = {round(steps * (i + 1) / CURVE) for i in range(CURVE)}
    curve, history, seconds = [], [], 0.0
    before = sparse.state
    for step, starts in enumerate(batches(text.train, steps, seed)):
        begin = time.perf_counter()
        window = text.train[starts[:, None] + torch.arange(WINDOW + 1)]
        logits = model(window[:, :-1])
        functional.cross_entropy(
            logits.flatten(0, 1), window[:, 1:].flatten()
        ).backward()
        sparse.before_step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        sparse.after_step(step)
        seconds += time.perf_counter() - begin
        if step + 1 in marks:
            curve.append((step + 1, bits(model, text.held)))
            history.append(
                {
                    "bits a character": curve[-1][1],
                    **sf.report.scalars(sparse.state, before),
                }
            )
            before = sparse.state
        bar.update()
    result = {
        "method": METHODS[name],
        **counted(model, sparse.state),
        "bits": curve[-1][1],
    }
    return Trained(
        model, sparse.state, history, {**result, "seconds": seconds, "curve": curve}
    )


# ---- results -------------------------------------------------------------------------


@torch.no_grad()
def bits(model: nn.Module, held: Tensor) -> float:
    """Bits per held-out character, in windows side by side."""
    windows = held[: (len(held) - 1) // WINDOW * WINDOW + 1].unfold(
        0, WINDOW + 1, WINDOW
    )
    total = 0.0
    for window in windows.split(4 * BATCH):
        logits = model(window[:, :-1])
        total += float(
            functional.cross_entropy(
                logits.flatten(0, 1), window[:, 1:].flatten(), reduction="sum"
            )
        )
    return total / windows[:, 1:].numel() / math.log(2)


def pair_bits(text: Text) -> float:
    """Bits per held-out character by how often each pair of characters occurs: what a
    model without context reaches.
    """
    n = len(text.characters)
    counts = (
        torch.bincount(text.train[:-1] * n + text.train[1:], minlength=n * n).reshape(
            n, n
        )
        + 0.1
    )
    logs = (counts / counts.sum(1, keepdim=True)).log2()
    return -float(logs[text.held[:-1], text.held[1:]].mean())


def counted(model: nn.Module, state: sf.State) -> dict[str, Any]:
    """Weights kept in the blocks and in all, and the share of a matrix that its fullest
    tenth of rows holds.
    """
    where = sf.modules.weights_of(model, skip=["head"])
    summary = sf.report.summary(state)
    rows = [row for row in summary.rows if where(row.path, state.params[row.path])]
    mask = state.masks[SHOWN]
    units = mask.sum(1).sort(descending=True).values if mask.ndim else None
    return {
        "kept": sum(row.kept for row in rows),
        "total": sum(row.total for row in rows),
        "all_kept": summary.total.kept,
        "fullest": None
        if units is None
        else float(units[: len(units) // 10].sum() / units.sum()),
    }


@torch.no_grad()
def sample(
    model: nn.Module, characters: str, prompt: str, length: int, seed: int
) -> str:
    """Go on from a prompt, character by character."""
    generator = torch.Generator().manual_seed(seed)
    index = [characters.index(c) for c in prompt]
    for _ in range(length):
        logits = model(torch.tensor([index[-WINDOW:]]))[0, -1]
        index.append(
            int(torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator))
        )
    return "".join(characters[i] for i in index)


# ---- command line --------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Train a small character-level transformer, dense and sparse."
    )
    add = parser.add_argument
    add(
        "--steps",
        type=at_least(CURVE),
        help="training steps (default: 400; 24 with --quick)",
    )
    add(
        "--quick",
        action="store_true",
        help="few steps, and a small part of the held-out text",
    )
    add(
        "--sparsity",
        type=fraction,
        default=0.9,
        help="fraction of zeros in the blocks (default: 0.9)",
    )
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="default: all; dense is always trained",
    )
    add(
        "--seed",
        type=at_least(0),
        default=0,
        help="of weights and batches (default: 0)",
    )
    add(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for lm.png and lm.json (default: out)",
    )
    chosen = parser.parse_args(argv)
    chosen.steps = chosen.steps or (24 if chosen.quick else 400)
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train, measure, print and draw."""
    chosen = options()
    text = load(HELD // 8 if chosen.quick else HELD)
    names = [name for name in METHODS if name == "dense" or name in chosen.methods]
    trained = {}
    with progress(len(names) * chosen.steps, "dense") as bar:
        for name in names:
            bar.set_description(METHODS[name])
            trained[METHODS[name]] = train(
                name, chosen.sparsity, text, chosen.steps, chosen.seed, bar
            )
    results = [one.result for one in trained.values()]
    pairs = pair_bits(text)

    print(
        f"\nBits per held-out character after {chosen.steps} steps of {BATCH} windows "
        f"of {WINDOW} characters"
    )
    print(f"(a table of character pairs: {pairs:.3f})\n\n{table(results)}\n")
    print("\n".join(findings(results)))
    for name in ["dense", *(r["method"] for r in ranked(results)[:1])]:
        written = sample(trained[name].model, text.characters, "The ", 300, chosen.seed)
        print(f"\n{name} writes:\n{indent(written, '    | ', lambda line: True)}")

    about = {
        "steps": chosen.steps,
        "sparsity": chosen.sparsity,
        "seed": chosen.seed,
        "pair_bits": pairs,
    }
    report = {
        **about,
        "characters": [len(text.train), len(text.held)],
        "results": results,
    }
    (chosen.out / "lm.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    masks = {
        r["method"]: trained[r["method"]].state.masks[SHOWN].numpy()
        for r in ranked(results)
    }
    draw(report, masks, chosen.out / "lm.png")
    watched = trained["RigL"] if "RigL" in trained else trained[results[-1]["method"]]
    steps = [step for step, _ in watched.result["curve"]]
    sf.report.plot(watched.history, steps).savefig(chosen.out / "lm_run.png")
    sf.report.plot_masks(watched.state).savefig(chosen.out / "lm_masks.png")
    print(
        "\nwrote lm.png, lm.json, lm_run.png and lm_masks.png (of "
        f"{watched.result['method']}) to {chosen.out}"
    )


if __name__ == "__main__":
    main()
