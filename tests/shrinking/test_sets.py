"""Units of tied sets are cut out of all their layers; submodules are followed by themselves."""

import pytest
import torch
from torch import nn

import sparsefn as sf

MLP = sf.tied([["*.up.weight", 0], ["*.down.weight", 1]])


class Conv1D(nn.Module):
    """As in transformers: `x @ weight + bias`."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).reshape(*x.shape[:-1], self.nf)


class Block(nn.Module):
    def __init__(self, conv=False):
        super().__init__()
        self.up, self.down = (Conv1D(6, 4), Conv1D(4, 6)) if conv else (nn.Linear(4, 6), nn.Linear(6, 4))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """A forward that torch.fx cannot follow."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if x.sum() > -1e9 else x
        return x


def pruned(net, pattern=MLP, sparsity=0.5):
    params = sf.modules.params_of(net)
    algorithm = sf.one_shot(sparsity, pattern=pattern)
    return algorithm.update(algorithm.init(params), params, 0)


def same(net, state, only):
    small, x = sf.shrink(net, state, only=only), torch.randn(3, 5, 4)
    assert list(small.state_dict()) == list(net.state_dict())
    torch.testing.assert_close(small(x), sf.modules.call(net, state, x), atol=1e-6, rtol=1e-6)
    return small


@pytest.mark.parametrize("only", [MLP, [MLP], "blocks.?", ["blocks.0", "blocks.1"], "blocks.*"])
def test_parts_of_a_module_get_smaller_where_the_whole_cannot_be_followed(only):
    net = Net(Block(), Block())
    state = pruned(net)
    small = same(net, state, only)
    for block in small.blocks:
        assert block.up.weight.shape == (3, 4) and block.up.bias.shape == (3,) and block.down.weight.shape == (4, 3)
        assert block.up.out_features == block.down.in_features == 3
    with pytest.raises(ValueError, match="expected a Net that torch.fx can follow"):
        sf.shrink(net, state)


def test_an_empty_list_of_parts_shrinks_nothing():
    net = Net(Block())
    assert same(net, pruned(net), []).blocks[0].up.out_features == 6


def test_conv1d_of_transformers_has_its_outputs_in_columns():
    net = Net(Block(conv=True))
    mlp = sf.tied([["*.up.weight", 1], ["*.up.bias", 0], ["*.down.weight", 0]])
    small = same(net, pruned(net, mlp), mlp)
    assert (small.blocks[0].up.nf, small.blocks[0].up.nx, small.blocks[0].down.nx) == (3, 4, 3)


def test_what_is_read_decides_and_one_unit_stays():
    net = Net(Block())
    state = pruned(net)
    masks = dict(state.masks)
    rows = masks["blocks.0.up.weight"]
    masks["blocks.0.up.weight"] = torch.tensor(True)  # rows that nothing reads go, whatever they hold
    assert same(net, sf.State(state.params, masks), MLP).blocks[0].up.out_features == 3
    masks |= {"blocks.0.up.weight": rows, "blocks.0.down.weight": torch.tensor(True)}
    with pytest.warns(UserWarning, match="'blocks.0.up.weight' keeps 3 of 3 pruned units: weights on them are kept"):
        assert same(net, sf.State(state.params, masks), MLP).blocks[0].up.out_features == 6
    with pytest.warns(UserWarning, match=r"'blocks\.0\.up\.weight' keeps 1 of 6 pruned units: one unit always stays"):
        assert same(net, pruned(net, sparsity=1.0), MLP).blocks[0].up.out_features == 1


def test_pruned_channels_that_stay_are_named_with_their_module():
    net = Net(Block())
    rows = sf.one_shot(0.5, pattern=sf.patterns.channel(0), where="*.down.weight")
    params = sf.modules.params_of(net)
    state = rows.update(rows.init(params), params, 0)
    with pytest.warns(UserWarning, match=r"'blocks\.0\.down' keeps 2 of 2 pruned channels"):
        sf.shrink(net, state, only="blocks.*")
    with pytest.warns(UserWarning, match=r"'blocks\.0\.down' keeps 2 of 2 pruned channels: they are outputs"):
        sf.shrink(net, state, only="*.down")


def test_parts_may_cut_one_leaf():
    net = Net(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
    ties = [
        sf.tied([["*.0.weight", 0], ["*.2.weight", 1]]),
        sf.tied([["*.2.weight", 0], ["*.2.bias", 0], ["*.4.weight", 1]]),
    ]
    algorithm, params = sf.chain(*[sf.one_shot(0.5, pattern=one) for one in ties]), sf.modules.params_of(net)
    state = algorithm.update(algorithm.init(params), params, 0)
    for only in (ties, ties[::-1], [ties[0], "blocks.*"], [ties[1], "blocks.*"]):
        block = same(net, state, only).blocks[0]
        assert [tuple(block[i].weight.shape) for i in (0, 2, 4)] == [(3, 4), (4, 3), (4, 4)]
    state = pruned(Net(Block()))
    assert same(Net(Block()), state, ["blocks.0", MLP]).blocks[0].up.weight.shape == (3, 4)


def test_other_layers_shared_weights_and_half_a_set_are_refused():
    net = Net(Block())
    state = pruned(net)
    with pytest.raises(ValueError, match="only: no path matches 'layers'; the paths are 'blocks', 'blocks.0'"):
        sf.shrink(net, state, only="layers")
    for other in ([sf.patterns.channel(0)], net.blocks[0], False, {"blocks.0"}):
        with pytest.raises(TypeError, match="expected only to be globs of submodules, or tied sets such as sf.tied"):
            sf.shrink(net, state, only=other)
    with pytest.raises(ValueError, match="expected a member of the tied set of 'blocks.0.up.weight' that reads its"):
        sf.shrink(net, state, only=sf.tied([["*.up.weight", 0]]))
    with pytest.raises(ValueError, match="expected a member of the tied set of 'blocks.0.down.weight' that makes its"):
        sf.shrink(net, state, only=sf.tied([["*.down.weight", 1]]))
    with pytest.raises(
        ValueError, match=r"no dimension of a leaf in common, but two of them cut dimension 0 of 'blocks\."
    ):
        sf.shrink(net, state, only=[MLP, MLP])
    norm = Net(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)))
    ties = sf.tied([["*.0.weight", 0], ["*.1.weight", 0], ["*.2.weight", 1]])
    with pytest.raises(ValueError, match=r"but 'blocks\.0\.1\.weight' is the weight of a LayerNorm"):
        sf.shrink(norm, pruned(norm, ties), only=ties)
    shared = Net(Block(), Block())
    shared.blocks[1].up.weight = shared.blocks[0].up.weight
    state = pruned(shared, sf.tied([["blocks.0.up.weight", 0], ["blocks.0.down.weight", 1]]))
    with pytest.raises(ValueError, match=r"'blocks\.0\.up\.weight' to have its weights alone, but it shares them with"):
        sf.shrink(shared, state, only=MLP)
    with pytest.raises(ValueError, match=r"'blocks\.0' to have its parameters alone, but it shares 'blocks\.1\.up"):
        sf.shrink(shared, state, only="blocks.0")


def test_the_module_and_the_state_stay_what_they_were():
    net = Net(Block())
    state = pruned(net)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    sf.shrink(net, state, only=MLP)
    assert sf.checkpoint.tree_equal(dict(net.state_dict()), before) and net.blocks[0].up.out_features == 6
