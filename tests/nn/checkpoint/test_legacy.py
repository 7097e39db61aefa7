"""Folders of SparseML and llm-compressor, against what compressed-tensors reads."""

import json

import golden_data
import pytest
import torch
from safetensors.torch import load_file, save_file

import sparsefn as sf

CASES = [
    case
    for fn in golden_data.functions("compressed_tensors")
    for case in golden_data.cases("compressed_tensors", fn)
]


def written(case, folder):
    for name, content in case.inputs.items():
        (folder / name).write_bytes(content.numpy().tobytes())
    return folder


def small(folder, format="sparse-bitmask", version="0.13.0", **tensors):
    """A folder whose layer `fc` is [[1, 0, 2], [0, 3, 0]], with some parts replaced."""
    said = {"version": version, "sparsity_config": {"format": format}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    parts = {
        "fc.bitmask": torch.tensor([[0b101], [0b010]], dtype=torch.uint8),
        "fc.compressed": torch.tensor([1.0, 2.0, 3.0]),
        "fc.row_offsets": torch.tensor([0, 2]),
        "fc.shape": torch.tensor([2, 3]),
    } | {f"fc.{part}": tensor for part, tensor in tensors.items()}
    save_file(
        {name: x for name, x in parts.items() if x is not None},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_folder_gives_what_the_library_read_itself(tmp_path, case):
    state = sf.checkpoint.read_legacy(written(case, tmp_path))
    assert list(state.params) == list(state.masks) == sorted(state.params)
    assert case.outputs.keys() <= state.params.keys()
    for path, bits in case.outputs.items():
        leaf = state.params[path]
        mask = state.masks[path]
        assert str(leaf.dtype) == f"torch.{case.value[path]}"
        assert torch.equal(leaf.view(bits.dtype), bits), path
        assert mask.shape in ((), leaf.shape)
        if mask.ndim:  # nothing that is not zero is pruned, and no zero is lost
            zeros = leaf.float() == 0
            assert not bool((~mask & ~zeros).any())
            assert case.id.startswith("24") or torch.equal(mask, ~zeros)
    masked = sum(mask.ndim > 0 for mask in state.masks.values())
    if case.id.startswith("24"):
        assert masked == 8 - (case.id != "24_zeros" and case.id != "24_f16")
        assert all(
            bool((mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all())
            for mask in state.masks.values()
            if mask.ndim
        )
    else:
        assert masked


def test_quantised_values_stay_as_they_are_stored(tmp_path):
    (case,) = (case for case in CASES if case.id == "24_fp8")
    state = sf.checkpoint.read_legacy(written(case, tmp_path))
    codes = state.params["model.layers.0.mlp.up_proj.weight"]
    scale = state.params["model.layers.0.mlp.up_proj.weight_scale"]
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == (20, 1)
    assert state.masks["model.layers.0.mlp.up_proj.weight_scale"].ndim == 0


def test_a_model_trains_on_from_such_a_folder(tmp_path):
    state = sf.checkpoint.read_legacy(small(tmp_path))
    model = torch.nn.Sequential()
    model.add_module("fc", torch.nn.Linear(3, 2, bias=False))
    model.load_state_dict(state.params)
    assert model.fc.weight.tolist() == [[1, 0, 2], [0, 3, 0]]
    algorithm = sf.with_optimizer(sf.from_masks(state.masks), sf.optimizers.sgd(0.5))
    start = algorithm.init(state.params)
    after = algorithm.update(start, {"fc.weight": torch.ones(2, 3)}, 0)
    assert after.params["fc.weight"].tolist() == [[0.5, 0, 1.5], [0, 2.5, 0]]


@pytest.mark.parametrize("outer", ["", "compression_config"])
def test_what_sparseml_wrote_without_a_version_is_read(tmp_path, outer):
    small(tmp_path)
    said = {"sparsity_config": {"format": "sparse-bitmask"}}
    config = {outer: said} if outer else said
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sf.checkpoint.read_legacy(str(tmp_path)).params.keys() == {"fc.weight"}


BYTES = torch.tensor([[0b1101], [0b010]], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"version": "0.15.0"}, ValueError, r"of compressed-tensors 0.14 or older, got "
         r"version '0.15.0', whose files are not known"),
        ({"version": "next"}, ValueError, "got version 'next', whose files are not"),
        ({"format": "marlin-24"}, ValueError, "has the format 'sparse-bitmask' or "
         "'sparse-24-bitmask', got 'marlin-24': read other folders with from_pretr"),
        ({"format": "dense"}, ValueError, "got 'dense': read other folders with"),
        ({"shape": None, "row_offsets": None}, ValueError, "expected 'fc.shape', "
         "'fc.row_offsets' beside 'fc.bitmask': the folder is half written"),
        ({"bitmask": None}, ValueError, "expected tensors with a bitmask, as the "
         "config says, got 'fc.compressed', 'fc.row_offsets', 'fc.shape'"),
        ({"weight": torch.ones(2, 3)}, ValueError, "expected 'fc.weight' or "
         "'fc.bitmask', got both"),
        ({"shape": torch.tensor([2.0, 3.0])}, TypeError, "expected a tensor of "
         "torch.int64 at 'fc.shape', got torch.float32"),
        ({"bitmask": BYTES.to(torch.int8)}, TypeError, "expected a tensor of "
         "torch.uint8 at 'fc.bitmask', got torch.int8"),
        ({"shape": torch.tensor([2, -3])}, ValueError, r"expected the sizes of a "
         r"tensor at 'fc.shape', got \[2, -3\]"),
        ({"shape": torch.tensor([2, 2**40])}, ValueError, r"expected a bitmask of "
         r"shape \(2, 137438953472\) at 'fc.bitmask', got \(2, 1\)"),
        ({"bitmask": BYTES}, ValueError, "expected zeros after bit 3 of each row at "
         "'fc.bitmask': its bytes are damaged"),
        ({"row_offsets": torch.tensor([0, 1])}, ValueError, "expected 'fc.row_offsets' "
         "to fit the bitmask: its bytes are damaged"),
        ({"compressed": torch.ones(2)}, ValueError, "expected 3 values at "
         "'fc.compressed', as the bitmask says, got 2"),
        ({"format": "sparse-24-bitmask"}, ValueError, "expected 2 set bits for every 4 "
         "weights at 'fc.bitmask', which is sparse-24-bitmask: its bytes are damaged"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_its_format_is_told(tmp_path, changed, error, text):
    with pytest.raises(error, match=f"read_legacy: .*{text}"):
        sf.checkpoint.read_legacy(small(tmp_path, **changed))


def test_one_of_two_packed_weights_without_a_bitmask(tmp_path):
    small(tmp_path)
    file = tmp_path / "model.safetensors"
    parts = load_file(file)
    last = {name.replace("fc.", "last."): x.clone() for name, x in parts.items()}
    del last["last.bitmask"]
    save_file(parts | last, file)
    text = "expected 'last.bitmask' beside 'last.compressed': the folder is half"
    with pytest.raises(ValueError, match=f"read_legacy: {text}"):
        sf.checkpoint.read_legacy(tmp_path)


@pytest.mark.parametrize(
    "config", [[1], {"sparsity_config": "x"}, {"sparsity_config": {"format": []}}]
)
def test_a_config_of_another_form(tmp_path, config):
    small(tmp_path)
    for said in (config, {"quantization_config": config}):
        (tmp_path / "config.json").write_text(json.dumps(said))
        with pytest.raises(ValueError, match="read_legacy: expected "):
            sf.checkpoint.read_legacy(tmp_path)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ([], r"to hold an object of JSON, \{...\}, got \[\]: write the folder"),
        (
            {"weight_map": []},
            "to be an object of file names by tensor, got \\[\\]: write",
        ),
        ({"weight_map": {"a": 1}}, "of file names by tensor, got .'a': 1.: write the"),
    ],
)
def test_an_index_of_another_form(tmp_path, index, text):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"read_legacy: .*index.json' .*{text}"):
        sf.checkpoint.read_legacy(tmp_path)


