"""What one vmapped loop saves over many: a step of training and a change of the masks, of 1 to 64 networks.

    python benchmarks/ensembles.py
    python benchmarks/ensembles.py --quick

784-300-100-10 networks with 90% zeros, batches of 64. The full run compiles the step as well; what that took is printed
and is not part of the times. Masks of the vmapped change are held against those of the loop.
"""

import argparse
import time
from typing import Any, NamedTuple

import torch
from _timing import Case, Row, call, compare, options_of, write
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

import sparsefn as sf

SPARSITY, RATE, BATCH = 0.9, 0.01, 64
SIZES = (784, 300, 100, 10)


def network(divide: int) -> nn.Sequential:
    """The network whose weights each member has."""
    first, *hidden, last = (max(size // divide, 10) for size in SIZES)
    layers: list[nn.Module] = []
    for inside, outside in zip((first, *hidden), (*hidden, last), strict=True):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Members(NamedTuple):
    """As many states, alone and stacked, with a batch each."""

    model: nn.Sequential
    algorithm: sf.Algorithm
    alone: list[sf.State]
    stacked: sf.State
    x: Tensor
    y: Tensor

    def gradients(self, state: sf.State, x: Tensor, y: Tensor) -> Any:
        """Dense gradients at the effective weights."""
        return grad(lambda p: functional.cross_entropy(sf.modules.call(self.model, p, x), y))(sf.effective(state))

    def step(self, state: sf.State, x: Tensor, y: Tensor) -> sf.State:
        """A step of training between two changes of the masks."""
        return self.algorithm.update(state, self.gradients(state, x, y), 1)

    def rows(self) -> Any:
        """State and batch of each member."""
        return zip(self.alone, self.x, self.y, strict=True)


def members_of(count: int, divide: int) -> Members:
    """Networks that start apart, with masks by magnitude."""
    torch.manual_seed(0)
    models = [network(divide) for _ in range(count)]
    # Between two changes RigL is a static mask; compiled, its own update would compute a change at every step.
    static = sf.static(SPARSITY, init="magnitude")
    algorithm = sf.with_optimizer(static, sf.optimizers.sgd(RATE, momentum=0.9))
    alone = [algorithm.init(sf.modules.params_of(model)) for model in models]
    x, y = torch.randn(count, BATCH, alone[0].params["0.weight"].shape[1]), torch.randint(0, 10, (count, BATCH))
    return Members(models[0], algorithm, alone, sf.ensemble.stack(alone), x, y)


def step_cases(members: Members, compiled: bool) -> list[Case]:
    """A step of training of all members."""
    together = vmap(members.step)
    cases = [
        Case("loop", lambda: [members.step(*row) for row in members.rows()]),
        Case("vmap", lambda: together(members.stacked, members.x, members.y)),
    ]
    for i, weights in enumerate(sf.ensemble.unstack(call(cases[1]).params)):
        torch.testing.assert_close(weights, call(cases[0])[i].params, rtol=1e-4, atol=1e-5)
    if compiled:
        torch.compiler.reset()  # each size on its own
        fast = torch.compile(together, dynamic=False)
        cases.append(Case("vmap, compiled", lambda: fast(members.stacked, members.x, members.y)))
        start = time.perf_counter()
        call(cases[-1])
        print(f"\ncompiled in {time.perf_counter() - start:.1f} s")
    return cases


def change_cases(members: Members) -> list[Case]:
    """RigL's change of the masks of all members, gradients given."""
    grads = vmap(members.gradients)(members.stacked, members.x, members.y)
    each = sf.ensemble.unstack(grads)
    change = sf.rigl(SPARSITY, init="magnitude").update
    together = vmap(change, in_dims=(0, 0, None))
    bare = members.stacked._replace(opt=())
    alone = [state._replace(opt=()) for state in members.alone]
    cases = [
        Case("loop", lambda: [change(state, grad, 0) for state, grad in zip(alone, each, strict=True)]),
        Case("vmap", lambda: together(bare, grads, 0)),
    ]
    for one, other in zip(call(cases[0]), sf.ensemble.unstack(call(cases[1])), strict=True):
        for path, mask in one.masks.items():
            if not torch.equal(mask, other.masks[path]):
                raise AssertionError(f"masks at {path}")
    return cases


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    tables = {}
    for count in (1, 2) if options.smoke else (1, 4, 16) if options.quick else (1, 4, 16, 64):
        members = members_of(count, 16 if options.smoke else 1)
        title = f"training step of {count}"
        tables[title] = compare(title, step_cases(members, compiled=not options.quick and not options.smoke), options)
        title = f"RigL's change of the masks of {count}"
        tables[title] = compare(title, change_cases(members), options)
    return tables


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("ensembles", main(chosen), chosen)
