"""Pruning from a folder to a folder: the bits of `in_order`, whatever happens on the
way.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from nn.distributed.harness import on_ranks
from posttraining.calibration import tiny_lms
from posttraining.calibration.tiny_lms import (
    BATCHES,
    WORDS,
    differing,
    ending_at,
    files,
    sparsegpt,
    wanda,
    weights_in,
)
from safetensors.torch import load_file, save_file
from torch import nn

import sparsefn as sf

ROOT = Path(__file__).parents[4]
LAYERS = {
    "llama": "model.layers",
    "gemma": "model.layers",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
}


def same_weights(model, state, out):
    """Whether `from_pretrained` loads the effective weights of a state, bit for bit."""
    found, expected = (
        sf.modules.params_of(type(model).from_pretrained(out)),
        sf.effective(state),
    )
    return found.keys() == expected.keys() and all(
        torch.equal(x, expected[name]) for name, x in found.items()
    )


@pytest.fixture
def folder(tmp_path):
    return tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama", layers=2)


@pytest.mark.deep(but=["*-wanda-dtype0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prune", [wanda, sparsegpt])
@pytest.mark.parametrize(
    "make", [tiny_lms.llama, tiny_lms.gemma, tiny_lms.gpt2, tiny_lms.opt]
)
def test_the_new_folder_has_the_bits_of_the_whole_model_in_order(
    tmp_path, make, prune, dtype
):
    folder = tiny_lms.folder_of(make, tmp_path / "model", dtype)
    model, axis = type(make()).from_pretrained(folder), int(make is tiny_lms.gpt2)
    blocks = [f"{LAYERS[make.__name__]}.{i}.*" for i in range(3)]

    def pruner(stats):
        return prune(stats, axis)

    state = sf.calibration.in_order(
        model, None, blocks, pruner, {"input_ids": WORDS}, chunk_size=2
    )
    before, random = files(folder), torch.get_rng_state()
    errors = sf.calibration.stream(folder, pruner, BATCHES, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), random) and files(folder) == before
    assert list(errors) == blocks and all(0 < error < 1 for error in errors.values())
    assert same_weights(model, state, tmp_path / "out")
    old, new = weights_in(folder), weights_in(tmp_path / "out")
    assert old.keys() == new.keys() and all(
        new[name].dtype == x.dtype for name, x in old.items()
    )
    kept = {name: mask for name, mask in state.masks.items() if mask.ndim}
    assert len(kept) == {"llama": 21, "gemma": 21, "gpt2": 12, "opt": 18}[make.__name__]
    assert all(2 * int(mask.sum()) == mask.numel() for mask in kept.values())
    names = (
        {*os.listdir(folder)}
        - {"model.safetensors.index.json"}
        - {*map(os.path.basename, folder.glob("*tensors"))}
    )
    assert (
        names <= {*os.listdir(tmp_path / "out")}
        and not (tmp_path / "out" / ".stream").exists()
    )


def test_encoder_and_decoder(tmp_path):
    folder = tiny_lms.folder_of(tiny_lms.t5, tmp_path / "t5")
    model = tiny_lms.t5().from_pretrained(folder)
    blocks = [
        f"{kind}.block.{i}.*" for kind in ("encoder", "decoder") for i in range(2)
    ]
    inputs = {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :6]}
    state = sf.calibration.in_order(
        model, None, blocks, wanda, inputs, chunk_size=3, of="square"
    )
    batches = [
        {"input_ids": words, "decoder_input_ids": words[:, :6]}
        for words in WORDS.split(3)
    ]
    errors = sf.calibration.stream(
        folder, wanda, batches, tmp_path / "out", of="square"
    )
    assert list(errors) == blocks and same_weights(model, state, tmp_path / "out")


def test_layers_are_left_out_and_blocks_are_halves(tmp_path):
    folder = tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama", layers=4)
    model = tiny_lms.llama().from_pretrained(folder)
    blocks = [
        "model.layers.1.self_attn.*",
        ["model.layers.1.mlp.*"],
        "model.layers.3.*",
    ]
    state = sf.calibration.in_order(
        model, None, blocks, wanda, {"input_ids": WORDS}, chunk_size=2
    )
    sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "out", blocks=blocks)
    assert same_weights(model, state, tmp_path / "out")


def test_batches_of_several_lengths_and_kinds(folder, tmp_path):
    batches = [
        {
            "input_ids": WORDS[:2],
            "attention_mask": torch.ones(2, 10, dtype=torch.int64),
        },
        (WORDS[:1, :4],),
        WORDS,
    ]
    sf.calibration.stream(folder, wanda, batches, tmp_path / "out")
    model = tiny_lms.llama().from_pretrained(folder)
    seen = []
    for batch in batches:
        call = (
            batch
            if isinstance(batch, dict)
            else {"input_ids": batch[0] if isinstance(batch, tuple) else batch}
        )
        seen.append(
            sf.calibration.inputs(
                model,
                None,
                paths="model.layers.0.self_attn.q_proj.weight",
                of="square",
                **call,
            )
        )
    stats = seen[0]
    for more in seen[1:]:
        stats = {
            path: {name: x + more[path][name] for name, x in of.items()}
            for path, of in stats.items()
        }
    algorithm = wanda(stats)
    path = "model.layers.0.self_attn.q_proj.weight"
    state = algorithm.init({path: weights_in(folder)[path]})
    expected = sf.effective(algorithm.update(state, state.params, 0))[path]
    assert torch.equal(weights_in(tmp_path / "out")[path], expected)


def test_padded_ids_without_a_mask_are_told(folder, tmp_path):
    padded = WORDS.clone()
    padded[1, 7:] = 2  # the eos_token_id of the config, which has no pad_token_id
    padded[4, :4] = 2
    batches = [{"input_ids": words} for words in padded.split(2)]
    told = (
        "7 of 60 ids, at the ends of rows, are 2, the eos_token_id of the model, and "
        "count in the statistics: give"
    )
    with pytest.warns(UserWarning, match=f"^stream: {told}") as warned:
        sf.calibration.stream(folder, wanda, batches, tmp_path / "out")
    assert [one.filename for one in warned] == [__file__]
    model = tiny_lms.llama().from_pretrained(folder)
    with pytest.warns(
        UserWarning,
        match="^in_order: 7 of 60 ids, .*, and leave it out with tokens=attention_mask",
    ):
        sf.calibration.in_order(
            model, None, ["model.layers.0.*"], wanda, {"input_ids": padded}, of="square"
        )
    with pytest.warns(UserWarning, match="^inputs: 7 of 60 ids"):
        stats = sf.calibration.inputs(model, None, padded, of="square")
    mask = torch.ones_like(padded)
    mask[1, 7:], mask[4, :4] = 0, 0
    mended = sf.calibration.inputs(
        model, None, padded, attention_mask=mask, tokens=mask.bool(), of="square"
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (int(stats[name]["count"]), int(mended[name]["count"])) == (60, 53)


def test_padding_is_left_out_where_tokens_says_so(folder, tmp_path):
    counts = torch.ones(6, 10, dtype=torch.bool)
    counts[1, 7:], counts[4, 3:] = False, False
    inputs = {"input_ids": WORDS, "attention_mask": counts.long()}
    batches = [{name: x[i : i + 2] for name, x in inputs.items()} for i in (0, 2, 4)]
    with pytest.raises(
        ValueError,
        match="'attention_mask' hides 3 of 20 tokens as padding: leave it out",
    ):
        sf.calibration.stream(folder, wanda, batches, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    sf.calibration.stream(
        folder, wanda, batches, tmp_path / "out", tokens=counts.split(2)
    )
    model = tiny_lms.llama().from_pretrained(folder)
    blocks = ["model.layers.0.*", "model.layers.1.*"]
    state = sf.calibration.in_order(
        model, None, blocks, wanda, inputs, chunk_size=2, tokens=counts
    )
    assert same_weights(model, state, tmp_path / "out")
    with pytest.raises(
        ValueError, match="expected a tensor of tokens for each of 3 batches, got 1"
    ):
        sf.calibration.stream(folder, wanda, batches, tmp_path / "no", tokens=[counts])


def test_a_model_of_ones_own(tmp_path):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x, scale):
            return x + scale * torch.relu(self.up(self.norm(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = (
                nn.ModuleList(Block() for _ in range(3)),
                nn.Linear(8, 8),
            )

        def forward(self, x):
            for i, block in enumerate(self.blocks):
                x = block(x, torch.tensor(0.5 + i))
            return self.head(x)

    torch.manual_seed(0)
    model = Model()
    model(torch.randn(32, 8))  # which moves the buffers
    model.eval()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text("{}")
    save_file(model.state_dict(), tmp_path / "in" / "model.safetensors")
    x = torch.randn(32, 8)
    sf.calibration.stream(tmp_path / "in", wanda, [x], tmp_path / "out", make=Model)
    state = sf.calibration.in_order(
        model, None, [f"blocks.{i}.*" for i in range(3)], wanda, x
    )
    expected = model.state_dict() | sf.effective(state)
    found = weights_in(tmp_path / "out")
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], x) for name, x in expected.items()
    )


def test_bad_input_is_told_before_anything_is_written(folder, tmp_path):
    out = tmp_path / "out"
    for batches, words in [
        ([], "expected a list of batches, got an empty one"),
        (
            [WORDS, WORDS[:, :0]],
            "expected batches of tensors that have entries, got none in batch 1",
        ),
        (
            [{"input_ids": None}],
            "expected batches of tensors that have entries, got none in batch 0",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            sf.calibration.stream(folder, wanda, batches, out)
    for batches, kind in [
        (WORDS, "Tensor"),
        ({"input_ids": WORDS}, "dict"),
        ("some text", "str"),
    ]:
        with pytest.raises(
            TypeError, match=rf"a list of batches, as batches=\[.*\], got a {kind}$"
        ):
            sf.calibration.stream(folder, wanda, batches, out)
    with pytest.raises(TypeError, match="a tensor, a tuple of arguments or a dict"):
        sf.calibration.stream(folder, wanda, ["some text"], out)
    with pytest.raises(
        ValueError, match="expected another folder to write to, got '.*llama' twice"
    ):
        sf.calibration.stream(folder, wanda, BATCHES, folder)
    with pytest.raises(ValueError, match="expected of to name some of"):
        sf.calibration.stream(folder, wanda, BATCHES, out, of="norm")
    assert not out.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    with pytest.raises(
        ValueError, match="to be new or a run that was killed, got 'notes.txt'"
    ):
        sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "full")
    with pytest.raises(
        TypeError, match="expected prune to give an Algorithm, got dict"
    ):
        sf.calibration.stream(folder, lambda stats: stats, BATCHES, out)
    with pytest.raises(ValueError, match="expected more than one calibration input"):
        sf.calibration.stream(folder, wanda, [WORDS[:1, :1]], tmp_path / "one token")


def test_values_that_are_not_finite_name_the_block_and_the_layer(folder, tmp_path):
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.layers.0.mlp.down_proj.weight" in tensors:
            tensors["model.layers.0.mlp.down_proj.weight"][3] = float("nan")
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"block 'model.layers.1.\*': expected finite inputs of "
        r"'model.layers.1.self_attn",
    ):
        sf.calibration.stream(
            folder, wanda, BATCHES, tmp_path / "out", blocks=["model.layers.1.*"]
        )


LIMITED = """
import resource, sys, torch
sys.path.insert(0, "tests")
from pathlib import Path
from posttraining.calibration import tiny_lms
from posttraining.calibration.tiny_lms import WORDS, sparsegpt
import sparsefn as sf
folder, out, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
tiny_lms.folder_of(tiny_lms.llama, out / "tiny", layers=2)
sf.calibration.stream(out / "tiny", sparsegpt, [WORDS], out / "first")  # loads all code
status = open("/proc/self/status")
(size,) = [line.split()[1] for line in status if line.startswith("VmSize")]
used = int(size) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))
sf.calibration.stream(folder, sparsegpt, WORDS.split(1), out / "pruned")
"""


@pytest.mark.deep
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the size of a process is read from /proc",
)
def test_a_model_of_four_times_the_memory(tmp_path):
    sizes = {"layers": 48, "hidden_size": 256, "intermediate_size": 512}
    torch.manual_seed(0)
    tiny_lms.llama(**sizes).save_pretrained(tmp_path / "large", max_shard_size="3MB")
    size = sum(
        file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors")
    )
    # The C library keeps freed memory of small leaves, unless it is told to give it
    # back.
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-c",
        LIMITED,
        str(tmp_path / "large"),
        str(tmp_path),
        str(size // 4),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    old, new = weights_in(tmp_path / "large"), weights_in(tmp_path / "pruned")
    assert old.keys() == new.keys()
    for name, x in new.items():
        assert (
            2 * int((x != 0).sum()) == x.numel()
            if "proj" in name
            else torch.equal(x, old[name])
        )


def cases(folder, place):
    def pruner(stats):
        seen.append({path: int(of["count"]) for path, of in stats.items()})
        return wanda(stats)

    seen = []

    def one_model():
        sf.calibration.stream(folder, pruner, BATCHES, place / "pruned", of="square")
        assert all(
            count == WORDS.numel() for counts in seen for count in counts.values()
        )

    def too_few_batches():
        with pytest.raises(
            ValueError, match="expected a batch for each of 2 processes, got 1 in all"
        ):
            sf.calibration.stream(folder, pruner, BATCHES[:1], place / "few")

    def other_batches():
        batches = BATCHES if torch.distributed.get_rank() == 0 else BATCHES[::-1]
        with pytest.raises(
            (ValueError, RuntimeError), match="of another run were its batches"
        ):
            sf.calibration.stream(folder, pruner, batches, place / "other")

    def nan_on_one():
        batches = [
            {"inputs_embeds": torch.ones(1, 4, 32)},
            {"inputs_embeds": torch.full((1, 4, 32), torch.nan)},
        ]
        with pytest.raises(
            (ValueError, RuntimeError),
            match="expected finite inputs of 'model.layers.0.self_attn",
        ):
            sf.calibration.stream(folder, pruner, batches, place / "nan")

    def goes_on():
        with (
            pytest.raises((OSError, RuntimeError), match="no room"),
            ending_at(9, OSError("no room")),
        ):
            sf.calibration.stream(folder, pruner, BATCHES, place / "again", of="square")
        sf.calibration.stream(folder, pruner, BATCHES, place / "again", of="square")
        assert differing(place / "again", place / "pruned") == {}

    yield "one model", one_model
    yield "too few batches", too_few_batches
    yield "other batches", other_batches
    yield "nan on one", nan_on_one
    yield "goes on", goes_on


def test_two_processes_share_the_batches(folder, tmp_path):
    on_ranks(2, cases, folder, tmp_path)
    sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "alone", of="square")
    alone, shared = weights_in(tmp_path / "alone"), weights_in(tmp_path / "pruned")
    assert alone.keys() == shared.keys() and all(
        torch.equal(shared[name], x) for name, x in alone.items()
    )


def test_one_run_at_a_time(folder, tmp_path):
    def prune(stats):
        if not tried:
            with pytest.raises(ValueError) as error:
                tried.append(True)
                sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "out")
            assert "expected one run at a time, but another one writes to" in str(
                error.value
            )
            assert "out': wait for its end, or give another folder out" in str(
                error.value
            )
        return wanda(stats)

    tried = []
    sf.calibration.stream(folder, prune, BATCHES, tmp_path / "out")
    sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "other")
    assert tried and files(tmp_path / "out") == files(tmp_path / "other")
    with pytest.raises(ValueError, match="to be new or a run that was killed"):
        sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "other")


class Layer(nn.Module):
    def __init__(self, writes):
        super().__init__()
        self.up, self.by, self.writes = nn.Linear(8, 8), None, writes

    def forward(self, x, total, notes):
        out = self.up(x + total) * (1 if self.by is None else self.by) + sum(
            notes.values()
        )
        if self.writes == "total":
            total.add_(out.mean())
        if self.writes == "notes":
            notes["last"] = out
        return out


class Talks(nn.Module):
    """Layers tell each other things besides what they return."""

    def __init__(self, kind):
        super().__init__()
        self.layers, self.kind = nn.ModuleList(Layer(kind) for _ in range(3)), kind

    def forward(self, x):
        total, notes = torch.zeros_like(x), {}
        for layer in self.layers:
            if self.kind == "by":
                layer.by = x.mean()
            x = layer(x, total, notes)
        return x


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("total", "'layers.0' writes into its inputs"),
        ("notes", "'layers.0' writes into its inputs"),
        ("by", "'layers.0' gets its 'by' from elsewhere, and not as an argument"),
    ],
)
def test_layers_that_tell_each_other_more_are_refused(tmp_path, kind, why):
    (tmp_path / "own").mkdir()
    save_file(Talks(kind).state_dict(), tmp_path / "own" / "model.safetensors")
    (tmp_path / "own" / "config.json").write_text("{}")
    with pytest.raises(
        ValueError,
        match=f"stream: expected layers that run one after the other, but {why}: prune "
        "the",
    ):
        sf.calibration.stream(
            tmp_path / "own",
            wanda,
            [torch.randn(4, 8)] * 2,
            tmp_path / "out",
            make=lambda: Talks(kind),
        )


DENSE = {
    "format": "dense",
    "global_sparsity": 0.5,
    "sparsity_structure": "unstructured",
    "targets": ["Linear"],
}


@pytest.mark.parametrize(
    "said",
    [
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "dense",
                "sparsity_config": DENSE,
            }
        },
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "sparsity_config": DENSE,
                "config_groups": {},
            }
        },
        {"sparsity_config": DENSE},
    ],
)
def test_plain_weights_whose_config_speaks_of_zeros_are_pruned(folder, tmp_path, said):
    # compressed-tensors says so of a pruned model whose zeros it writes as they are.
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | said))
    sf.calibration.stream(own, wanda, BATCHES, tmp_path / "out")
    sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "plain")
    expected, found = weights_in(tmp_path / "plain"), weights_in(tmp_path / "out")
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], x) for name, x in expected.items()
    )
    # what it said is not so any more
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert (loaded.model.layers[0].mlp.up_proj.weight == 0).float().mean() == 0.5
