"""The whole story of a smaller model: a LLaMA is trained on Python's own sources, made
smaller in four ways at equal FLOPs, recovered, written to files, and measured in three
runtimes.

    python examples/story.py
    python examples/story.py --quick
    python examples/story.py --steps 300 --recover 60

Each stage leaves its files in `out/story`. A run that was killed goes on where it was:
a stage whose files are there, made with the same options, is not run again. The page
is `out/story.md`, and its figure `out/story.png`; of `--quick` they are in `out/quick`.
Needs the extras `llm` and `recipes`.
"""

import argparse
import contextlib
import copy
import io
import json
import logging
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import transformers
from _options import at_least, make_folder
from _progress import progress
from _story_model import (
    Plan,
    Text,
    bits,
    by_counts,
    llama,
    logits_of,
    read,
    train,
    windows_of,
    write,
)
from _story_report import draw, page, table
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

import sparsefn as sf

FULL = Plan(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=1024,
    window=128,
    batch=8,
    steps=600,
    recover=60,
    windows=64,
    repeats=30,
    modules=1000,
    characters=10_000_000,
)
QUICK = FULL._replace(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    vocab_size=512,
    window=32,
    steps=12,
    recover=4,
    windows=8,
    repeats=3,
    modules=6,
    characters=4096,
)
RATE, RECOVERY_RATE = 3e-3, 1e-3  # peak learning rates
PROGRAM, ONNX = "model.pt2", "model.onnx"
WAYS = ("width", "depth", "width + depth", "2:4")

Found = dict[str, Any]


# ---- stages --------------------------------------------------------------------------


def stage(file: Path, about: Found, make: Callable[[], Found]) -> Found:
    """What a stage left in a file, or else what it makes and leaves there now."""
    if file.exists():
        try:
            # written by this script: it holds modules
            found = torch.load(file, weights_only=False)
        except Exception as error:  # torch has many for a damaged file
            raise ValueError(f"{file} is damaged: delete it, and run again") from error
        if found["about"] == about:
            print(f"{file.stem}: is there")
            return found
    begin = time.process_time()
    result = make()
    seconds = time.process_time() - begin + result.pop("seconds before", 0.0)
    made = {"about": about, "seconds": seconds, **result}
    write(file, made)
    print(f"{file.stem}: {made['seconds']:.0f} s of one core", flush=True)
    return made


def slug(way: str) -> str:
    """The name of a way in the names of files."""
    return way.replace(" + ", "_").replace(":", "_")


def example(plan: Plan) -> dict[str, Any]:
    """What one call gets: one window. A cache among the outputs cannot be traced."""
    ids = torch.arange(plan.window)[None] % plan.vocab_size
    return {"input_ids": ids, "use_cache": False}


# ---- smaller models ------------------------------------------------------------------


def unit_values(
    model: nn.Module, pattern: sf.patterns.Pattern, ids: Tensor, chunk: int
) -> dict[str, Tensor]:
    """What the units of each set are worth: the sum of |weight * gradient| over their
    weights.
    """
    params = sf.modules.params_of(model)
    grads = {path: torch.zeros_like(p) for path, p in params.items()}

    for part in ids.split(chunk):

        def loss(params: Any, part: Tensor = part) -> Tensor:
            return sf.modules.call(
                model, params, input_ids=part, labels=part, use_cache=False
            ).loss

        _, found = sf.modules.value_and_grad(loss)(params)
        grads = {path: grads[path] + found[path] for path in grads}
    score = sf.scores.by_unit(sf.scores.saliency, pattern, lambda x: x.sum(-1))
    dense = sf.one_shot(0.0, pattern=pattern).init(params)
    return score(dense, grads, 0)


