r"""Prunes a language model of transformers, from its folder to a new folder, with one
of its layers in memory at a time.

    python examples/prune_llm.py FOLDER --method wanda --sparsity 0.5 \
        --text calibration.txt --out PRUNED
    python examples/prune_llm.py FOLDER --method sparsegpt --sparsity 2:4 \
        --text *.txt --out PRUNED --eval held.txt
    python examples/prune_llm.py FOLDER --layers 0.25 --score influence \
        --text calibration.txt --out SHORTER --eval held.txt

FOLDER is what `save_pretrained` writes, with a tokenizer; PRUNED is one, too, and
`from_pretrained` loads it. A run that was killed goes on at the layer where it was, if
it is started again in the same way. It prints how far the outputs of each block moved,
and with `--eval` the perplexity of a text before and after, for which the whole model
is loaded.

Weights compete inside of their output with wanda and owl, inside of their tensor with
the others. owl prunes as wanda, less where a block has more outliers, for which it
loads the whole model once. magnitude reads no text; the errors of the blocks do.

With `--layers` that fraction of whole layers goes first: those that change the hidden
states least, one by one (influence) or as one span (angular). With `--method` or
`--sparsity` too, what is left is pruned; until that is done, the model without the
layers is in PRUNED.layers. dropped_layers.json in the new folder says which layers
went. Needs transformers and safetensors.
"""

import argparse
import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from _options import Kept, at_least, fraction, level
from _tables import aligned
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import sparsefn as sf

METHODS = ("wanda", "sparsegpt", "ria", "owl", "magnitude")
SCORES = ("influence", "angular")
Stats = Mapping[str, Mapping[str, Tensor]]
DROPPED = "dropped_layers.json"  # in the new folder: which layers went, and why
LONGEST = 2048  # tokens in a window, where the model takes as many


class Pruned(NamedTuple):
    """What a run gave: the error of each block's outputs, and the seconds that it
    took.
    """

    errors: dict[str, float | None]
    seconds: float


# ---- text ----------------------------------------------------------------------------


def tokens_of(folder: Path, files: Sequence[Path]) -> Tensor:
    """The tokens of some texts, one after the other, by the tokenizer in a model's
    folder.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"expected a tokenizer beside the model in {str(folder)!r}, but: {error}"
        ) from None
    found: list[int] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"expected {str(file)!r} in UTF-8, but: {error}") from None
        found += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(found, dtype=torch.int64)


def windows_of(tokens: Tensor, count: int, length: int, seed: int = 0) -> Tensor:
    """So many windows of a text, drawn from those that lie end to end: (count,
    length).
    """
    whole = len(tokens) // length
    if whole < count:
        raise ValueError(
            f"expected a text of {count} windows of {length} tokens, got "
            f"{len(tokens):,} tokens, which are {whole}: give more text, or fewer or "
            "shorter windows (--windows, --length)"
        )
    chosen = (
        torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:count]
        .sort()
        .values
    )
    return tokens[: whole * length].reshape(whole, length)[chosen]


def window_length(folder: Path, asked: int | None) -> int:
    """The tokens of a window: as many as were asked for, or as the model takes."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    most = getattr(config, "max_position_embeddings", None)
    if asked and most and asked > most:
        raise ValueError(f"--length: the model takes {most} tokens, got {asked}")
    return asked or min(LONGEST, most or LONGEST)


def check_kept(folder: Path, globs: Sequence[str]) -> None:
    """Raise ValueError for a glob that no weight of the model matches; it is made
    without values.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, local_files_only=True)
        )
    names = [name for name, _ in model.named_parameters()]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(
                f"--keep: no weight matches {glob!r}; they are such as "
                f"{names[len(names) // 2]!r}"
            )


# ---- methods -------------------------------------------------------------------------


def pruner(
    method: str,
    kept: Kept,
    ratios: Callable[[], dict[str, float]],
    keep: Sequence[str] = (),
) -> Callable[[Stats], sf.Algorithm]:
    """The function that `sf.calibration.stream` gets: from the statistics of a block to
    the algorithm that prunes it.

    `ratios` gives the share of outliers of each block, for owl.
    """

    def prune(stats: Stats) -> sf.Algorithm:
        chosen = {
            path: of
            for path, of in stats.items()
            if not any(fnmatchcase(path, glob) for glob in keep)
        }
        if not chosen:
            return sf.dense()
        # which solves matrices of outputs by inputs, however they are stored
        if method == "sparsegpt":
            return sf.methods.sparsegpt(
                kept.sparsity, stats, pattern=kept.pattern, where=list(chosen)
            )
        parts: dict[tuple[bool, bool], list[str]] = {}
        for path, of in chosen.items():
            # stored as (inputs, outputs)
            turned = of["square"].ndim == of["count"].ndim + 2
            experts = of["count"].ndim == 1  # in one tensor, along its first axis
            parts.setdefault((turned, experts), []).append(path)
        return sf.partition(
            [(paths, masked(stats, paths, *kind)) for kind, paths in parts.items()]
        )

    def masked(
        stats: Stats, paths: list[str], turned: bool, experts: bool
    ) -> sf.Algorithm:
        options: dict[str, Any] = {"where": paths}
        if kept.pattern is not None:
            options["pattern"] = sf.patterns.nm(
                *map(int, kept.name.split(":")), axis=-2 if turned else -1
            )
        elif method in ("wanda", "owl"):
            outputs = (0, 2 if turned else 1) if experts else int(turned)
            options["pattern"] = sf.patterns.row_balanced(axis=outputs)
        if method == "owl":
            options["distribution"] = sf.budgets.owl(ratios())
        score = {
            "ria": sf.scores.ria,
            "magnitude": lambda stats: sf.scores.magnitude,
        }.get(method, sf.scores.wanda)
        return sf.one_shot(kept.sparsity, score(stats), **options)

    return prune


def outliers(folder: Path, windows: Tensor, size: int) -> dict[str, float]:
    """The share of outliers of each block of a model, which is loaded as a whole."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    dense = sf.dense().init(sf.modules.params_of(model))
    blocks = [
        f"{path}.{i}.*"
        for path, part in model.named_modules()
        for i in range(len(layers(part)))
    ]
    stats: Any = {}
    for batch in windows.split(size):
        new = sf.calibration.inputs(
            model, dense, input_ids=batch, paths=blocks, of="square"
        )
        stats = (
            {p: {k: x + new[p][k] for k, x in of.items()} for p, of in stats.items()}
            if stats
            else new
        )
    return sf.calibration.outlier_ratios(dense, stats, blocks)