def test_a_folder_that_is_not_whole_is_told(tmp_path):
    with pytest.raises(TypeError, match="expected a path to a folder, got int"):
        sf.checkpoint.read_legacy(3)
    with pytest.raises(
        ValueError, match="read_legacy: expected the folder of a model, got '.*no'"
    ):
        sf.checkpoint.read_legacy(tmp_path / "no")
    (case,) = (case for case in CASES if case.id == "bitmask_bf16_shards")
    folder = written(case, tmp_path)
    last = folder / "model-00003-of-00003.safetensors"
    content = last.read_bytes()
    last.write_bytes(content[:-1])
    with pytest.raises(
        ValueError, match="read_legacy: expected a safetensors file at '.*3-of-00003"
    ):
        sf.checkpoint.read_legacy(folder)
    last.unlink()
    with pytest.raises(
        ValueError, match="read_legacy: .*00003-of-00003.safetensors', but: No such f"
    ):
        sf.checkpoint.read_legacy(folder)
    last.write_bytes(content)
    save_file({"x": torch.ones(1)}, last)
    with pytest.raises(
        ValueError,
        match=r"read_legacy: model.safetensors.index.json names tensors that its files "
        "lack",
    ):
        sf.checkpoint.read_legacy(folder)
    last.write_bytes(content)
    (folder / "config.json").unlink()
    with pytest.raises(
        ValueError, match=r"read_legacy: expected config.json and .*, or copy all of it"
    ):
        sf.checkpoint.read_legacy(folder)
