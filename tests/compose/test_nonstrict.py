"""Updates that the compiler runs instead of reading: the same bits, one call in the graph, what cannot work refused."""

import collections
import sys

import optree
import pytest
import torch
from torch._dynamo import lookup_backend

import sparsefn as sf
from sparsefn.engine.surroundings.older import HIDES_COMPILING
from sparsefn.testing.harness import assert_same

module = sys.modules["sparsefn.compose.nonstrict"]  # the package has the function under this name

pytestmark = pytest.mark.skipif(HIDES_COMPILING, reason="does nothing before torch 2.13")


def tree(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(8, 8, generator=generator), "b": torch.randn(8, generator=generator)}


def made(when=None, rate=1e-2):
    return sf.with_optimizer(sf.rigl(0.5, when=when or sf.every(2), init="magnitude"), sf.optimizers.adam(rate))


class Graphs:
    """The backend aot_eager; it notes how many functions each graph calls, but for those that take a result apart."""

    def __init__(self):
        self.calls = []

    def __call__(self, graph, inputs):
        names = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
        run = lookup_backend("aot_eager")(graph, inputs)  # raises where the compiler starts anew
        self.calls.append(len([name for name in names if "getitem" not in name]))
        return run


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_every_step_has_the_bits_of_the_algorithm(kind):
    algorithm, graphs = made(), Graphs()
    update = torch.compile(sf.nonstrict(algorithm).update, fullgraph=True, backend=graphs)
    state = pure = algorithm.init(tree(0))
    for step in range(6):
        state, pure = update(state, tree(step), kind(step)), algorithm.update(pure, tree(step), step)
        assert_same(f"step {step}", state, pure)
    assert len(graphs.calls) == (2 if kind is int else 1)  # the first int is a constant


def test_the_graph_has_the_update_as_one_call():
    read, run = Graphs(), Graphs()
    for backend, algorithm in ((read, made()), (run, sf.nonstrict(made()))):
        update = torch.compile(algorithm.update, fullgraph=True, backend=backend)
        update(algorithm.init(tree(0)), tree(1), torch.tensor(1))
    assert run.calls == [3]  # two named tuples, and the update
    assert read.calls[0] > 100


def test_algorithms_of_one_code_are_told_apart():
    algorithms = [made(sf.never()), made(sf.always()), made(sf.never(), 0.5)]
    updates = [torch.compile(sf.nonstrict(x).update, fullgraph=True, backend="aot_eager") for x in algorithms]
    for _ in range(2):
        for algorithm, update in zip(algorithms, updates, strict=True):
            state = algorithm.init(tree(0))
            want = algorithm.update(state, tree(1), 1)
            assert_same("states", want, update(state, tree(1), torch.tensor(1)))


def test_a_whole_training_step_in_one_graph():
    x, y = torch.randn(5, 8, generator=torch.Generator().manual_seed(2)), torch.ones(5)

    def loss(params):
        return ((x @ params["w"] @ params["b"] - y) ** 2).mean()

    def training(algorithm):
        def step(state, at):
            value, grads = sf.modules.value_and_grad(loss)(sf.effective(state))
            return algorithm.update(state, grads, at), value

        return step

    run = torch.compile(training(sf.nonstrict(made())), fullgraph=True, backend="aot_eager")
    state = pure = made().init(tree(0))
    for step in range(4):
        (state, value), (pure, want) = run(state, torch.tensor(step)), training(made())(pure, step)
        assert torch.equal(value, want)
        assert_same(f"step {step}", state, pure)


