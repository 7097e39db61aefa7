"""The example that prunes a language model's folder, and the one that makes a tiny
model to try it on.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from posttraining.calibration import tiny_lms
from safetensors.torch import load_file

import sparsefn as sf

pytestmark = pytest.mark.deep

transformers.utils.logging.disable_progress_bar()
EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("tiny_llm")
    for name, value in {"SIZES": SIZES, "LAYERS": 2, "WINDOW": 16}.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.fixture
def example(tiny: ModuleType) -> ModuleType:
    return importlib.import_module("prune_llm")


@pytest.fixture
def folder(tiny: ModuleType, tmp_path: Path) -> Path:
    """A model with a tokenizer, and beside it a text."""
    (tmp_path / "text.txt").write_text(
        "The quick brown fox, naïve and lazy.\n" * 40, encoding="utf-8"
    )
    tiny.llama(0).save_pretrained(tmp_path / "dense")
    tiny.save_tokenizer(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def called(example: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command line, which gets what the fixture made unless told otherwise."""

    def call(
        *more: str, at: Path = folder, text: Path = folder.parent / "text.txt"
    ) -> None:
        out = folder.parent / "out"
        given = [
            str(at),
            "--text",
            str(text),
            "--out",
            str(out),
            "--windows=8",
            "--length=16",
            "--batch=4",
            *more,
        ]
        monkeypatch.setattr(sys, "argv", ["prune_llm.py", *given])
        example.main()

    return call


def matrices(folder: Path) -> dict[str, torch.Tensor]:
    """The matrices in the layers of a saved model, by name."""
    found = {
        name: x
        for file in folder.glob("*.safetensors")
        for name, x in load_file(file).items()
    }
    return {name: x for name, x in found.items() if x.ndim > 1 and ".layers." in name}