def layers(part: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """The members of a list of layers, each of which is made of other modules."""
    whole = isinstance(part, torch.nn.ModuleList) and all(
        any(one.children()) for one in part
    )
    return list(part) if whole else []


def prune(
    folder: Path,
    out: Path,
    method: str,
    kept: Kept,
    windows: Tensor,
    size: int = 1,
    keep: Sequence[str] = (),
) -> Pruned:
    """Prune the model in a folder with windows of text, `size` at a time, and write it
    to a new folder.
    """
    begin = time.perf_counter()
    ratios = functools.cache(lambda: outliers(folder, windows, size))
    errors = sf.calibration.stream(
        folder,
        pruner(method, kept, ratios, keep),
        [{"input_ids": batch} for batch in windows.split(size)],
        out,
        of=("count", "square", "gram") if method == "sparsegpt" else "square",
    )
    return Pruned(errors, time.perf_counter() - begin)


def shorten(
    folder: Path,
    out: Path,
    share: float,
    score: str,
    windows: Tensor,
    size: int = 1,
) -> dict[str, Any]:
    """Write the model in a folder without some of its layers to a new folder: what was
    measured of the layers, and which of them went.

    A folder that the same call has finished is taken as it is.
    """
    about = {
        "folder": str(folder.resolve()),
        "share": share,
        "score": score,
        "windows": hashlib.sha256(windows.numpy().tobytes()).hexdigest(),
    }
    note = out / DROPPED
    if note.exists():
        before: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
        if before["about"] == about:
            return before
    batches = [{"input_ids": batch} for batch in windows.split(size)]
    scores = sf.calibration.layer_scores(folder, batches)
    dropped = scores.lowest(share, score)
    if not dropped:
        raise ValueError(
            f"--layers: {share:g} of {len(scores.layers)} layers are none: give a "
            "larger fraction"
        )
    sf.calibration.drop_layers(folder, dropped, out)
    found = {
        "about": about,
        "layers": list(scores.layers),
        "influence": scores.influence.tolist(),
        "angular": scores.angles.diagonal().tolist(),
        "dropped": dropped,
    }
    note.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def check_new(out: Path) -> None:
    """Raise ValueError where a folder is a whole model already."""
    if (out / "model.safetensors.index.json").exists() and not (
        out / ".stream"
    ).exists():
        raise ValueError(
            f"expected {str(out)!r} to be new or a run that was killed, got a model"
        )


def layer_table(found: Mapping[str, Any]) -> str:
    """What was measured of the layers, and which of them went."""
    rows = []
    for i, path in enumerate(found["layers"]):
        numbers = [f"{found[score][i]:.4f}" for score in ("influence", "angular")]
        rows.append((path, *numbers, "dropped" if path in found["dropped"] else ""))
    return aligned(("layer", "influence", "angular", ""), rows, left=1)


def perplexity(folder: Path, tokens: Tensor, length: int, size: int = 1) -> float:
    """The perplexity of a text by the model in a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return sf.report.perplexity(model, tokens, length, chunk_size=size)


def zeros(folder: Path) -> tuple[int, int]:
    """Of all matrices in the files of a folder, the entries that are zero, and all."""
    none = total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as inside:
            for name in inside.keys():  # noqa: SIM118
                x = inside.get_tensor(name)
                if x.ndim > 1:
                    none, total = none + int((x == 0).sum()), total + x.numel()
    return none, total


# ---- command line --------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Prune a language model of transformers, from a folder to a folder."
    )
    add = parser.add_argument
    add("folder", type=Path, help="what save_pretrained wrote, with a tokenizer")
    add(
        "--layers",
        type=fraction,
        metavar="FRACTION",
        help="of whole layers, which go first (default: none)",
    )
    add(
        "--score",
        choices=SCORES,
        help="which layers go: those of the lowest block influence, or the span with "
        "the smallest angular distance (default: influence)",
    )
    add("--method", choices=METHODS, help="default: wanda, or none with --layers alone")
    add(
        "--sparsity",
        type=level,
        help="fraction of zeros, or n:m: n of each m stay (default: 0.5, or none with "
        "--layers alone)",
    )
    add(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="to calibrate with, in UTF-8",
    )
    add("--out", type=Path, required=True, help="the new folder")
    add(
        "--eval",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text whose perplexity is taken before and after",
    )
    add(
        "--windows",
        type=at_least(1),
        default=128,
        help="of the text, to calibrate with (default: 128)",
    )
    add(
        "--length",
        type=at_least(2),
        help=f"tokens in a window (default: what the model takes, {LONGEST} at most)",
    )
    add(
        "--batch",
        type=at_least(1),
        default=1,
        help="windows in memory at a time (default: 1)",
    )
    add(
        "--keep",
        nargs="+",
        default=[],
        metavar="GLOB",
        help="weights that stay dense, as '*.gate.weight' of routers",
    )
    add("--seed", type=int, default=0, help="which windows are drawn (default: 0)")
    chosen = parser.parse_args(argv)
    if chosen.score and not chosen.layers:
        parser.error("argument --score: expected --layers, the fraction of layers")
    chosen.prunes = bool(chosen.method or chosen.sparsity or not chosen.layers)
    chosen.score = chosen.score or "influence"
    chosen.method = chosen.method or "wanda"
    chosen.sparsity = chosen.sparsity or level("0.5")
    if chosen.keep and not chosen.prunes:
        parser.error("argument --keep: expected --method or --sparsity with --layers")
    if chosen.method == "owl" and chosen.sparsity.pattern is not None:
        parser.error(
            "argument --sparsity: owl spreads a fraction of zeros over blocks, and "
            "n:m has one for all"
        )
    if not (chosen.folder / "config.json").exists():
        parser.error(
            "argument folder: expected the folder of a model, with config.json, at "
            f"{str(chosen.folder)!r}"
        )
    chosen.error = parser.error
    return chosen


def run(chosen: argparse.Namespace) -> None:
    """Prune and print."""
    length = window_length(chosen.folder, chosen.length)
    check_kept(chosen.folder, chosen.keep)
    windows = windows_of(
        tokens_of(chosen.folder, chosen.text), chosen.windows, length, chosen.seed
    )
    held = tokens_of(chosen.folder, chosen.eval) if chosen.eval else None
    if held is not None and len(held) < 2:
        raise ValueError(
            f"--eval: expected a text of two tokens or more, got {len(held)}"
        )
    folders = {"before": chosen.folder}
    whole = chosen.folder
    if chosen.layers:
        whole = chosen.out
        if chosen.prunes:
            check_new(chosen.out)
            whole = chosen.out.with_name(f"{chosen.out.name}.layers")
        found = shorten(
            chosen.folder, whole, chosen.layers, chosen.score, windows, chosen.batch
        )
        gone = len(found["dropped"])
        print(f"{layer_table(found)}\n\n{gone} of {len(found['layers'])} layers went\n")
        folders["without these layers"] = whole
    if chosen.prunes:
        folders["after"] = chosen.out
        pruned(chosen, whole, windows)
    print(f"wrote {chosen.out}")
    if held is not None:
        values = [
            f"{perplexity(at, held, length, chosen.batch):.3f} {when}"
            for when, at in folders.items()
        ]
        print(f"perplexity of {len(held):,} tokens: {', '.join(values)}")
    if chosen.layers and chosen.prunes:
        shutil.rmtree(whole)


def pruned(chosen: argparse.Namespace, folder: Path, windows: Tensor) -> None:
    """Prune the model in a folder and print how far its blocks moved."""
    done = prune(
        folder,
        chosen.out,
        chosen.method,
        chosen.sparsity,
        windows,
        chosen.batch,
        chosen.keep,
    )
    rows = [
        (block, "" if error is None else f"{error:.4f}")
        for block, error in done.errors.items()
    ]
    print(aligned(("block", "change of its outputs"), rows, left=1))
    none, total = zeros(chosen.out)
    print(
        f"\n{none:,} of {total:,} entries of matrices, embeddings included, are zero; "
        f"{done.seconds:.1f} seconds"
    )


def main() -> None:
    """Run the command line; what is wrong with files and options is told without a
    traceback.
    """
    chosen = options()
    transformers.utils.logging.disable_progress_bar()
    try:
        run(chosen)
    except (ValueError, OSError) as error:
        chosen.error(str(error))


if __name__ == "__main__":
    main()
