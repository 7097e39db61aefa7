"""What a factory makes reads like the call that made it, and pickles as that call."""

import builtins
import copy
import inspect
import pickle
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsefn as sf
from property_tests.test_described import SHOWN
from sparsefn.core.checks.factories import (
    Call,
    Described,
    Made,
    described,
    shown,
    with_call,
)
from sparsefn.masks.budgets.distributions import Global


def loss(params: Any, x: Tensor) -> Tensor:
    return (params["w"] * x).sum()


def doubled(state: Any, grads: Any, step: Any) -> Any:
    return sf.tree.map_with_path(lambda path, leaf: 2 * leaf.abs(), state.params)


def signs(path: str, weight: Tensor, mask: Tensor, step: Any) -> tuple[Tensor, Tensor]:
    return weight.sign(), mask


def solver(weight: Tensor, gram: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return weight * mask, mask


# Factories of the public names that no row of the registry shows, by module, and some
# that one shows: what each makes is shown as the call is written here.
CALLS = {
    sf: [
        "always()",
        "at([1, 3])",
        "captured(rigl(0.5))",
        "chain(static(0.5, key=tensor([0, 7])), one_shot(0.75))",
        "dense()",
        "donated(rigl(0.5))",
        "tied([['*.up.weight', 0], ['*.down.weight', 1, 2]], reduce='max')",
        "drop_grow(0.5, drop=magnitude, grow=ema(gradient, 0.5), "
        "redistribute=mean_active)",
        "every(10, stop=30)",
        "from_masks({'w': tensor([True, False])})",
        "gmp(polynomial(0.0, 0.5, begin=0, end=2), score=doubled, pattern=nm(2, 4, "
        "axis=-1))",
        "iterative(count=3, distribution=global_(floor=0.1))",
        "never()",
        "one_shot(0.5, saliency, pruned='keep')",
        "partition([('head.*', dense()), (['*.weight'], static(0.5))])",
        "phases([(0, static(0.5, init='magnitude')), (2, dense())])",
        "policy_masks(nm(1, 2, axis=-1), scale=1.0)",
        "reparametrised(soft_threshold(init=0.0), set(0.5))",
        "rewrite(signs, when=at([0]), pruned='train')",
        "rewinding(dense(), to=at([2]), when=every(5))",
        "rigl(0.9, when=every(100))",
        "sequence(gmp(0.5), rigl('current'))",
        "set(0.5, redistribute=Redistribute(active, score=gradient, rate=careful()))",
        "snfs(tensor(0.9), grow=momentum(0.5))",
        "static(0.5, distribution=erk())",
        "ste(tensor(0.9, dtype=float64))",
        "supermask(0.5, mode='joint')",
        "with_dense_gradients(static(0.5))",
        "with_optimizer(rigl(0.9), sgd(0.1, momentum=0.9), skip=at([0]))",
        "with_terms(dense(), l2(0.1), noise(0.1, tensor([0, 7])))",
    ],
    sf.activations: [
        "activation_sparsifier(add, abs, isfinite, features=(0, 2), axis=1)"
    ],
    sf.budgets: [
        "at_least(erk(), 3)",
        "in_multiples(erk(), 8, equal_across=['*.up'])",
        "by_path({'head.*': 0.0})",
        "erdos_renyi()",
        "erk(power=0.5)",
        "global_(0.1)",
        "owl({'0.*': 0.01, '1.*': 0.02}, spread=0.1)",
        "uniform()",
        "uniform(True)",
    ],
    sf.counts: [
        "above(0.1, at_least=1)",
        "below(linear(0.5, 0.25), spare=1)",
        "mass(0.9)",
    ],
    sf.curvature: [
        "sensitivity(loss, (tensor([1.0, 2.0]),), at=None)",
        "fisher(loss, (tensor([1.0, 2.0]),), chunk_size=2)",
        "grasp(loss, (tensor([1.0, 2.0]),), temperature=None)",
        "hessian_diagonal(loss, (tensor([1.0, 2.0]),))",
        "obd(fisher(loss, (tensor([1.0, 2.0]),)))",
        "synflow(loss, (3, 32, 32))",
    ],
    sf.methods: [
        "grasp(0.9, loss, (tensor([1.0, 2.0]),), temperature=None)",
        "obs(0.5, {}, damp=0.1)",
        "ria(0.5, {}, power=1.0)",
        "sparsegpt(0.5, {})",
        "wanda(None, {}, pattern=nm(2, 4, axis=-1))",
        "woodfisher(0.5, {}, block=100)",
    ],
    sf.optimizers: [
        "adam(0.1, betas=(0.9, 0.99))",
        "adamw(cosine_decay(0.1, 10))",
        "by_path([('*.bias', sgd(0.1)), (['*'], adam(0.1))])",
        "parts({'scores': sgd(0.1), 'params': adamw(0.1)})",
        "sgd(tensor(0.1))",
    ],
    sf.patterns: [
        "block((2, 2), reduce='mean')",
        "channel(axis=0, norm=1)",
        "in_groups(2)",
        "kernel(reduce='max')",
        "nearly_diagonal(3)",
        "nm(2, 4, axis=-1)",
        "out_groups(2)",
        "row_balanced()",
        "row_balanced(axis=1)",
        "transposable(2, 4)",
        "unstructured()",
    ],
    sf.recovery: ["blockwise(adam(0.1), epochs=2, loss=cosine_distance)"],
    sf.redistribute: ["careful(below=0.9)"],
    sf.reparam: [
        "faded(nm(2, 4, axis=-1), 0.5, slope=1.0)",
        "gumbel_gate(0.5, scale=10.0)",
        "hard_concrete(droprate=0.1, pattern=channel(axis=0, norm=1))",
        "low_rank(8, 16.0, dropout=0.1)",
        "mask_choices(nm(1, 2, axis=-1), scale=10.0)",
        "nm_prox(0.5, nm(1, 2, axis=-1))",
        "power(2.0)",
        "sigmoid_gate(200.0, init=-0.1)",
        "soft_nm(2, 4)",
        "soft_threshold(sigmoid, init=0.0)",
        "soft_topk(0.5, 10.0)",
    ],
    sf.schedules: [
        "constant(tensor(0.9))",
        "cosine(0.3, 100)",
        "cosine_decay(0.3, steps=100)",
        "cycling([0.5, 0.8], every(10, start=10))",
        "exponential(0.0, gamma=-0.5)",
        "linear(0.5, 0.25)",
        "linear_decay(0.5, 2)",
        "piecewise({0: 0.5, 100: 0.8})",
        "polynomial(0.0, 0.8, begin=100, end=300)",
        "power(0.8, 0.5)",
    ],
    sf.scores: [
        "absolute(distance(norm=1))",
        "by_unit(magnitude, channel(axis=0, norm=1), fn=amax)",
        "distance()",
        "ema(gradient, 0.5)",
        "first_sign()",
        "mean(movement)",
        "momentum(0.9)",
        "of_units(tensor([1.0, 2.0]), tied([['a', 0], ['b', 1]], reduce='mean'))",
        "reap({'e': {'count': tensor([1, 2]), 'norm': tensor([3.0, 4.0])}}, "
        "tied([['r', 0], ['e', 0]], reduce='mean'))",
        "ria({'w': {'count': tensor(2), 'square': tensor([1.0, 2.0])}}, power=1.0)",
        "wanda({'w': {'count': tensor(2), 'square': tensor([1.0, 2.0])}})",
        "ranked(magnitude, by=sign)",
        "sampled(ema(gradient, 0.5), power=3.0)",
        "steered(every(100), 600, tau=0.01)",
        "sum(saliency, reset=every(2))",
        "topology('CH3', least=0.1)",
    ],
    sf.solve: ["layerwise({}, solver)"],
    sf.terms: [
        "l1(0.1)",
        "l2(0.1)",
        "noise(0.1, tensor([0, 7]))",
        "on('*.weight', l1(0.1))",
        "penalty(loss)",
        "pruned_decay(0.1)",
    ],
}
TEXTS = [(module, text) for module, texts in CALLS.items() for text in texts]
# Of a name that two modules have, a text means that of its own module.
NAMES = {
    name: value
    for module in (builtins, torch, sf.redistribute, sf, *CALLS, sf.scores)
    for name, value in vars(module).items()
    if not isinstance(value, ModuleType)  # `patterns.tied` is one, and a function of sf
} | {"doubled": doubled, "loss": loss, "signs": signs, "solver": solver}

# They hand on what they are given, decorate it, or choose among factories; the last is
# a transform such as torch.func.grad.
NO_FACTORIES = {
    "as_schedule",
    "level",
    "trigger",
    "from_config",
    "leafwise",
    "factory_of",
    "value_and_grad",
}
KINDS = (
    sf.Algorithm,
    sf.Accumulated,
    sf.optimizers.Optimizer,
    sf.reparam.Reparametrisation,
    sf.patterns.Pattern,
)
KINDS = (
    *KINDS,
    sf.counts.Counted,
    sf.activations.ActivationSparsifier,
    Global,
    sf.triggers.Every,
    sf.triggers.At,
)
HELPERS = {"described", "with_call"}
MODULES = [
    sf,
    *(
        value
        for name in sf.__all__
        if isinstance(value := getattr(sf, name), ModuleType)
    ),
]


def factories(module: ModuleType) -> set[str]:
    """The functions of a module that say that they return a function, or one of
    `KINDS`.
    """
    public = {
        n: fn
        for n, fn in vars(module).items()
        if inspect.isfunction(fn) and n not in HELPERS and n[0] != "_"
    }
    figure = {"Figure": object}  # matplotlib's, which only type checkers import
    given = {
        name: typing.get_type_hints(fn, localns=figure).get("return")
        for name, fn in public.items()
    }
    return {
        name
        for name, kind in given.items()
        if kind in KINDS or typing.get_origin(kind) is Callable
    }


def made(module: ModuleType, text: str) -> Any:
    return eval(text, NAMES | (vars(module) if module is not sf else {}))


def test_every_factory_is_described() -> None:
    shown = SHOWN | {text.partition("(")[0] for _, text in TEXTS}
    found = {name for module in MODULES for name in factories(module)}
    assert {
        "rigl",
        "cosine",
        "l1",
        "erk",
        "nm",
        "ema",
        "careful",
        "sgd",
        "fisher",
        "every",
        "at",
    } <= found
    assert found - NO_FACTORIES <= shown, (
        "give each a row of the registry, or a call in CALLS"
    )


def shown_otherwise(module: ModuleType, text: str) -> list[str]:
    """What a call makes, and what its copies are, where that is not shown as the
    call.
    """
    value = made(module, text)
    copies = [
        value,
        pickle.loads(pickle.dumps(value)),
        copy.copy(value),
        copy.deepcopy(value),
    ]
    return [
        f"{text}: {other!r}"
        for other in copies
        if repr(other) != text or type(other) is not type(value)
    ]


def test_what_a_call_makes_is_shown_as_the_call() -> None:
    assert [
        shown for module, text in TEXTS for shown in shown_otherwise(module, text)
    ] == []


def test_arguments_are_shown_in_short() -> None:
    net, wide = torch.nn.Linear(2, 2), torch.zeros(3, 4, dtype=torch.float64)
    assert shown((net, torch.optim.SGD, len, [].append)) == "(Linear, SGD, len, append)"
    assert (
        shown({"a": (1,), "b": [None, "x", float("inf")]})
        == "{'a': (1,), 'b': [None, 'x', float('inf')]}"
    )
    assert shown(lambda x: x) == "test_arguments_are_shown_in_short.<locals>.<lambda>"
    assert shown(wide) == "tensor(shape=(3, 4), dtype=float64)"
    assert shown(torch.zeros(5)) == "tensor(shape=(5,), dtype=float32)"
    assert shown(torch.zeros((), device="meta")) == "tensor(shape=(), dtype=float32)"
    assert shown(torch.tensor([0.1, 2.0], requires_grad=True)) == "tensor([0.1, 2.0])"
    assert (
        shown(torch.tensor(0.1, dtype=torch.bfloat16))
        == "tensor(0.100097656, dtype=bfloat16)"
    )
    assert shown(torch.tensor(0.1, dtype=torch.float16)) == "tensor(0.1, dtype=float16)"
    assert shown(object()) == "object"
    assert repr(Call(sf.rigl, (0.9,), {"steps": 10})) == "rigl(0.9, steps=10)"


def test_a_batched_argument_is_shown_by_its_shape() -> None:
    texts = []

    def run(sparsity: Tensor, key: Tensor) -> Tensor:
        texts.append(repr(sf.static(sparsity, key=key)))
        return sparsity

    torch.vmap(run)(torch.rand(3), sf.random.split(sf.random.key(0), 3))
    assert texts == [
        "static(tensor(shape=(), dtype=float32), key=tensor(shape=(2,), dtype=int64))"
    ]


def test_a_changed_copy_does_not_claim_to_be_what_the_factory_made() -> None:
    algorithm = sf.rigl(0.9)
    other = algorithm._replace(view=sf.with_terms(sf.dense(), sf.terms.l1(0.1)).view)
    assert type(other) is sf.Algorithm and repr(other).startswith(
        "Algorithm(init=<function"
    )
    assert (
        repr(algorithm) == "rigl(0.9)"
        and isinstance(algorithm, sf.Algorithm)
        and isinstance(algorithm, Made)
    )
    assert other[:2] == algorithm[:2] and type(algorithm) is sf.Algorithm
    assert other.made_of is algorithm
    for _ in range(2000):
        other = other._replace(settled=None)
    assert other.made_of is algorithm
    with pytest.raises((AttributeError, pickle.PicklingError), match="init_together"):
        pickle.dumps(other)
    # One that shares functions with another does not take its name from it.
    assert repr(sf.with_dense_gradients(algorithm)) == "with_dense_gradients(rigl(0.9))"
    assert repr(algorithm) == "rigl(0.9)"


def test_a_part_that_does_not_pickle_is_named() -> None:
    algorithm = sf.gmp(0.5, score=lambda state, grads, step: state.params)
    assert repr(algorithm).endswith(".<lambda>)")
    with pytest.raises(
        (AttributeError, pickle.PicklingError),
        match="test_a_part_that_does_not_pickle_is_named",
    ):
        pickle.dumps(algorithm)


def test_the_call_stays_what_it_was() -> None:
    values, table, parts = [0.5, 0.8], {"*": 0.5}, [("*", sf.static(0.5))]
    cycling = sf.schedules.cycling(values, sf.every(1))
    piecewise = sf.schedules.piecewise(pair for pair in [(0, 0.5), (2, 0.8)])
    budget, algorithm = sf.budgets.by_path(table), sf.partition(parts)
    values.clear(), table.clear(), parts.clear()
    assert repr(cycling) == "cycling([0.5, 0.8], always())"
    assert repr(piecewise) == "piecewise([(0, 0.5), (2, 0.8)])" and piecewise(2) == 0.8
    assert repr(budget) == "by_path({'*': 0.5})" and budget({"a": (4,)}, 0.0) == {
        "a": 2
    }
    assert repr(algorithm) == "partition([('*', static(0.5))])"


def test_a_described_function_is_one_in_all_else() -> None:
    schedule = sf.schedules.cosine_decay(0.5, 2)
    assert (
        isinstance(schedule, Described)
        and schedule(step=1) == 0.25
        and type(schedule).__name__ == "function"
    )
    assert list(inspect.signature(schedule).parameters) == ["step"]
    assert torch.vmap(schedule)(torch.arange(3)).tolist() == [0.5, 0.25, 0.0]
    assert callable(sf.scores.absolute(sf.scores.distance()).signed)
    with pytest.raises(TypeError, match=r"got cosine_decay\(0.5, 2\), one of \(step\)"):
        sf.static(0.5, distribution=schedule)  # type: ignore[arg-type]
    assert (
        schedule != sf.schedules.cosine_decay(0.5, 2) and len({schedule, schedule}) == 1
    )


def test_a_decorated_score_keeps_its_name() -> None:
    @sf.scores.absolute
    def drift(state: Any, grads: Any, step: Any) -> Any:
        return state.opt

    assert callable(sf.scores.magnitude) and sf.scores.magnitude.__name__ == "magnitude"
    assert callable(drift) and drift.__name__ == "drift"
    assert pickle.loads(pickle.dumps(sf.scores.magnitude)) is sf.scores.magnitude


def test_a_factory_keeps_its_signature() -> None:
    assert str(inspect.signature(sf.optimizers.sgd)).startswith(
        "(lr: 'Level', momentum: 'float' = 0.0, nesterov"
    )
    assert (
        sf.rigl.__name__ == "rigl"
        and sf.rigl.__module__ == "sparsefn.algorithms.drop_grow"
        and ">>>" in sf.rigl.__doc__
    )
    with pytest.raises(
        TypeError, match=r"static\(\) got an unexpected keyword argument 'sparse'"
    ):
        sf.static(sparse=0.5)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"cosine\(\) missing 2 required positional arguments"
    ):
        sf.schedules.cosine()  # type: ignore[call-arg]