@pytest.mark.parametrize("level", ["0.5", "2:4", "4:8"])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "ria", "magnitude"])
def test_half_of_every_matrix_is_zero(
    called: Any,
    folder: Path,
    method: str,
    level: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    called(
        f"--method={method}",
        f"--sparsity={level}",
        "--eval",
        str(folder.parent / "text.txt"),
    )
    out, before = folder.parent / "out", matrices(folder)
    new = matrices(out)
    assert len(new) == 2 * 7
    for name, x in new.items():
        kept = x != 0
        assert 2 * int(kept.sum()) == x.numel()
        if method == "wanda":
            assert (2 * kept.sum(1) == x.shape[1]).all()
        if ":" in level:
            n, m = map(int, level.split(":"))
            assert (kept.unflatten(1, (-1, m)).sum(-1) == n).all()
        assert torch.equal(x[kept], before[name][kept]) == (method != "sparsegpt")
    printed = capsys.readouterr().out
    zeros = sum(x.numel() for x in new.values()) // 2
    assert f"\n{zeros:,} of {2 * zeros + 2 * 256 * 32:,} entries of matrices" in printed
    assert "\nmodel.layers.1.*" in printed and " before, " in printed
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = transformers.AutoTokenizer.from_pretrained(out)(
        "naïve", return_tensors="pt"
    )["input_ids"]
    assert loaded(tokens).logits.shape == (1, 6, 256)


def test_owl_keeps_more_where_there_are_more_outliers(
    called: Any, example: ModuleType, folder: Path
) -> None:
    tokens = example.tokens_of(folder, [folder.parent / "text.txt"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[:, :3] *= 30
    model.save_pretrained(folder)
    ratios = example.outliers(folder, example.windows_of(tokens, 8, 16), 4)
    assert (
        list(ratios) == ["model.layers.0.*", "model.layers.1.*"]
        and ratios["model.layers.1.*"] > 0
    )
    called("--method=owl", "--sparsity=0.6")
    kept = [
        sum(
            int((x != 0).sum())
            for name, x in matrices(folder.parent / "out").items()
            if f".{i}." in name
        )
        for i in (0, 1)
    ]
    size = sum(x.numel() for x in matrices(folder).values()) / 2
    assert kept[1] / size - kept[0] / size == pytest.approx(0.16, abs=0.02)
    assert sum(kept) / size / 2 == pytest.approx(0.4, abs=0.01)


def test_weights_that_are_stored_the_other_way_are_pruned_along_their_inputs(
    example: ModuleType, tmp_path: Path
) -> None:
    words = torch.randint(2, 64, (8, 10), generator=torch.Generator().manual_seed(0))
    folder = tiny_lms.folder_of(tiny_lms.gpt2, tmp_path / "gpt2", layers=2)
    level = importlib.import_module("_options").level
    for method in ("wanda", "sparsegpt"):
        example.prune(folder, tmp_path / method, method, level("2:4"), words, 4)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / method)
        for layer in model.transformer.h:
            for weight in (
                layer.attn.c_attn.weight,
                layer.attn.c_proj.weight,
                layer.mlp.c_proj.weight,
            ):
                assert ((weight != 0).unflatten(0, (-1, 4)).sum(1) == 2).all()
    example.prune(folder, tmp_path / "rows", "wanda", level("0.5"), words, 4)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rows")
    assert ((model.transformer.h[1].attn.c_attn.weight != 0).sum(0) == 16).all()


def deeper(tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Writes a model of four layers over the folder's."""
    monkeypatch.setattr(tiny, "LAYERS", 4)
    (folder / "model.safetensors").unlink()
    tiny.llama(0).save_pretrained(folder)


@pytest.mark.parametrize("score", ["influence", "angular"])
def test_whole_layers_go(
    called: Any,
    tiny: ModuleType,
    folder: Path,
    score: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deeper(tiny, monkeypatch, folder)
    text = folder.parent / "text.txt"
    called("--layers=0.5", f"--score={score}", "--eval", str(text))
    out = folder.parent / "out"
    printed = capsys.readouterr().out
    assert "\n2 of 4 layers went\n" in printed and printed.count("  dropped\n") == 2
    assert " before, " in printed and " without these layers\n" in printed
    assert "change of its outputs" not in printed
    found = json.loads((out / "dropped_layers.json").read_text())
    places = [found["layers"].index(path) for path in found["dropped"]]
    if score == "influence":
        order = sorted(range(4), key=lambda i: found["influence"][i])
        assert places == sorted(order[:2])
    else:
        assert places[1] == places[0] + 1
    kept = [i for i in range(4) if i not in places]
    old, new = matrices(folder), matrices(out)
    assert len(new) == 2 * 7
    for name, x in new.items():
        parts = name.split(".")
        parts[2] = str(kept[int(parts[2])])
        assert torch.equal(x, old[".".join(parts)])
    assert not out.with_name("out.layers").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(6)[None]
    new_ids = loaded.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert new_ids.shape == (1, 10)


def test_layers_go_before_a_method_prunes_and_a_killed_run_goes_on(
    called: Any,
    tiny: ModuleType,
    example: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deeper(tiny, monkeypatch, folder)
    out = folder.parent / "out"
    arguments = ["--layers=0.25", "--method=sparsegpt", "--sparsity=2:4"]
    pruner = example.pruner

    def dying(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(example, "pruner", dying)
    with pytest.raises(KeyboardInterrupt):
        called(*arguments)
    monkeypatch.setattr(example, "pruner", pruner)
    assert (out.with_name("out.layers") / "dropped_layers.json").exists()

    def unscored(*given: Any) -> Any:
        raise AssertionError("the layers were scored before")

    monkeypatch.setattr(sf.calibration, "layer_scores", unscored)
    capsys.readouterr()
    called(*arguments, "--eval", str(folder.parent / "text.txt"))
    printed = capsys.readouterr().out
    assert "\n1 of 4 layers went\n" in printed and "\nmodel.layers.2.*" in printed
    assert " before, " in printed and " without these layers, " in printed
    assert not out.with_name("out.layers").exists()
    new = matrices(out)
    assert len(new) == 3 * 7
    assert all(2 * int((x != 0).sum()) == x.numel() for x in new.values())
    with pytest.raises(SystemExit):
        called(*arguments)
    assert "to be new or a run that was killed, got a model" in " ".join(
        capsys.readouterr().err.split()
    )


def test_weights_that_are_named_stay_dense(called: Any, folder: Path) -> None:
    called("--keep", "*.q_proj.weight", "*.layers.0.*")
    dense = {name for name, x in matrices(folder.parent / "out").items() if x.all()}
    assert dense == {n for n in matrices(folder) if "q_proj" in n or ".layers.0." in n}


def test_what_is_wrong_is_told_without_a_traceback(
    called: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("x", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((folder / "config.json").read_text())
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    for more, changes, message in (
        (
            (),
            {"at": tmp_path / "nowhere"},
            "expected the folder of a model, with config.json, at",
        ),
        ((), {"at": tmp_path / "bare"}, "expected a tokenizer beside the model in"),
        (
            (),
            {"text": tmp_path / "one.txt"},
            "8 windows of 16 tokens, got 1 tokens, which are 0: give more text, or",
        ),
        ((), {"text": tmp_path / "none.txt"}, "No such file or directory"),
        ((), {"text": tmp_path / "latin.txt"}, "latin.txt' in UTF-8"),
        (
            ("--eval", str(tmp_path / "one.txt")),
            {},
            "--eval: expected a text of two tokens or more, got 1",
        ),
        (
            ("--sparsity=half",),
            {},
            "expected a fraction of zeros between 0 and 1, or n:m, got 'half'",
        ),
        (
            ("--sparsity=50",),
            {},
            "expected a fraction between 0 and 1, got 50",
        ),
        (("--sparsity=5:4",), {}, "expected n <= m, got n=5, m=4"),
        (("--sparsity=2:5",), {}, "divisible by 5"),
        (("--method=owl", "--sparsity=2:4"), {}, "owl spreads a fraction of zeros"),
        (
            ("--out", str(full)),
            {},
            "to be new or a run that was killed, got 'notes.txt'",
        ),
        (("--out", str(folder)), {}, "expected another folder to write to"),
        (("--keep", "*.nothing"), {}, "--keep: no weight matches '*.nothing'"),
        (("--length=17",), {}, "--length: the model takes 16 tokens, got 17"),
        (("--layers=1",), {}, "--layers: expected a fraction between 0 and 1, got 1"),
        (("--layers=0.2",), {}, "--layers: 0.2 of 2 layers are none: give a larger"),
        (("--score=angular",), {}, "--score: expected --layers, the fraction of"),
        (
            ("--layers=0.5", "--keep", "*"),
            {},
            "--keep: expected --method or --sparsity with --layers",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            called(*more, **changes)
        assert ended.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split()), message
    assert [path.name for path in full.iterdir()] == ["notes.txt"]


def test_a_run_that_was_killed_goes_on_and_a_finished_one_is_not_written_over(
    called: Any,
    example: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, seen, pruner = folder.parent / "out", list[str](), example.pruner

    def dying(*arguments: Any) -> Any:
        prune = pruner(*arguments)

        def one(stats: Any) -> sf.Algorithm:
            seen.append(min(stats))
            if len(seen) == 2:
                raise KeyboardInterrupt
            return prune(stats)

        return one

    monkeypatch.setattr(example, "pruner", dying)
    with pytest.raises(KeyboardInterrupt):
        called("--method=sparsegpt")
    assert (out / ".stream").exists()
    # with another method the block that is done has other bits
    with pytest.raises(SystemExit):
        called("--method=wanda")
    assert "give another folder out" in " ".join(capsys.readouterr().err.split())
    called("--method=sparsegpt")
    assert not (out / ".stream").exists()
    called("--method=sparsegpt", "--out", str(out.with_name("whole")))
    one, other = matrices(out), matrices(out.with_name("whole"))
    assert one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )
    with pytest.raises(SystemExit):
        called("--method=sparsegpt")
    assert "to be new or a run that was killed" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_tiny_model_is_trained_pruned_tuned_and_reported(
    tiny: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--quick", "--steps=12", "--tune=3", "--held=600", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["tiny_llm.py", *arguments])
    tiny.main()
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "tiny_llm.json").read_text(encoding="utf-8"))[
        "results"
    ]
    total = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    assert [r["method"] for r in results if r["level"] == "2:4"] == [
        "magnitude",
        "Wanda",
        "RIA",
    ] + 2 * ["SparseGPT"]
    assert [r["tuned"] for r in results] == [*[False] * 6, True, *[False] * 4, True]
    for r in results:
        share = {"": 0.0, "60%": 0.6, "2:4": 0.5}[r["level"]]
        assert r["total"] == total and r["zeros"] == pytest.approx(
            share * total, rel=2e-3
        )
        assert (
            1 < r["perplexity"] < 256
            and len(r["layers"]) == 14
            and len(r["blocks"]) == 2
        )
        assert f"{r['perplexity']:.3f}" in printed and f"{r['zeros']:,}" in printed
    for plain, tuned in ((results[5], results[6]), (results[10], results[11])):
        assert plain["method"] == tuned["method"] and plain["zeros"] == tuned["zeros"]
        assert plain["perplexity"] != tuned["perplexity"]
    content = (tmp_path / "tiny_llm.png").read_bytes()
    assert (
        content.startswith(b"\x89PNG\r\n\x1a\n")
        and int.from_bytes(content[16:20]) >= 1000
    )
    folders = {path.name for path in (tmp_path / "tiny_llm").iterdir()}
    assert {"dense", "60_owl", "2_4_sparsegpt", "2_4_sparsegpt_tuned"} <= folders


def test_text_and_its_bytes(
    tiny: ModuleType, example: ModuleType, folder: Path
) -> None:
    assert all(file.exists() for file in tiny.sources(tiny.TRAIN + tiny.HELD))
    assert not {*tiny.TRAIN} & {*tiny.HELD}
    text = folder.parent / "text.txt"
    tokens = example.tokens_of(folder, [text, text])
    assert len(tokens) == 2 * text.stat().st_size
    windows = example.windows_of(tokens, 5, 7, seed=1)
    assert torch.equal(
        windows, example.windows_of(tokens, 5, 7, seed=1)
    ) and windows.shape == (5, 7)
    assert not torch.equal(windows, example.windows_of(tokens, 5, 7, seed=2))
    whole = example.windows_of(tokens, len(tokens) // 7, 7)
    assert torch.equal(whole.flatten(), tokens[: whole.numel()])


def test_the_options_of_the_tiny_model(
    tiny: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = tiny.options([f"--out={tmp_path}"])
    assert (chosen.steps, chosen.tune, chosen.windows, chosen.tuned) == (
        400,
        100,
        128,
        "sparsegpt",
    )
    assert [kept.name for kept in chosen.levels] == [
        "60%",
        "2:4",
    ] and chosen.methods == list(tiny.NAMES)
    for wrong, message in {
        "--levels=1": "between 0 and 1",
        "--steps=0": "1 or more",
        "--tuned=snip": "snip",
    }.items():
        with pytest.raises(SystemExit):
            tiny.options([wrong, f"--out={tmp_path}"])
        assert message in capsys.readouterr().err
