"""What one vmapped loop saves over many: a step of training and a change of the masks,
of 1 to 64 networks.

    python benchmarks/ensembles.py
    python benchmarks/ensembles.py --quick

Networks of two sizes with 90% zeros, batches of 64. The full run compiles the steps as
well; what that took is printed and is not part of the times. Weights and masks of each
alternative are held against those of the loop.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _timing import Case, Row, call, compare, options_of, write
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

import sparsefn as sf

SPARSITY, RATE, BATCH = 0.9, 0.01, 64
LARGE, SMALL = (784, 300, 100, 10), (64, 32, 10)
CHUNK = 8  # members at a time


def network(sizes: tuple[int, ...]) -> nn.Sequential:
    """The network whose weights each member has."""
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sizes):
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
        """Dense gradients at the effective weights: by torch.autograd, and under vmap
        by torch.func.
        """

        def loss(params: Any) -> Tensor:
            return functional.cross_entropy(sf.modules.call(self.model, params, x), y)

        return sf.modules.value_and_grad(loss)(sf.effective(state))[1]

    def step(self, state: sf.State, x: Tensor, y: Tensor) -> sf.State:
        """A step of training between two changes of the masks."""
        return self.algorithm.update(state, self.gradients(state, x, y), 1)

    def loop(
        self, step: Callable[[sf.State, Tensor, Tensor], sf.State]
    ) -> list[sf.State]:
        """A step of each member by itself."""
        return [step(*row) for row in zip(self.alone, self.x, self.y, strict=True)]


def members_of(count: int, sizes: tuple[int, ...]) -> Members:
    """Networks that start apart, with masks by magnitude."""
    torch.manual_seed(0)
    models = [network(sizes) for _ in range(count)]
    # Between two changes RigL is a static mask; compiled, its own update would compute
    # a change at every step.
    static = sf.static(SPARSITY, init="magnitude")
    algorithm = sf.with_optimizer(static, sf.optimizers.sgd(RATE, momentum=0.9))
    alone = [algorithm.init(sf.modules.params_of(model)) for model in models]
    x, y = torch.randn(count, BATCH, sizes[0]), torch.randint(0, 10, (count, BATCH))
    return Members(models[0], algorithm, alone, sf.ensemble.stack(alone), x, y)


def step_cases(members: Members, backend: str | None) -> list[Case]:
    """A step of training of all members, and with a backend the compiled one."""
    data = (members.stacked, members.x, members.y)
    together = vmap(members.step)
    cases = [
        Case("loop", lambda: members.loop(members.step)),
        Case("vmap", lambda: together(*data)),
    ]
    if len(members.alone) > CHUNK:
        parts = vmap(members.step, chunk_size=CHUNK)
        cases.append(Case(f"vmap, chunk_size={CHUNK}", lambda: parts(*data)))
    if backend is not None:
        torch.compiler.reset()  # each size on its own
        alone, fast = (
            torch.compile(step, dynamic=False, backend=backend)
            for step in (members.step, together)
        )
        cases.append(Case("loop, compiled", lambda: members.loop(alone)))
        cases.append(Case("vmap, compiled", lambda: fast(*data)))
    reference = [state.params for state in call(cases[0])]
    for case in cases[1:]:
        start = time.perf_counter()
        out = call(case)
        if "compiled" in case.name:
            print(f"\n{case.name} in {time.perf_counter() - start:.1f} s")
        states = out if isinstance(out, list) else sf.ensemble.unstack(out)
        for state, weights in zip(states, reference, strict=True):
            torch.testing.assert_close(state.params, weights, rtol=1e-4, atol=1e-5)
    return cases


def change_cases(members: Members) -> list[Case]:
    """RigL's change of the masks of all members, gradients given."""
    grads = vmap(members.gradients)(members.stacked, members.x, members.y)
    each = sf.ensemble.unstack(grads)
    change = sf.rigl(SPARSITY, init="magnitude").update
    bare = members.stacked._replace(opt=())
    alone = [state._replace(opt=()) for state in members.alone]
    together = vmap(change, in_dims=(0, 0, None))
    cases = [
        Case(
            "loop",
            lambda: [
                change(state, grad, 0) for state, grad in zip(alone, each, strict=True)
            ],
        ),
        Case("vmap", lambda: together(bare, grads, 0)),
    ]
    if len(alone) > CHUNK:
        parts = vmap(change, in_dims=(0, 0, None), chunk_size=CHUNK)
        cases.append(Case(f"vmap, chunk_size={CHUNK}", lambda: parts(bare, grads, 0)))
    reference = sf.ensemble.stack(call(cases[0])).masks
    for case in cases[1:]:
        for path, mask in call(case).masks.items():
            if not torch.equal(mask, reference[path]):
                raise AssertionError(f"{case.name}: masks at {path}")
    return cases


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    done = {}
    small, large = (1, 4, 16, 64), (1, 4, 16) if options.quick else (1, 4, 16, 64)
    if options.smoke:
        small, large = (1, 9), ()
    for sizes, counts in ((LARGE, large), (SMALL, small)):
        for count in counts:
            members = members_of(count, sizes)
            what = f"of {count} x {'-'.join(map(str, sizes))}"
            weights = sum(leaf.numel() for leaf in members.stacked.params.values())
            title = f"training step {what}"
            cases = step_cases(
                members,
                "aot_eager" if options.smoke else None if options.quick else "inductor",
            )
            done[title] = compare(title, cases, options, weights)
            title = f"RigL's change of the masks {what}"
            done[title] = compare(title, change_cases(members), options, weights)
    return done


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("ensembles", main(chosen), chosen)
