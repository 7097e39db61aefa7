"""Tensors in the folder of a model: which are there, and some of them at a time."""

import json

import pytest
import torch
from safetensors.torch import save_file

from sparsefn.nn.checkpoint.folders import read_tensors, some, stored_in

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.tensor(True),
}


def folder_of(path, sharded=True):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    if not sharded:
        save_file(TENSORS, path / "model.safetensors")
        return path
    placed = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    for file in {*placed.values()}:
        save_file(
            {name: x for name, x in TENSORS.items() if placed[name] == file},
            path / file,
        )
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": placed})
    )
    return path


@pytest.mark.parametrize("sharded", [True, False])
def test_tensors_are_listed_and_read_in_memory_of_their_own(tmp_path, sharded):
    folder = folder_of(tmp_path, sharded)
    stored = stored_in("stream", folder)
    assert {name: (one.shape, one.dtype) for name, one in stored.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((3,), "BF16"),
        "c": ((), "BOOL"),
    }
    files = {name: stored[name].file for name in ("a", "c")}
    found = dict(read_tensors("stream", folder, files))
    for file in {one.file for one in stored.values()}:
        (folder / file).write_bytes(b"\0" * 8)
    assert (
        found.keys() == {"a", "c"}
        and torch.equal(found["a"], TENSORS["a"])
        and bool(found["c"])
    )


def test_a_folder_that_is_no_model_is_told(tmp_path):
    with pytest.raises(
        ValueError,
        match="expected the folder of a model, got '.*nowhere', which is no folder",
    ):
        stored_in("stream", tmp_path / "nowhere")
    with pytest.raises(
        ValueError,
        match=r"expected config.json and model.safetensors or .* in '.*', got nothing: "
        r"write",
    ):
        stored_in("stream", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("x")
    with pytest.raises(
        ValueError,
        match=r"got 'config.json', 'pytorch_model.bin': write the folder with "
        r"model.save_",
    ):
        stored_in("stream", tmp_path)
    folder = folder_of(tmp_path)
    (folder / "two.safetensors").write_bytes(b"torn")
    with pytest.raises(
        ValueError,
        match=r"expected a safetensors file at '.*two.safetensors', but: .*header",
    ):
        stored_in("stream", folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(
        ValueError,
        match=r"expected a safetensors file at '.*two.safetensors', but: No such file",
    ):
        stored_in("stream", folder)
    save_file({"c": TENSORS["c"]}, folder / "two.safetensors")
    with pytest.raises(
        ValueError, match=r"index.json names tensors that its files lack: 'b'"
    ):
        stored_in("stream", folder)
    (folder / "model.safetensors.index.json").write_text("[")
    with pytest.raises(
        ValueError, match="expected a file of JSON at '.*', but: Expecting value"
    ):
        stored_in("stream", folder)


def test_names_in_errors_are_few():
    assert (
        some([]) == "nothing"
        and some(["a"]) == "'a'"
        and some("abcdefg").endswith("'d' and 3 more")
    )
