"""Scores of layers from a folder: the bits of the scores in memory, and bad input."""

import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch
from nn.distributed.harness import on_ranks
from posttraining.calibration import tiny_lms
from posttraining.calibration.tiny_lms import BATCHES, WORDS
from safetensors.torch import save_file
from torch import nn

import sparsefn as sf
from sparsefn.posttraining.calibration.folders import disk
from sparsefn.posttraining.calibration.folders.model import OUTSIDE, ModelFolder

PATHS = ("a.0", "a.1", "a.2", "a.3")


@pytest.fixture
def folder(tmp_path):
    return tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama")


@pytest.mark.deep(but=["llama"])
@pytest.mark.parametrize(
    "make", [tiny_lms.llama, tiny_lms.gemma, tiny_lms.gpt2, tiny_lms.opt, tiny_lms.neox]
)
def test_the_scores_are_those_of_the_whole_model_bit_for_bit(tmp_path, make):
    folder = tiny_lms.folder_of(make, tmp_path / "model")
    before, random = tiny_lms.files(folder), torch.get_rng_state()
    scores = sf.calibration.layer_scores(folder, BATCHES)
    assert torch.equal(torch.get_rng_state(), random)
    assert tiny_lms.files(folder) == before
    model = type(make()).from_pretrained(folder).eval()
    batches = [{**batch, "use_cache": False} for batch in BATCHES]
    layers = sf.shrinking.layers(model, batches[0], by="module")
    assert scores.layers == tuple(layer.path for layer in layers)
    influence = sf.shrinking.influence(layers, model, batches)
    assert torch.equal(scores.influence, influence) and bool((influence > 0).all())
    for span in (1, 2, 3):
        angles = sf.shrinking.angular_distance(layers, model, batches, span=span)
        assert torch.equal(scores.angles.diagonal(span - 1), angles)
    assert bool(scores.angles.isnan().tril(-1).sum() == 3)


def test_batches_of_several_lengths_count_the_same(folder):
    batches = [WORDS[:1, :4], (WORDS[:2],), {"input_ids": WORDS[2:]}]
    each = [sf.calibration.layer_scores(folder, [batch]) for batch in batches]
    scores = sf.calibration.layer_scores(folder, batches)
    mean = sum(one.influence for one in each) / 3
    torch.testing.assert_close(scores.influence, mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(
        scores.angles, sum(one.angles for one in each) / 3, equal_nan=True
    )


def test_padded_tokens_are_left_out(folder):
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 6:] = 0
    batch = {"input_ids": WORDS[:2], "attention_mask": mask}
    got = sf.calibration.layer_scores(folder, [batch], tokens=[mask.bool()])
    long, short = (
        sf.calibration.layer_scores(folder, [words])
        for words in (WORDS[:1], WORDS[1:2, :6])
    )
    model = tiny_lms.llama().from_pretrained(folder).eval()
    whole = {**batch, "use_cache": False}
    layers = sf.shrinking.layers(model, whole, by="module")
    given = {"layers": layers, "model": model, "batches": [whole]}
    influence = sf.shrinking.influence(**given, tokens=[mask.bool()])
    assert torch.equal(got.influence, influence)
    angles = sf.shrinking.angular_distance(**given, tokens=[mask.bool()], span=2)
    assert torch.equal(got.angles.diagonal(1), angles)
    # 10 tokens of one and 6 of the other, and the last of each
    wanted = (10 * long.influence + 6 * short.influence) / 16
    torch.testing.assert_close(got.influence, wanted, rtol=1e-5, atol=1e-6)
    wanted = (long.angles + short.angles) / 2
    torch.testing.assert_close(got.angles, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    with pytest.raises(ValueError, match="^layer_scores: expected whole windows, but"):
        sf.calibration.layer_scores(folder, [batch])
    with pytest.raises(
        ValueError, match="^layer_scores: expected a tensor of tokens for each of 1 bat"
    ):
        sf.calibration.layer_scores(folder, [batch], tokens=[])
    with pytest.raises(
        ValueError, match="^layer_scores: expected tokens that count in each batch, but"
    ):
        sf.calibration.layer_scores(folder, [batch], tokens=[mask.bool() & False])


def test_spans_stay_inside_of_a_list(tmp_path):
    folder = tiny_lms.folder_of(tiny_lms.t5, tmp_path / "t5")
    batch = {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :6]}
    scores = sf.calibration.layer_scores(folder, [batch])
    assert scores.layers == (
        "encoder.block.0",
        "encoder.block.1",
        "decoder.block.0",
        "decoder.block.1",
    )
    known = [(0, 0), (0, 1), (1, 1), (2, 2), (2, 3), (3, 3)]
    assert (~scores.angles.isnan()).nonzero().tolist() == [list(at) for at in known]
    assert scores.lowest(0.5, "angular") in (
        list(scores.layers[:2]),
        list(scores.layers[2:]),
    )
    with pytest.raises(ValueError, match="with a span of 3, got 4 layers in shorter l"):
        scores.lowest(0.75, "angular")
    assert len(scores.lowest(0.75)) == 3


