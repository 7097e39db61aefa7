"""The example that trains a model, makes it smaller in four ways, and measures it."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

for package in ("matplotlib", "onnxruntime", "onnxscript", "tqdm"):
    pytest.importorskip(package)

pytestmark = pytest.mark.deep

transformers.utils.logging.disable_progress_bar()
EXAMPLES = Path(__file__).parents[1] / "examples"
WAYS = ["width", "depth", "width + depth", "2:4"]


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("story")


@pytest.fixture
def parts(story: ModuleType) -> ModuleType:
    return importlib.import_module("_story_model")


def test_a_killed_story_goes_on_to_the_end(
    story: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files_of, seen = story.files_of, []

    def dying(*arguments):
        seen.append(arguments)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return files_of(*arguments)

    monkeypatch.setattr(sys, "argv", ["story.py", "--quick", f"--out={tmp_path}"])
    monkeypatch.setattr(story, "files_of", dying)
    with pytest.raises(KeyboardInterrupt):
        story.main()
    assert not (tmp_path / "story.json").exists()
    first = capsys.readouterr().out
    assert "2_4_recovered: " in first and "is there" not in first
    for file in (tmp_path / "story" / "dense").iterdir():
        file.unlink()
    (tmp_path / "story" / "dense").rmdir()
    story.main()
    second = capsys.readouterr().out
    assert "dense: is there" in second and "2_4_recovered: is there" in second
    assert "_files: is there" not in second  # the folder was deleted

    report = json.loads((tmp_path / "story.json").read_text(encoding="utf-8"))
    rows = report["rows"]
    assert list(rows) == ["dense", *WAYS]
    flops = [rows[way]["flops"] for way in WAYS]
    limit = rows["depth"]["flops"]
    assert flops[1] == limit and 0.9 * limit <= flops[0] <= limit
    assert 0.9 * limit <= flops[2] <= limit < flops[3] < rows["dense"]["flops"]
    # products of attention and the head are whole, matrices of the blocks halved
    matrices = sum(
        p.numel()
        for path, p in story.llama(story.QUICK).named_parameters()
        if ".layers." in path and p.ndim == 2
    )
    halves = matrices * story.QUICK.window
    assert rows["dense"]["flops"] - flops[3] == halves
    assert rows["dense"]["params"] - rows["2:4"]["params"] == matrices // 2
    for way, row in rows.items():
        assert set(row["ms"]) == {"PyTorch", "torch.export", "ONNX Runtime"}
        assert all(ms > 0 for ms in row["ms"].values())
        assert f"{row['bits']:.3f}" in second and way in second
        assert (row["bits"] == row["pruned"]) == (way == "dense")
        folder = tmp_path / "story" / story.slug(way)
        assert (folder / "config.json").exists() == row["loads"]
        assert (folder / "model.pt2").exists() and (folder / "model.onnx").exists()
    zeros = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "story/2_4")
    for layer in zeros.model.layers:
        kept = layer.mlp.up_proj.weight.unflatten(1, (-1, 4)) != 0
        assert (kept.sum(-1) == 2).all()
    page = (tmp_path / "story.md").read_text(encoding="utf-8")
    assert "| width + depth |" in page and "(story.png)" in page
    content = (tmp_path / "story.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20]) >= 1000
    assert not list((tmp_path / "story").glob("*.part"))


def test_a_stage_is_made_again_where_an_option_changed(
    story: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "one.pt"
    for about, x, wanted in (({"a": 1}, 1, 1), ({"a": 1}, 2, 1), ({"a": 2}, 3, 3)):
        found = story.stage(file, about, lambda x=x: {"x": x})
        assert found["x"] == wanted and found["about"] == about
    assert capsys.readouterr().out.count("is there") == 1

    def dying():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        story.stage(tmp_path / "other.pt", {}, dying)
    assert [path.name for path in tmp_path.iterdir()] == ["one.pt"]
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"one\.pt is damaged: delete it, and run ag"):
        story.stage(file, {"a": 2}, dying)


def test_training_goes_on_from_its_checkpoint(
    story: ModuleType,
    parts: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(parts, "SAVED", 2)
    plan = story.QUICK
    text = parts.read(plan, tmp_path / "tokenizer")
    file = tmp_path / "dense.checkpoint"

    def trained(last: int | None, about: int) -> dict[str, torch.Tensor]:
        model, calls = parts.llama(plan), []

        def loss(ids: torch.Tensor) -> torch.Tensor:
            calls.append(ids)
            if len(calls) == last:
                raise KeyboardInterrupt
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        with story.progress(6, "training") as bar:
            parts.train(
                model, loss, text, plan, 6, 3e-3, bar, checkpoint=file, about=about
            )
        return model.state_dict()

    whole = trained(None, 0)
    assert torch.load(file, weights_only=True)["step"] == 6
    with pytest.raises(KeyboardInterrupt):
        trained(6, 1)  # in the sixth step, after a checkpoint of four
    assert "goes on" not in capsys.readouterr().out  # the options were others
    again = trained(None, 1)
    assert "training goes on after step 4" in capsys.readouterr().out
    for path, x in whole.items():
        assert torch.equal(x, again[path]), path


def test_options_of_the_story(
    story: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert story.options([])[1] == Path("out")
    assert story.options(["--quick"])[1] == Path("out/quick")  # the full run stays
    assert story.options([f"--out={tmp_path}"]) == (story.FULL, tmp_path)
    plan, _ = story.options(["--quick", "--recover=7", f"--out={tmp_path}"])
    assert plan == story.QUICK._replace(recover=7)
    (tmp_path / "file").write_text("")
    for wrong, message in {
        "--steps=0": "expected 1 or more, got 0",
        f"--out={tmp_path / 'file'}": "--out",
    }.items():
        with pytest.raises(SystemExit):
            story.options([wrong])
        assert message in capsys.readouterr().err
