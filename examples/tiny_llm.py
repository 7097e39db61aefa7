"""A tiny LLaMA of bytes, trained on Python's own sources, pruned by files with
`prune_llm.py`, and fine-tuned.

    python examples/tiny_llm.py
    python examples/tiny_llm.py --quick
    python examples/tiny_llm.py --levels 0.7 4:8 --methods wanda sparsegpt --tuned wanda

The model and its tokenizer are folders as `save_pretrained` writes them, before pruning
and after, in `out/tiny_llm`, which each run makes anew: what is done to them works for
any model of transformers. Low-rank updates that keep the zeros tune what one method has
pruned. It prints a table of perplexities on modules that were held out, and writes
`out/tiny_llm.png` and `out/tiny_llm.json`, which holds every number. Needs the `llm`
extra.
"""

import argparse
import json
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

import prune_llm
import torch
import transformers
from _options import Kept, at_least, level, make_folder
from _progress import progress
from _tiny_llm_report import draw, findings, table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

import sparsefn as sf

# Modules of the standard library, in all versions of Python that serve.
# fmt: off
TRAIN = [
    "argparse", "ast", "bdb", "calendar", "cmd", "codecs", "configparser", "copy",
    "csv", "dataclasses", "difflib", "doctest", "enum", "fractions", "ftplib",
    "functools", "getopt", "glob", "heapq", "imaplib", "inspect", "mailbox", "netrc",
    "optparse", "pdb", "pickletools", "plistlib", "poplib", "profile", "pstats",
    "queue", "random", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket",
    "socketserver", "statistics", "string", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "timeit", "trace", "traceback", "typing", "uuid",
    "warnings", "wave", "weakref", "zipapp",
]
# fmt: on
HELD = ["fileinput", "gettext", "pickle", "platform"]

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYERS = 4
WINDOW, BATCH = 128, 16  # bytes in a window, windows in a batch
RATE, TUNING_RATE = 4e-3, 8e-3  # peak learning rates
RANK = 8
NAMES = {
    "magnitude": "magnitude",
    "wanda": "Wanda",
    "owl": "OWL",
    "ria": "RIA",
    "sparsegpt": "SparseGPT",
}


# ---- the model -----------------------------------------------------------------------


def sources(names: list[str]) -> list[Path]:
    """The files of some modules of the standard library."""
    return [Path(sysconfig.get_path("stdlib"), f"{name}.py") for name in names]


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token for each byte, as AutoTokenizer reads it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(
        folder
    )


def llama(seed: int) -> nn.Module:
    """The model, untrained."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=256,
        num_hidden_layers=LAYERS,
        max_position_embeddings=WINDOW,
        # so small a model learns a quarter as fast from the usual 0.02
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        **SIZES,
    )
    return transformers.LlamaForCausalLM(config)


def factor(steps: int) -> Any:
    """Of the learning rate: a short rise, then a straight line to zero."""
    rise = max(1, steps // 20)
    return lambda step: min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def train(
    model: nn.Module,
    text: Tensor,
    steps: int,
    rate: float,
    seed: int,
    bar: Any,
    algorithm: sf.Algorithm | None = None,
) -> None:
    """An ordinary loop of torch, in place; with an algorithm, `sf.attach` runs it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=rate, weight_decay=0.0 if algorithm else 0.1, betas=(0.9, 0.98)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor(steps))
    sparse = None if algorithm is None else sf.attach(algorithm, model, optimizer)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        starts = torch.randint(len(text) - WINDOW, (BATCH,), generator=generator)
        window = text[starts[:, None] + torch.arange(WINDOW)]
        model(input_ids=window, labels=window).loss.backward()
        if sparse is not None:
            sparse.before_step()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if sparse is not None:
            sparse.after_step(step)
        bar.update()
    if sparse is not None:
        sparse.detach()
    model.eval()