def test_one_layer_is_in_memory(folder, monkeypatch):
    alive, most = [], []
    load = ModelFolder.load

    def noted(self, path, device):
        weights, digest = load(self, path, device)
        if path != OUTSIDE:
            gc.collect()
            most.append(sum(any(ref() is not None for ref in refs) for refs in alive))
            alive.append([weakref.ref(x) for x in weights.values()])
        return weights, digest

    monkeypatch.setattr(ModelFolder, "load", noted)
    sf.calibration.layer_scores(folder, BATCHES)
    assert len(most) == 4 and max(most) == 0  # one layer runs before, on an example


def scores_of(influence, angles=None):
    influence = torch.tensor(influence, dtype=torch.float64)
    if angles is None:
        angles = torch.zeros(len(influence), len(influence))
    return sf.calibration.LayerScores(PATHS[: len(influence)], influence, angles)


@pytest.mark.parametrize(
    ("influence", "fraction", "lowest"),
    [
        ([0.4, 0.1, 0.3, 0.2], 0.25, [1]),
        ([0.4, 0.1, 0.3, 0.2], 0.5, [1, 3]),
        ([0.2, 0.1, 0.1, 0.1], 0.5, [1, 2]),
        ([0.1, 0.1, 0.1, 0.1], 0.25, [0]),
        ([0.1, 0.2, 0.3], 0.5, [0, 1]),  # 1.5 rounds to the even 2
        ([0.1, 0.2, 0.3, 0.4], 0.1, []),
        ([0.1, 0.2, 0.3, 0.4], 0.75, [0, 1, 2]),
    ],
)
def test_exactly_so_many_go_and_ties_go_to_the_first(influence, fraction, lowest):
    found = scores_of(influence).lowest(fraction)
    assert found == [PATHS[i] for i in lowest]


@pytest.mark.parametrize("score", ["influence", "angular"])
def test_a_layer_stays(score):
    with pytest.raises(
        ValueError, match="expected a fraction that leaves .*, but 0.9 of 4 layers are "
    ):
        scores_of([0.1, 0.2, 0.3, 0.4]).lowest(0.9, score)


def test_the_span_of_the_smallest_angle():
    nan = torch.nan
    angles = torch.tensor(
        [
            [0.1, 0.4, 0.5, 0.9],
            [nan, 0.3, 0.3, 0.6],
            [nan, nan, 0.2, 0.3],
            [nan, nan, nan, 0.1],
        ]
    )
    scores = scores_of([0.4, 0.3, 0.2, 0.1], angles)
    assert scores.lowest(0.25, "angular") == ["a.0"]
    assert scores.lowest(0.5, "angular") == ["a.1", "a.2"]
    assert scores.lowest(0.75, "angular") == ["a.0", "a.1", "a.2"]
    assert scores.lowest(0.0, "angular") == []