def test_patterns_stay_equal_by_name() -> None:
    assert (
        sf.patterns.nm(2, 4)
        == pickle.loads(pickle.dumps(sf.patterns.nm(2, 4)))
        != sf.patterns.nm(1, 4)
    )
    bare = sf.patterns.Pattern("unstructured()", len, len)
    assert (
        bare == sf.patterns.unstructured() and pickle.loads(pickle.dumps(bare)) == bare
    )


@pytest.mark.deep
def test_compiled_code_calls_and_makes_them_without_compiling_anew() -> None:
    schedule, when, term = (
        sf.schedules.polynomial(0.0, 0.8, begin=0, end=4),
        sf.every(2),
        sf.terms.l2(0.5),
    )
    score, memory = sf.curvature.obd(sf.scores.distance()), sf.scores.momentum(0.5)

    def run(params: Any, step: Tensor) -> Any:
        state = sf.State(params, {"w": torch.ones(4, 4, dtype=torch.bool)})
        # made while compiling: a function such as any other
        here = sf.schedules.linear(0.5, 0.25)
        kept = memory.accumulate(memory.init(params), state, params, step)
        value = schedule(step) + here(step)
        return value, when(step), term(state, step), score(state, params, step), kept

    compiled, params = (
        torch.compile(run, backend="eager", fullgraph=True),
        {"w": torch.randn(4, 4)},
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in map(torch.tensor, range(4)):
            torch.testing.assert_close(
                compiled(params, step), run(params, step), rtol=0, atol=0
            )


def test_inside_a_compiler_nothing_is_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    @described
    def above(limit: float) -> Callable[[float], bool]:
        return lambda x: x > limit

    assert inspect.isfunction(above(2.0)) and inspect.isfunction(
        with_call(lambda x: x, above, 2.0)
    )