def without_units(model: nn.Module, way: str, ids: Tensor, plan: Plan) -> Found:
    """A model with as many FLOPs as half of its layers leave: narrower, shallower, or
    both.
    """
    x = example(plan)
    groups = None
    if way != "depth":
        groups = sf.shrinking.groups(model, x)
    layers = sf.shrinking.layers(model, x, by="module", widths=groups)
    limit = layers.cost(range(len(layers) // 2), "flops")
    params = sf.modules.params_of(model)

    if way == "width":
        units = groups
        # a config has one inner width and one number of heads for all layers, and
        # LlamaConfig wants heads that divide the hidden size
        alike = {"*.mlp.*": 8, "*.self_attn.*": 2}
        budget = sf.budgets.in_multiples(
            sf.budgets.within(limit, groups, "flops"), alike, equal_across=list(alike)
        )
    else:
        units = layers
        budget = sf.budgets.within(limit, layers, "flops")

    pattern = units.pattern()
    values = unit_values(model, pattern, ids, plan.batch)
    if way != "width":
        # of a layer we can afford to try what the model does without it
        def loss(params: Any) -> Tensor:
            with torch.no_grad():
                return sf.modules.call(
                    model, params, input_ids=ids, labels=ids, use_cache=False
                ).loss

        # the set of layers is the last one of the pattern
        values[list(values)[-1]] = sf.shrinking.loss_without(layers, params, loss)
    score = sf.scores.of_units(values, pattern)
    prune = sf.one_shot(1.0, score, pattern=pattern, distribution=budget, where="*")
    state = prune.update(prune.init(params), params, 0)
    made = sf.shrinking.smaller(model, state, x, groups=units)
    return {"model": made.module, "masks": None}


def two_of_four(model: nn.Module, ids: Tensor, plan: Plan) -> Found:
    """2 of each 4 weights of every matrix in the blocks stay, by SparseGPT."""
    blocks = [f"model.layers.{i}.*" for i in range(plan.num_hidden_layers)]
    state = sf.calibration.in_order(
        model,
        None,
        blocks,
        lambda stats: sf.methods.sparsegpt(None, stats, pattern=sf.patterns.nm(2, 4)),
        {"input_ids": ids},
        chunk_size=plan.batch,
    )
    return {"model": sf.modules.bake(model, state), "masks": dict(state.masks)}


def size_of(found: Found, plan: Plan) -> Found:
    """FLOPs of a call on one window, of which a product with zeros counts the rest
    alone, and the parameters that are not zero.
    """
    model, masks = found["model"], found["masks"]
    state = sf.dense().init(sf.modules.params_of(model))
    zeros = 0
    if masks is not None:
        state = state._replace(masks=masks)
        zeros = sum(int((~mask).sum()) for mask in masks.values())
    return {
        "flops": int(sf.report.flops(model, state, **example(plan)).total.sparse),
        "params": sum(p.numel() for p in model.parameters()) - zeros,
    }


def recovered(
    dense: nn.Module, found: Found, text: Text, plan: Plan, bar: Any
) -> Found:
    """The smaller model after it learned from the answers of the dense one."""
    model, teacher, student = (
        found["model"],
        logits_of(dense),
        logits_of(found["model"]),
    )

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            answers = teacher(ids)
        return sf.recovery.kl(student(ids), answers)

    train(
        model,
        loss,
        text,
        plan,
        plan.recover,
        RECOVERY_RATE,
        bar,
        masks=found["masks"],
    )
    if found["masks"] is not None:
        for path, mask in found["masks"].items():
            assert not (model.get_parameter(path) * ~mask).any()
    return {"model": model}


# ---- files and times -----------------------------------------------------------------


class Logits(nn.Module):
    """Tensors in, tensors out, as files of programs have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def fits_config(model: nn.Module) -> bool:
    """Whether transformers builds a model of these shapes from its config."""
    try:
        model.config.validate()
    except (ValueError, StrictDataclassError):
        return False  # such as heads that do not divide the hidden size
    with torch.device("meta"):
        plain = type(model)(model.config)
    shapes = {path: p.shape for path, p in model.named_parameters()}
    return shapes == {path: p.shape for path, p in plain.named_parameters()}


def files_of(model: nn.Module, tokenizer: Path, home: Path, plan: Plan) -> Found:
    """A folder with a program, a model for ONNX Runtime and, where its config can hold
    it, what transformers loads.
    """
    part = home.with_name(home.name + ".part")
    for old in (part, home):
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir()
    ids = example(plan)["input_ids"]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters', about themselves
        program = torch.export.export(Logits(model), (ids,), strict=False)
        torch.export.save(program, part / PROGRAM)
        with contextlib.redirect_stdout(io.StringIO()):
            torch.onnx.export(
                program,
                (),
                part / ONNX,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    holds = fits_config(model)
    if holds:
        model.save_pretrained(part)
        transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(part)
    part.replace(home)
    return {"loads": holds, "bytes": (home / ONNX).stat().st_size}


def runtimes(model: nn.Module, home: Path, ids: Tensor) -> dict[str, Any]:
    """A call in each runtime, the last two from files."""
    program = torch.export.load(home / PROGRAM).module()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(home / ONNX, options)
    feed = {session.get_inputs()[0].name: ids.numpy()}
    logits = logits_of(model)
    return {
        "PyTorch": lambda: logits(ids),
        "torch.export": lambda: program(ids),
        "ONNX Runtime": lambda: torch.from_numpy(session.run(None, feed)[0]),
    }


@torch.no_grad()
def measured(models: dict[str, nn.Module], folder: Path, plan: Plan) -> Found:
    """Milliseconds of processor time of a call on one window, with one thread: the
    medians of rounds in which each model runs in each runtime.
    """
    ids = example(plan)["input_ids"]
    calls = {}
    for way, model in models.items():
        home = folder / slug(way)
        found = runtimes(model, home, ids)
        wanted = found["PyTorch"]()
        if (home / "config.json").exists():
            again = transformers.AutoModelForCausalLM.from_pretrained(home)
            found["folder"] = lambda logits=logits_of(again.eval()): logits(ids)
        for name, call in found.items():
            near = 1e-4 * float(wanted.abs().max())
            torch.testing.assert_close(
                call(), wanted, rtol=0, atol=near, msg=f"{way} in {name}"
            )
        found.pop("folder", None)
        calls |= {(way, name): call for name, call in found.items()}

    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(plan.repeats):
        for key, call in calls.items():
            begin = time.process_time()
            call()
            times[key].append(1000 * (time.process_time() - begin))
    found = {}
    for (way, name), some in times.items():
        found.setdefault(way, {})[name] = statistics.median(some)
    return {"ms": found}


# ---- the story -----------------------------------------------------------------------


def run(plan: Plan, folder: Path) -> Found:
    """All stages in turn: numbers for each model, and for the whole."""
    text = read(plan, folder / "tokenizer")
    counts = by_counts(text, plan)
    trained_as = plan._asdict() | {"crc": text.crc, "rate": RATE}
    for name in ("recover", "windows", "repeats"):
        del trained_as[name]

    def scored(found: Found) -> Found:
        return found | {"bits": bits(logits_of(found["model"]), text, plan)}

    def trained() -> Found:
        model = llama(plan)
        checkpoint = folder / "dense.checkpoint"
        with progress(plan.steps, "training") as bar:
            before = train(
                model,
                lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss,
                text,
                plan,
                plan.steps,
                RATE,
                bar,
                checkpoint=checkpoint,
                about=trained_as,
            )
        return scored({"model": model, "masks": None, "seconds before": before})

    dense = stage(folder / "dense.pt", trained_as, trained)
    (folder / "dense.checkpoint").unlink(missing_ok=True)
    model = dense["model"].eval()
    ids = windows_of(text.train, plan.windows, plan.window, -1 - plan.seed)
    pruned_as = trained_as | {"windows": plan.windows}
    recovered_as = pruned_as | {"recover": plan.recover, "rate 2": RECOVERY_RATE}

    def pruned(way: str) -> Found:
        if way == "2:4":
            return scored(two_of_four(model, ids, plan))
        return scored(without_units(model, way, ids, plan))

    def results(found: Found, before: Found) -> Found:
        losses = {"pruned": before["bits"], "bits": found["bits"]}
        return size_of(before, plan) | losses

    models = {"dense": model}
    seconds = {
        "training": dense["seconds"],
        "pruning": 0.0,
        "recovery": 0.0,
        "files": 0.0,
    }
    rows: dict[str, Found] = {"dense": results(dense, dense)}
    for way in WAYS:
        before = stage(
            folder / f"{slug(way)}_pruned.pt", pruned_as, lambda way=way: pruned(way)
        )

        def more(before: Found = before, way: str = way) -> Found:
            with progress(plan.recover, f"recovery, {way}") as bar:
                learned = recovered(model, copy.deepcopy(before), text, plan, bar)
            return scored(learned)

        after = stage(folder / f"{slug(way)}_recovered.pt", recovered_as, more)
        models[way] = after["model"].eval()
        rows[way] = results(after, before)
        seconds["pruning"] += before["seconds"]
        seconds["recovery"] += after["seconds"]

    for way, one in models.items():
        home = folder / slug(way)
        file = folder / f"{slug(way)}_files.pt"
        if not home.exists():  # somebody deleted what the stage left
            file.unlink(missing_ok=True)
        made = stage(
            file,
            recovered_as,
            lambda one=one, home=home: files_of(one, folder / "tokenizer", home, plan),
        )
        rows[way] |= {"loads": made["loads"], "bytes": made["bytes"]}
        seconds["files"] += made["seconds"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = stage(
        folder / "measured.pt",
        recovered_as | {"repeats": plan.repeats},
        lambda: measured(models, folder, plan),
    )
    torch.set_num_threads(threads)
    for way, row in rows.items():
        row["ms"] = times["ms"][way]
    seconds["measuring"] = times["seconds"]
    tokens = plan.steps * plan.batch * plan.window
    return {
        "plan": plan._asdict(),
        "counts": counts,
        "rows": rows,
        "seconds": seconds,
        "tokens": tokens,
    }


# ---- command line --------------------------------------------------------------------


def options(argv: list[str] | None = None) -> tuple[Plan, Path]:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Train a small LLaMA, make it smaller in four ways, and measure it."
    )
    add = parser.add_argument
    for name, what in (
        ("steps", "training steps"),
        ("recover", "steps of recovery of each smaller model"),
    ):
        full, quick = getattr(FULL, name), getattr(QUICK, name)
        add(
            f"--{name}",
            type=at_least(1),
            help=f"{what} (default: {full}; {quick} with --quick)",
        )
    add("--quick", action="store_true", help="a tiny model, few steps: seconds")
    add("--seed", type=int, default=0)
    add(
        "--out",
        type=Path,
        help="folder for story, and the page and figure in it (default: out; out/quick "
        "with --quick)",
    )
    chosen = parser.parse_args(argv)
    if chosen.out is None:
        chosen.out = Path("out/quick" if chosen.quick else "out")
    make_folder(parser, chosen.out)
    plan = (QUICK if chosen.quick else FULL)._replace(seed=chosen.seed)
    for name in ("steps", "recover"):
        if getattr(chosen, name):
            plan = plan._replace(**{name: getattr(chosen, name)})
    return plan, chosen.out


def main() -> None:
    """Run what is missing, print, draw, and write the page."""
    plan, out = options()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    folder = out / "story"
    folder.mkdir(exist_ok=True)
    report = run(plan, folder)
    print(f"\n{table(report)}\n")
    text = json.dumps(report, indent=1) + "\n"
    (out / "story.json").write_text(text, encoding="utf-8")
    (out / "story.md").write_text(page(report), encoding="utf-8")
    draw(report, out / "story.png")
    print(f"wrote story.md, story.png, story.json and the files of story to {out}")


if __name__ == "__main__":
    main()
