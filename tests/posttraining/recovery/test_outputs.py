"""What layers inside of a model return."""

import re

import pytest
import torch
from posttraining.calibration import tiny_lms
from torch import nn

import sparsefn as sf

outputs = sf.recovery.outputs
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def net():
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 8), inner, nn.Linear(8, 2))


def refused(kind, text, call, *args, **kwargs):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call(*args, **kwargs)


def test_what_layers_return_at_any_depth():
    model = net()
    params = {
        path: 2 * leaf.detach() for path, leaf in sf.modules.params_of(model).items()
    }
    result, found = outputs(model, params, X, paths=["1.0", "0", "1"])
    assert torch.equal(result, sf.modules.call(model, params, X))
    assert list(found) == ["1.0", "0", "1"]
    first = nn.functional.linear(X, params["0.weight"], params["0.bias"])
    assert torch.equal(found["0"], first)
    assert torch.equal(found["1.0"].relu(), found["1"])


def test_a_state_gives_effective_weights():
    model = net()
    state = sf.one_shot(0.5).init(sf.modules.params_of(model))
    state = sf.one_shot(0.5).update(state, state.params, 0)
    _, found = outputs(model, state, X, paths=["0"])
    _, baked = outputs(sf.modules.bake(model, state), None, X, paths=["0"])
    assert torch.equal(found["0"], baked["0"])


def test_nothing_is_left_in_the_module():
    model = net()
    model[1].register_forward_hook(lambda part, args, out: 2 * out)
    parts = list(model.modules())
    hooks = [dict(part._forward_hooks) for part in parts]
    held = [set(vars(part)) for part in parts]
    before = {path: leaf.clone() for path, leaf in model.state_dict().items()}
    _, found = outputs(model, None, X, paths=["1", "1.0"])
    assert torch.equal(found["1"], 2 * found["1.0"].relu())  # as others see it
    with pytest.raises(RuntimeError):
        outputs(model, None, X[:, :3], paths=["1"])
    assert [dict(part._forward_hooks) for part in parts] == hooks
    assert [set(vars(part)) for part in parts] == held
    assert sf.checkpoint.tree_equal(dict(model.state_dict()), before)


def test_gradients_flow_through_what_is_inside():
    model = net()
    params = sf.modules.params_of(model)

    def inside(params):
        return outputs(model, params, X, paths=["1"])[1]["1"].sum()

    found = torch.func.grad(inside)(params)
    assert found["0.weight"].any() and found["1.0.weight"].any()
    assert not found["2.weight"].any()
    assert all(p.grad is None for p in model.parameters())
    outputs(model, None, X, paths=["1"])[1]["1"].sum().backward()
    assert torch.equal(model[0].weight.grad, found["0.weight"])


def test_under_vmap():
    model = net()
    params = sf.modules.params_of(model)
    both = {path: torch.stack([leaf, 2 * leaf]) for path, leaf in params.items()}
    _, found = torch.vmap(lambda p: outputs(model, p, X, paths=["0"]))(both)
    _, alone = outputs(model, params, X, paths=["0"])
    torch.testing.assert_close(found["0"], torch.stack([alone["0"], 2 * alone["0"]]))


@pytest.mark.deep
def test_compiled():
    model = net()

    @torch.compile(backend="eager")
    @torch.no_grad()
    def run(x):
        return outputs(model, None, x, paths=["1"])[1]["1"]

    assert torch.equal(run(X), outputs(model, None, X, paths=["1"])[1]["1"])


def test_a_wrapped_module_has_the_paths_of_its_own():
    model = net()
    wrapped = nn.DataParallel(model)
    _, found = outputs(wrapped, None, X, paths=["1.0"])
    assert torch.equal(found["1.0"], outputs(model, None, X, paths=["1.0"])[1]["1.0"])


@pytest.mark.parametrize("make", [tiny_lms.llama, tiny_lms.gpt2])
def test_hidden_states_of_transformers(make):
    torch.manual_seed(0)
    model = make().eval()
    ids = tiny_lms.WORDS
    head = "model.layers" if make is tiny_lms.llama else "transformer.h"
    paths = [f"{head}.{i}" for i in range(3)]
    result, found = outputs(
        model, None, paths=paths, input_ids=ids, output_hidden_states=True
    )
    for path, theirs in zip(paths[:-1], result.hidden_states[1:], strict=False):
        assert torch.equal(found[path], theirs)


def test_of_a_layer_that_runs_several_times_the_last_output_is_given():
    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.layer(x))

    result, found = outputs(Looped(), None, X, paths=["layer"])
    assert torch.equal(result, found["layer"])


def test_paths_that_do_not_fit():
    model = net()
    with pytest.raises(
        ValueError, match=r"a layer of the \w+, such as '1.*', got '1.2'$"
    ):
        outputs(model, None, X, paths=["1.2"])
    text = (
        "outputs: expected paths to be a list of paths of layers, got '1': write "
        "paths=['1']"
    )
    refused(TypeError, text, outputs, model, None, X, paths="1")
    text = (
        "outputs: expected a State, params or None second, got a Tensor: for the "
        "module's own parameters write outputs(module, None, x, paths=[...])"
    )
    refused(TypeError, text, outputs, model, X, paths=["1"])

    class Skips(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    skips = Skips(nn.Linear(4, 2), nn.Linear(4, 2), nn.Flatten())
    text = "outputs: expected a forward that calls the layer '1', but it did not"
    refused(ValueError, text, outputs, skips, None, X, paths=["1"])
    inside = nn.Sequential(skips)
    text = (
        "outputs: expected a forward that calls the layer '0.1', but it did not: ask "
        "for one that it calls, perhaps '0'"
    )
    refused(ValueError, text, outputs, inside, None, X, paths=["0.1"])

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            return self.layers[0](x)

    text = (
        "outputs: expected a forward that calls the layer 'layers', but it did not: "
        "ask for one that it calls, perhaps 'layers.0'"
    )
    refused(ValueError, text, outputs, Listed(), None, X, paths=["layers"])

    class Counts(nn.Module):
        def forward(self, x):
            return x.argmax(-1)

    text = "outputs: expected a floating-point tensor from the layer '1', got Tensor"
    counts = nn.Sequential(nn.Linear(4, 2), Counts())
    refused(ValueError, text, outputs, counts, None, X, paths=["1"])
    text = (
        "outputs: expected a module first, as in outputs(module, None, x, "
        "paths=[...]), got dict"
    )
    refused(TypeError, text, outputs, {}, None, X, paths=["1"])