def test_gradients_flow_through_it():
    plain = sf.with_optimizer(sf.static(0.5), sf.optimizers.sgd(0.1))
    state = plain.init(tree(0))

    def later(weight, algorithm):
        grads = {"w": weight.cos(), "b": state.params["b"]}
        params = {"w": weight, "b": state.params["b"]}
        return (algorithm.update(state._replace(params=params), grads, torch.tensor(1)).params["w"] ** 2).sum()

    weight, algorithm = state.params["w"].clone().requires_grad_(), sf.nonstrict(plain)
    torch.compile(later, fullgraph=True, backend="aot_eager")(weight, algorithm).backward()
    slopes = torch.compile(
        lambda weight: torch.func.grad(later)(weight, algorithm), fullgraph=True, backend="aot_eager"
    )
    want = torch.func.grad(later)(state.params["w"], plain)
    assert torch.equal(weight.grad, want)
    assert torch.equal(slopes(state.params["w"]), want)


def test_arguments_stay_as_they_were():
    algorithm = sf.nonstrict(made(sf.always()))
    state, grads = algorithm.init(tree(0)), tree(1)
    before = optree.tree_map(torch.clone, (state, grads))
    torch.compile(algorithm.update, fullgraph=True, backend="aot_eager")(state, grads, 1)
    assert_same("arguments", before, (state, grads))


def test_trees_of_lists_tuples_and_named_tuples():
    pair = collections.namedtuple("pair", ["left", "right"])
    params = [tree(0)["w"], (tree(1)["w"], {"b": tree(1)["b"]}), pair(tree(2)["w"], [])]
    algorithm = sf.nonstrict(sf.gmp(0.5))
    state = algorithm.init(params)
    got = torch.compile(algorithm.update, fullgraph=True, backend="aot_eager")(state, None, 1)
    assert_same("states", got, algorithm.update(state, None, 1))
    assert type(got.params[2]) is pair


def test_eager_and_exported_it_does_nothing(monkeypatch):
    def refuse(*_):
        raise AssertionError("traced")

    monkeypatch.setattr(module, "_check_containers", refuse)
    plain, algorithm = made(), sf.nonstrict(made())
    state = plain.init(tree(0))
    want = plain.update(state, tree(1), 2)
    assert_same("eager", algorithm.update(state, tree(1), 2), want)

    class Update(torch.nn.Module):
        def forward(self, state, grads, step):
            return algorithm.update(state, grads, step)

    args = (state, tree(1), torch.tensor(2))
    assert_same("exported", torch.export.export(Update(), args).module()(*args), want)


def test_older_torch_reads_the_code(monkeypatch):
    monkeypatch.setattr(module, "HIDES_COMPILING", True)
    algorithm, graphs = sf.nonstrict(made()), Graphs()
    torch.compile(algorithm.update, fullgraph=True, backend=graphs)(algorithm.init(tree(0)), tree(1), torch.tensor(1))
    assert graphs.calls[0] > 100


# ---- what is refused ------------------------------------------------------------------------------


def test_no_algorithm():
    with pytest.raises(TypeError, match="nonstrict: expected an Algorithm, got State"):
        sf.nonstrict(made().init(tree(0)))


def test_another_container():
    algorithm = sf.nonstrict(sf.gmp(0.5))
    state = algorithm.init({"layer": collections.OrderedDict(tree(0))})
    with pytest.raises(Exception, match="tuples and named tuples, got OrderedDict at 'state.params.layer'"):
        torch.compile(algorithm.update, fullgraph=True, backend="aot_eager")(state, None, 1)


def test_tensors_from_outside():
    algorithm = sf.nonstrict(sf.phases([(0, sf.dense()), (2, sf.static(0.5, key=sf.random.key(1)))]))
    state = algorithm.init(tree(0))
    with pytest.raises(RuntimeError, match="nonstrict: expected an update that reads no tensors but those of its arg"):
        torch.compile(algorithm.update, fullgraph=True, backend="aot_eager")(state, None, torch.tensor(1))


def test_other_errors_of_an_update_stay_what_they_are():
    def update(state, grads, step):
        raise AssertionError("mine")

    algorithm = sf.nonstrict(sf.gmp(0.5)._replace(update=update))
    with pytest.raises(RuntimeError, match="mine"):
        torch.compile(algorithm.update, fullgraph=True, backend="aot_eager")(algorithm.init(tree(0)), None, 1)
