"""One block with the calls that it gets."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration import cache
from sparsefn.posttraining.calibration.blocks import Block, PruneOptions, prune_part
from sparsefn.posttraining.calibration.cache import cache_tree, read_tree

NAMES = {
    "0.weight": "7.up.weight",
    "0.bias": "7.up.bias",
    "2.weight": "7.down.weight",
    "2.bias": "7.down.bias",
}
in_memory = partial(cache_tree, cache=cache.in_memory)
UP = Block("up", ["7.up.weight"])
DOWN = Block("down", ["7.down.weight"])


def part():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def named(block):
    own = Named.of(block).own
    return Named(block, {NAMES.get(name, name): at for name, at in own.items()})


def started(block):
    return sf.dense().init(
        {NAMES[name]: x.detach() for name, x in block.named_parameters()}
    )


def wanda(stats):
    return sf.one_shot(0.5, sf.scores.wanda(stats), where=list(stats))


def pruned(block, state, blocks, x, cache=in_memory, tokens=()):
    results, outputs = prune_part(
        named(block),
        state,
        blocks,
        lambda: (((one,), {}) for one in x),
        PruneOptions(wanda, ["square"], tokens=tokens),
        cache,
    )
    return results, [read_tree(out) for out in outputs]


def run(state, block, x):
    weights = sf.effective(state)
    return torch.func.functional_call(
        block, {name: weights[path] for name, path in NAMES.items()}, x
    ).detach()


def test_it_is_pruned_in_parts_and_its_outputs_are_those_of_the_pruned_one():
    block, x = part(), torch.randn(3, 8, 6)
    start = started(block)
    (up, down), outputs = pruned(block, start, [UP, DOWN], x)
    assert all(
        torch.equal(out, run(down.state, block, one))
        for out, one in zip(outputs, x, strict=True)
    )
    assert (
        up.state.masks["7.up.weight"].sum() == 24
        and up.state.masks["7.down.weight"].ndim == 0
    )
    states = (start, up.state, down.state)
    outs = [torch.stack([run(state, block, one) for one in x]) for state in states]
    for done, before, after in zip((up, down), outs, outs[1:], strict=False):
        assert done.error == pytest.approx(
            float((after - before).norm() / before.norm()), rel=1e-5
        )
        assert done.seconds > 0 and not done.why
    # the inputs of the second are those out of the pruned first
    alone, _ = pruned(block, up.state, [DOWN], x)
    assert sf.checkpoint.tree_equal(alone[0].state, down.state)


def test_from_dense_inputs_it_runs_once():
    block, x, calls = part(), torch.randn(3, 8, 6), []

    def counted():
        calls.append(1)
        return [((one,), {}) for one in x]

    start = started(block)
    options = PruneOptions(wanda, ["square"], inputs_from="dense")
    results, outputs = prune_part(named(block), start, [UP, DOWN], counted, options)
    outputs = [read_tree(out) for out in outputs]
    assert len(calls) == 1 and [done.error for done in results] == [None, None]
    assert all(
        torch.equal(out, run(start, block, one))
        for out, one in zip(outputs, x, strict=True)
    )
    one, _ = pruned(block, start, [DOWN], x)
    assert torch.equal(
        one[0].state.masks["7.down.weight"], results[1].state.masks["7.down.weight"]
    )


def test_it_runs_and_keeps_no_more_than_is_wanted():
    block, x, calls, kept = part(), torch.randn(3, 8, 6), [], []

    def counted():
        calls.append(1)
        return [((one,), {}) for one in x]

    def keep(out):
        kept.append(out)
        return in_memory(out)

    def asked(cache, **options):
        calls.clear()
        kept.clear()
        return prune_part(
            named(block),
            started(block),
            [UP, DOWN],
            counted,
            PruneOptions(wanda, ["square"], **options),
            cache,
        )

    results, outputs = asked(cache=keep)
    assert len(calls) == 3 and len(kept) == 9 and all(done.error for done in results)
    few, others = asked(cache=keep, errors=False)
    assert (
        len(calls) == 3
        and len(kept) == 3
        and [done.error for done in few] == [None, None]
    )
    assert all(
        torch.equal(read_tree(one), read_tree(other))
        for one, other in zip(outputs, others, strict=True)
    )
    assert asked(cache=None)[1] == [] and len(calls) == 2
    none, _ = asked(cache=None, inputs_from="dense")
    assert len(calls) == 1 and len(none) == 2
    assert sf.checkpoint.tree_equal(results[-1].state, few[-1].state)


def test_a_part_without_blocks_only_runs():
    block, x = part(), torch.randn(2, 8, 6)
    results, outputs = pruned(block, started(block), [], x)
    assert not results and all(
        torch.equal(out, block(one)) for out, one in zip(outputs, x, strict=True)
    )


def test_outputs_are_kept_as_asked():
    block, x, kept = part(), torch.randn(2, 8, 6), []

    def keep(out):
        kept.append(out)
        return in_memory(out)

    (done,), outputs = pruned(block, started(block), [UP], x, cache=keep)
    assert len(kept) == 4 and outputs[1] is kept[3]
    assert torch.equal(outputs[1], run(done.state, block, x[1]))


def test_tokens_that_do_not_count_are_left_out():
    block, x = part(), torch.randn(2, 8, 6)
    tokens = torch.rand(2, 8) < 0.7
    seen = []

    def noted(stats):
        seen.append(stats)
        return wanda(stats)

    calls = [((one,), {}) for one in x]
    prune_part(
        named(block),
        started(block),
        [UP, DOWN],
        lambda: calls,
        PruneOptions(noted, ["gram"], tokens=list(tokens)),
    )
    rows = x[tokens]
    assert int(seen[0]["7.up.weight"]["count"]) == int(tokens.sum())
    assert torch.allclose(
        seen[0]["7.up.weight"]["square"], rows.double().square().sum(0)
    )
    assert torch.allclose(
        seen[0]["7.up.weight"]["gram"], rows.T @ rows, rtol=1e-4, atol=1e-5
    )


def test_inputs_that_are_not_finite_name_the_block_and_the_layer():
    block, x = part(), torch.randn(2, 8, 6)
    x[1, 3, 2] = torch.nan
    text = (
        r"in_order, block 'up': expected finite inputs of '7\.up\.weight' \(Linear\), "
        r"got NaN or infinity in sums"
    )
    with pytest.raises(ValueError, match=text):
        pruned(block, started(block), [UP], x)
    block.forward = lambda x: block[0](x)
    with pytest.raises(
        ValueError,
        match=r"no data for the leaf '7\.down\.weight': no input .* reached it",
    ):
        pruned(block, started(block), [DOWN], x)
    with pytest.raises(
        ValueError, match="no product was seen with a leaf of the block 'up'"
    ):
        pruned(block, started(block), [UP], x[:0])


def test_errors_are_those_of_the_tokens_that_count():
    block, x, tokens = part(), torch.randn(2, 8, 6), torch.arange(8).lt(5).expand(2, 8)
    (padded,), _ = pruned(
        block,
        started(block),
        [UP],
        x.where(tokens[..., None], 1e4),
        tokens=list(tokens),
    )
    (alone,), _ = pruned(block, started(block), [UP], x[:, :5])
    assert sf.checkpoint.tree_equal(
        padded.state, alone.state
    ) and padded.error == pytest.approx(alone.error, rel=1e-4)


def test_a_leaf_that_is_not_seen_is_told_but_for_tables():
    class Looked(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.up, self.other = nn.Linear(6, 6), kind

        def forward(self, x):
            return self.up(x)

    for kind, told in [(nn.Embedding(3, 6), False), (nn.Bilinear(6, 6, 2), True)]:
        block = Looked(kind)
        state, chosen = (
            sf.dense().init(sf.modules.params_of(block)),
            ["up.weight", "other.weight"],
        )
        run = [
            named(block),
            state,
            [Block("*", chosen)],
            lambda: [((torch.randn(8, 6),), {})],
            PruneOptions(wanda, ["square"]),
        ]
        text = (
            r"in_order: no product was seen with 'other.weight' \(Bilinear\), so it "
            r"stays dense"
        )
        with (
            pytest.warns(UserWarning, match=text) if told else contextlib.nullcontext()
        ):
            (done,), _ = prune_part(*run)
        assert (
            done.state.masks["up.weight"].ndim
            and not done.state.masks["other.weight"].ndim
        )