def test_what_is_no_fraction_or_score_is_told():
    scores = scores_of([0.1, 0.2])
    with pytest.raises(ValueError, match="to be 'influence' or 'angular', got 'loss'"):
        scores.lowest(0.5, "loss")
    with pytest.raises(ValueError, match="fraction"):
        scores.lowest(1.5)
    with pytest.raises(TypeError, match="fraction"):
        scores.lowest(1)


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    """Runs its layers in the order of `turns`."""

    def __init__(self, widths=(4, 4, 4), turns=(0, 1)):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList([Layer(*pair) for pair in pairs])
        self.turns = turns

    def forward(self, x):
        for turn in self.turns:
            x = self.layers[turn](x)
        return x


def folder_of_module(path, make, scale=1.0):
    torch.manual_seed(0)
    path.mkdir(exist_ok=True)
    weights = {name: scale * x.detach() for name, x in make().named_parameters()}
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def test_a_module_of_ones_own(tmp_path):
    folder = folder_of_module(tmp_path / "own", Model)
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    scores = sf.calibration.layer_scores(folder, [x], make=Model)
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        first = model.layers[0](x)
        second = model.layers[1](first)
    assert scores.layers == ("layers.0", "layers.1")
    of = sf.calibration.influence_of
    assert scores.influence.tolist() == [of(x, first), of(first, second)]
    angle = sf.calibration.angle_of(x[:, -1], second[:, -1])
    assert scores.angles[0, 1].item() == pytest.approx(angle.item())


def test_bad_input(folder, tmp_path, monkeypatch):
    def told(text, error=ValueError, at=folder, batches=BATCHES, **more):
        with pytest.raises(error, match=f"^layer_scores: {text}"):
            sf.calibration.layer_scores(at, batches, **more)

    told("expected the folder of a model, got '.*', which is no", at=tmp_path / "none")
    told("expected a list of batches, got an empty one", batches=[])
    told("expected a list of batches, as batches=", TypeError, batches=WORDS)
    own = folder_of_module(tmp_path / "plain", lambda: nn.Linear(4, 4))
    x = [torch.ones(2, 4)]
    told(
        "expected a model with a list of layers, but the Linear has none",
        at=own,
        batches=x,
        make=lambda: nn.Linear(4, 4),
    )

    def narrow():
        return Model((4, 3, 4))

    own = folder_of_module(tmp_path / "narrow", narrow)
    told(
        r"expected layers that give hidden states of the shape that they take, but of "
        r"'layers.0' these are \[\(2, 4\), \(2, 3\)\]",
        at=own,
        batches=x,
        make=narrow,
    )

    def again():
        return Model(turns=(0, 1, 0))

    own = folder_of_module(tmp_path / "again", again)
    told(
        "expected layers that run one after the other, but 'layers.0' is called 2 times"
        ": score the model in memory, with sf.shrinking.influence",
        at=own,
        batches=x,
        make=again,
    )
    own = folder_of_module(tmp_path / "large", Model, scale=1e30)
    told(
        "expected finite hidden states, but 'layers.1' gives others",
        at=own,
        batches=x,
        make=Model,
    )

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "numpy", full)
        told(
            "the activations could not be kept in '.*': No space left on device. Make "
            "room, or name another folder by TMPDIR, and call again",
            OSError,
            batches=[WORDS.repeat(4, 1)],
        )


def test_errors_have_the_name_of_the_function_that_was_called():
    with (
        pytest.raises(ValueError, match="^layer_scores: no room"),
        disk.in_the_name_of("layer_scores"),
    ):
        raise ValueError("stream: no room")
    with (
        pytest.raises(OSError, match="^other: no room"),
        disk.in_the_name_of("layer_scores"),
    ):
        raise OSError("other: no room")


def cases(folder):
    scores = sf.calibration.layer_scores(folder, BATCHES)

    def all_have_all():
        alone = torch.load(Path(folder).with_name("alone.pt"))
        assert torch.equal(scores.influence, alone["influence"])
        assert scores.angles.nan_to_num(9).equal(alone["angles"].nan_to_num(9))

    yield "all have all", all_have_all


@pytest.mark.deep
def test_processes_get_the_bits_of_one(folder):
    scores = sf.calibration.layer_scores(folder, BATCHES)
    saved = {"influence": scores.influence, "angles": scores.angles}
    torch.save(saved, folder.with_name("alone.pt"))
    on_ranks(2, cases, folder)