def tune(
    folder: Path, out: Path, text: Tensor, steps: int, seed: int, bar: Any
) -> None:
    """Train low-rank updates of the matrices in the blocks of a pruned model, and write
    what is merged.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    matrices = {
        path
        for path, p in model.named_parameters()
        if p.ndim == 2 and path.startswith("model.layers.")
    }
    for path, p in model.named_parameters():
        p.requires_grad_(path in matrices)
    algorithm = sf.reparametrised(
        sf.reparam.low_rank(RANK, 2 * RANK),
        where=sorted(matrices),
        key=sf.random.key(seed),
    )
    train(model, text, steps, TUNING_RATE, seed, bar, algorithm)
    model.save_pretrained(out)
    save_tokenizer(out)


# ---- runs ----------------------------------------------------------------------------


def measured(
    folder: Path, dense: Path, held: Tensor, windows: Tensor
) -> dict[str, Any]:
    """The perplexity of a model, its zeros in the blocks, and how far each of its
    matrices moves its outputs.
    """
    model, before = (
        transformers.AutoModelForCausalLM.from_pretrained(at) for at in (folder, dense)
    )
    blocks = [f"model.layers.{i}.*" for i in range(LAYERS)]
    stats = sf.calibration.inputs(before, None, input_ids=windows, paths=blocks)
    errors = sf.report.output_errors(
        *map(sf.modules.params_of, (before, model)), stats, blocks
    )
    found = sum(int((model.get_parameter(path) == 0).sum()) for path in stats)
    total = sum(model.get_parameter(path).numel() for path in stats)
    value = sf.report.perplexity(model, held, WINDOW, stride=WINDOW // 2, chunk_size=64)
    return {
        "perplexity": value,
        "zeros": found,
        "total": total,
        "layers": errors.layers,
        "blocks": errors.blocks,
    }


def run(chosen: argparse.Namespace, bar: Any) -> list[dict[str, Any]]:
    """Train a model, prune it in every way and tune what one method left: a result for
    each folder.
    """
    home = chosen.out / "tiny_llm"
    if home.exists():
        shutil.rmtree(home)
    dense = home / "dense"
    save_tokenizer(dense)
    text = prune_llm.tokens_of(dense, sources(TRAIN))
    held = prune_llm.tokens_of(dense, sources(HELD))[: chosen.held]
    windows = prune_llm.windows_of(text, chosen.windows, WINDOW, chosen.seed)

    results = []

    def add(
        folder: Path, kept: Kept | None, method: str, tuned: bool, seconds: float
    ) -> None:
        about = {
            "level": kept.name if kept else "",
            "method": method,
            "tuned": tuned,
            "seconds": seconds,
        }
        results.append(about | measured(folder, dense, held, windows[:16]))

    begin = time.perf_counter()
    model = llama(chosen.seed)
    train(model, text, chosen.steps, RATE, chosen.seed, bar)
    model.save_pretrained(dense)
    add(dense, None, "dense", False, time.perf_counter() - begin)
    for kept in chosen.levels:
        for name in chosen.methods:
            if name == "owl" and kept.pattern is not None:
                continue  # n:m has one sparsity for all blocks
            bar.set_description(f"{kept.name}, {NAMES[name]}")
            out = home / f"{kept.name.replace(':', '_').replace('%', '')}_{name}"
            done = prune_llm.prune(dense, out, name, kept, windows, BATCH)
            add(out, kept, NAMES[name], False, done.seconds)
            if name == chosen.tuned:
                begin, tuned = time.perf_counter(), out.with_name(f"{out.name}_tuned")
                tune(out, tuned, text, chosen.tune, chosen.seed, bar)
                add(tuned, kept, NAMES[name], True, time.perf_counter() - begin)
    return results


# ---- command line --------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Train a tiny LLaMA, prune it by files and fine-tune it."
    )
    add = parser.add_argument
    add(
        "--steps",
        type=at_least(1),
        help="training steps (default: 400; 24 with --quick)",
    )
    add(
        "--tune",
        type=at_least(1),
        help="steps of tuning (default: 100; 8 with --quick)",
    )
    add(
        "--windows",
        type=at_least(1),
        help="calibration windows (default: 128; 16 with --quick)",
    )
    add(
        "--held",
        type=at_least(2),
        help="bytes held out (default: 65536; 4096 with --quick)",
    )
    add(
        "--quick",
        action="store_true",
        help="few steps and windows, a small part of the held-out text",
    )
    add("--seed", type=int, default=0)
    add(
        "--levels",
        nargs="+",
        type=level,
        default=[level(text) for text in ("0.6", "2:4")],
        help="default: 0.6 2:4",
    )
    add("--methods", nargs="+", choices=NAMES, default=list(NAMES), help="default: all")
    add(
        "--tuned",
        choices=NAMES,
        default="sparsegpt",
        help="what is fine-tuned, too (default: sparsegpt)",
    )
    add(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for tiny_llm and the reports (default: out)",
    )
    chosen = parser.parse_args(argv)
    for name, full, quick in (
        ("steps", 400, 24),
        ("tune", 100, 8),
        ("windows", 128, 16),
        ("held", 65536, 4096),
    ):
        setattr(
            chosen, name, getattr(chosen, name) or (quick if chosen.quick else full)
        )
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train, prune, tune, print and draw."""
    chosen = options()
    transformers.utils.logging.disable_progress_bar()
    tuned = len(chosen.levels) if chosen.tuned in chosen.methods else 0
    with progress(chosen.steps + tuned * chosen.tune, "training") as bar:
        results = run(chosen, bar)
    print(
        "\nPerplexity a byte of modules that were held out, after pruning with "
        f"{chosen.windows} windows\n"
    )
    print(f"{table(results)}\n\n" + "\n".join(findings(results)))
    about = {
        name: getattr(chosen, name)
        for name in ("steps", "tune", "windows", "held", "seed")
    } | {"rank": RANK}
    report = {**about, "results": results, "findings": findings(results)}
    (chosen.out / "tiny_llm.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    draw(results, chosen.out / "tiny_llm.png")
    print(
        "\nwrote tiny_llm.png, tiny_llm.json and the models, in tiny_llm, to "
        f"{chosen.out}"
    )


if __name__ == "__main__":
    main()
