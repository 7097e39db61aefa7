"""The loop over blocks: how often layers run, what is kept meanwhile, and what makes it
run the whole model.
"""

import os
import tempfile

import pytest
import torch
from torch import nn

import sparsefn as sf

by_block, in_order = sf.calibration.by_block, sf.calibration.in_order
WIDTH = 64


def wanda(stats):
    return sf.one_shot(0.5, sf.scores.wanda(stats), where=list(stats))


def net(layers):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
    )


def left_in(folder):
    # torch's, where it is loaded
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor")]


def globs(layers):
    return [f"{i}.*" for i in range(layers)]


@pytest.mark.parametrize(
    ("inputs_from", "progress", "passes", "last"),
    [("pruned", False, 2, 1), ("pruned", True, 2, 2), ("dense", True, 1, 1)],
)
@pytest.mark.parametrize("layers", [2, 7])
def test_each_layer_runs_a_fixed_number_of_times(
    layers, inputs_from, progress, passes, last
):
    model, counts = net(layers), {}
    for path, part in model.named_modules():
        part.register_forward_hook(
            lambda part, args, out, path=path: counts.update(
                {path: counts.get(path, 0) + 1}
            )
        )
    options = {
        "of": "square",
        "chunk_size": 1,
        "inputs_from": inputs_from,
        "progress": progress,
    }
    in_order(model, None, globs(layers), wanda, torch.randn(4, WIDTH), **options)
    # And, of one example, in the model, for the statistics, and, the first of a kind,
    # as it runs when it is pruned. Nobody wants the outputs of the pruned last one,
    # unless its error is shown.
    middle = [4 * passes + 2] * (layers - 2)
    assert [counts[f"{i}.0"] for i in range(layers)] == [
        4 * passes + 3,
        *middle,
        4 * last + 2,
    ]


def test_on_disk_everything_has_the_same_bits_and_the_folder_goes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, x, held = net(3), torch.randn(32, WIDTH), []

    def prune(stats):
        held.append(sum(len(files) for _, _, files in os.walk(tmp_path)))
        return wanda(stats)

    options = {"of": "square", "chunk_size": 16}
    state = in_order(model, None, globs(3), prune, x, offload="disk", **options)
    assert sf.checkpoint.tree_equal(
        state, in_order(model, None, globs(3), wanda, x, **options)
    )
    # the inputs of a layer, for each of two calls
    assert held == [2] * 3 and not left_in(tmp_path)
    *_, last = by_block(model, None, globs(3), prune, x, offload="disk", **options)
    # and its outputs, for the errors
    assert sf.checkpoint.tree_equal(state, last.state) and held[3:] == [2 * 2] * 3


def test_the_folder_goes_with_an_error_and_with_a_loop_that_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, x = net(3), torch.randn(32, WIDTH)
    with pytest.raises(ZeroDivisionError):
        in_order(model, None, globs(3), lambda stats: 1 / 0, x, offload="disk")
    assert not left_in(tmp_path)
    steps = by_block(model, None, globs(3), wanda, x, of="square", offload="disk")
    first = next(steps)
    assert len(left_in(tmp_path)) == 1
    steps.close()
    assert not left_in(tmp_path)
    # The state says how far it came.
    state = in_order(model, first.state, globs(3)[1:], wanda, x, of="square")
    assert sf.checkpoint.tree_equal(
        state, in_order(model, None, globs(3), wanda, x, of="square")
    )


def test_a_full_disk_is_an_error_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, x, make = net(3), torch.randn(32, WIDTH), tempfile.mkstemp
    steps = by_block(model, None, globs(3), wanda, x, of="square", offload="disk")
    first = next(steps)

    def full(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    with pytest.raises(OSError, match="No space left"):
        next(steps)
    monkeypatch.setattr(tempfile, "mkstemp", make)
    assert not left_in(tmp_path)
    state = in_order(
        model, first.state, globs(3)[1:], wanda, x, of="square", offload="disk"
    )
    assert sf.checkpoint.tree_equal(
        state, in_order(model, None, globs(3), wanda, x, of="square")
    )


class Early(nn.Module):
    """Leaves out or turns round layers where the first entry says so."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        layers = list(self.layers)
        for layer in layers if x[0, 0] > 0 else layers[::-1]:
            x = layer(x)
        return x


def test_a_model_that_changes_its_way_is_run_as_a_whole():
    model, x = Early(), torch.rand(4, 4) * torch.tensor([1.0, 1.0, -1.0, 1.0])[:, None]
    blocks = [f"layers.{i}.*" for i in range(3)]
    with pytest.warns(
        UserWarning, match=r"'layers\.2' is called where 'layers\.0' was before"
    ):
        *_, last = steps = list(
            by_block(model, None, blocks, wanda, x, of="square", chunk_size=1)
        )
    state = sf.dense().init(sf.modules.params_of(model))
    for block in blocks:
        state = in_order(model, state, [block], wanda, x, of="square", chunk_size=1)
    assert sf.checkpoint.tree_equal(last.state, state) and all(
        done.why for done in steps
    )


class Forgets(nn.Module):
    """Returns a pair for some inputs, and goes on with its first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Pairs(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


class Pairs(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return (out, None) if len(x) == 1 else out


def test_what_is_pruned_stays_so_where_the_rest_needs_the_whole_model():
    model, x, blocks = Forgets(), torch.randn(3, 4), [f"layers.{i}.*" for i in range(3)]
    with pytest.warns(
        UserWarning, match=r"'layers\.0' does not always return the same"
    ):
        *_, last = steps = list(
            by_block(model, None, blocks, wanda, x, of="square", chunk_size=2)
        )
    assert [bool(done.why) for done in steps] == [False, True, True]
    state = sf.dense().init(sf.modules.params_of(model))
    for block in blocks:
        stats = {}
        for part in (x[:2], x[2:]):
            new = sf.calibration.inputs(model, state, part, paths=block, of="square")
            stats = (
                {p: {k: s[k] + new[p][k] for k in s} for p, s in stats.items()}
                if stats
                else new
            )
        own = wanda(stats).init({path: state.params[path] for path in stats})
        own = wanda(stats).update(own, own.params, 0)
        state = state._replace(
            params=state.params | own.params, masks=state.masks | own.masks
        )
    assert sf.checkpoint.tree_equal(last.state, state)


def test_random_outputs_are_no_chain():
    class Noise(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5, self.training)

    model = nn.Sequential(nn.Linear(4, 4), Noise(), nn.Linear(4, 4))
    with pytest.warns(
        UserWarning, match=r"'2\.weight' gets other inputs where parts run one by one"
    ):
        in_order(model, None, ["0.*", "2.*"], wanda, torch.randn(8, 4), of="square")
    in_order(model.eval(), None, ["0.*", "2.*"], wanda, torch.randn(8, 4), of="square")
