"""A user's mistakes: beside each line, what mypy has to say about it."""

import torch
from torch import Tensor

import sparsefn as sf
from sparsefn.core.state import State
from sparsefn.typing import Tree

params = {"w": torch.ones(4, 4)}
layer = torch.nn.Linear(4, 4)
algorithm = sf.static(0.5)
state = algorithm.init(params)


def with_two_arguments(state: State, grads: Tree) -> Tree:
    return state.params


def in_words(step: int | Tensor) -> str:
    return str(step)


sf.rigl("0.9")  # error: arg-type
sf.rigl(0.9, drop_fractoin=0.3)  # error: call-arg
sf.rigl(0.9, drop_fraction="0.3")  # error: arg-type
sf.rigl(0.9, steps=1.5)  # error: arg-type
sf.set([0.9])  # error: arg-type
sf.set(0.9, regrow=True)  # error: call-arg
sf.gmp(0.9, steps=1.5)  # error: arg-type
sf.snfs(0.9, drpo=sf.scores.magnitude)  # error: call-arg
sf.snfs(0.9, grow="momentum")  # error: arg-type
sf.rigl(0.9, init="magnitud")  # error: arg-type
sf.rigl(0.9, pruned="kept")  # error: arg-type
sf.rigl(0.9, when=100)  # error: arg-type
sf.gmp(in_words)  # error: arg-type
sf.gmp(lambda: 0.5)  # error: arg-type
sf.gmp(0.9, score=with_two_arguments)  # error: arg-type
sf.gmp(0.9, score="magnitude")  # error: arg-type
sf.gmp(0.9, pruned="zeros")  # error: arg-type
sf.gmp(0.9, 0.3)  # error: arg-type
sf.one_shot(0.9, regorw=True)  # error: call-arg
sf.iterative(0.2, count="2")  # error: arg-type
sf.static(0.5, init="zeros")  # error: arg-type
sf.static(0.5, init=3)  # error: arg-type
sf.static(0.5, pattern="2:4")  # error: arg-type
sf.static(0.5, distribution=sf.budgets.erk)  # error: arg-type
sf.static(0.5, key=0)  # error: arg-type
sf.static(0.5, where=lambda path: True)  # error: arg-type, misc
sf.static(0.5, where=3)  # error: arg-type
sf.supermask("bernouli")  # error: arg-type
sf.supermask(0.5, mode="both")  # error: arg-type
sf.supermask(0.5, init="ones")  # error: arg-type
sf.with_optimizer(algorithm, "adam")  # error: arg-type
sf.with_optimizer(algorithm, torch.optim.SGD)  # error: arg-type
sf.with_optimizer(sf.optimizers.adam(1e-3), algorithm)  # error: arg-type
sf.optimizers.adam("1e-3")  # error: arg-type
sf.optimizers.sgd(0.1, momentum=None)  # error: arg-type
sf.optimizers.by_path({"*": sf.optimizers.sgd(0.1)})  # error: arg-type
sf.optimizers.by_path([("*", algorithm)])  # error: list-item
sf.optimizers.parts([("params", sf.optimizers.sgd(0.1))])  # error: arg-type
sgd = sf.optimizers.sgd(0.1)
sf.with_optimizer(algorithm, sgd, skip_nonfinite="yes")  # error: arg-type
sf.optimizers.clip_norm(params, "1.0")  # error: arg-type
sf.optimizers.ema(params, 0.9)  # error: arg-type
sf.chain([algorithm, algorithm])  # error: arg-type
sf.partition({"*": algorithm})  # error: arg-type
sf.phases([("start", algorithm)])  # error: list-item
sf.with_terms(algorithm, sf.terms.l1)  # error: arg-type
print(state.mask)  # error: attr-defined
state.params = params  # error: misc
algorithm.update(state, params)  # error: call-arg
algorithm.update(params, state, 0)  # error: arg-type
sf.effective(params)  # error: arg-type
sf.modules.call(state, layer)  # error: arg-type
sf.modules.params_of(params)  # error: arg-type
sf.modules.params_of(layer, trainable="yes")  # error: arg-type
sf.modules.to_sparse(layer, state, "coo")  # error: arg-type
sf.modules.to_sparse(layer, state, layout="2:4")  # error: arg-type
sf.checkpoint.compress(params, sf.patterns.nm(2, 4))  # error: arg-type
sf.checkpoint.compress(state, 2, 4)  # error: arg-type, call-arg
sf.checkpoint.compress(state, [sf.patterns.nm(2, 4)])  # error: list-item
sf.checkpoint.decompress(state)  # error: arg-type
sf.patterns.block((2, 2), "median")  # error: arg-type
sf.patterns.nm("2:4")  # error: arg-type, call-arg
sf.patterns.tied([["*.up.weight", 0.5]])  # error: list-item
sf.shrink(layer, state, torch.ones(1), only=0)  # error: arg-type
sf.schedules.linear("0.5", 0.1)  # error: arg-type
sf.every("100")  # error: arg-type
sf.at(3)  # error: arg-type
sf.masks.gate(params["w"], params["w"], params["w"], mode="hard")  # error: arg-type
sf.scores.ema(sf.scores.gradient)  # error: call-arg
sf.random.key("0")  # error: arg-type
adamw = torch.optim.AdamW(layer.parameters())
sf.attach(layer, sf.rigl(0.5, steps=1), adamw)  # error: arg-type
sf.attach(sf.rigl(0.5, steps=1), layer, sf.optimizers.sgd(0.1))  # error: arg-type
sf.attach(
    sf.rigl(0.5, steps=1), layer, torch.optim.AdamW(layer.parameters())
).after_step("0")  # error: arg-type
sf.donated(state)  # error: arg-type
sf.captured(state)  # error: arg-type
sf.report.plan(params, sf.rigl(0.9))  # error: arg-type
sf.report.scalars(params)  # error: arg-type
sf.report.changed(state, params)  # error: arg-type
sf.report.plan(sf.rigl(0.9), params, "5")  # error: arg-type
sf.masks.explored(state)  # error: call-arg
