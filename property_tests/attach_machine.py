"""A module, its optimizers and what `sf.attach` returned, beside the reference: each
call of a loop, and its check.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import sparsefn as sf
from property_tests import registry, test_methods
from property_tests.laws_attach import Kind, Reference, assert_same_moments, loss, same
from property_tests.layouts import NM
from sparsefn.core.state import Trigger, has_optimizer
from sparsefn.core.tree import Tree
from sparsefn.testing import Meta, Row
from sparsefn.testing.harness import assert_same, leaves
from sparsefn.testing.introspection import first_state
from sparsefn.testing.strategies import large

ROWS = {row.name: row for row in registry.ROWS if not has_optimizer(first_state(row))}
ROWS |= {f"methods.{row.name}": row for row in test_methods.ROWS}
MEAN = sf.scores.mean(sf.scores.saliency)
GROWS = sf.rigl(None, pattern=sf.patterns.nm(1, 2), drop_fraction=0.5, when=sf.at([0]))
# Latents with the gradients of their weights, gradients that are remembered, leaves
# that are all zeros for a while.
MORE = [
    Row(
        "soft_nm",
        lambda s, key, _: sf.reparametrised(sf.reparam.soft_nm(2, 4)),
        Meta(pattern=NM),
    ),
    Row("powerprop of one", lambda s, key, _: sf.methods.powerprop(alpha=1.0), Meta()),
    Row(
        "ste by mean saliency",
        lambda s, key, _: sf.ste(s, score=MEAN, when=sf.every(2)),
        Meta(),
    ),
    Row(
        "nothing at first",
        lambda s, key, _: sf.sequence(sf.static(1.0), GROWS),
        Meta(pattern=NM),
    ),
]
ROWS |= {row.name: row for row in MORE}
OPTIM = torch.optim
KINDS = {
    "sgd": Kind(OPTIM.SGD, {"lr": 0.1}),
    "momentum": Kind(
        OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    ),
    "adam": Kind(OPTIM.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam without eps": Kind(OPTIM.Adam, {"lr": 0.01, "eps": 0.0, "amsgrad": True}),
    "adamw": Kind(OPTIM.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": Kind(OPTIM.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adagrad": Kind(OPTIM.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "adadelta": Kind(OPTIM.Adadelta, {"lr": 1.0}),
    "nadam": Kind(OPTIM.NAdam, {"lr": 0.01}),
    "radam": Kind(OPTIM.RAdam, {"lr": 0.01}),
    "adamax": Kind(OPTIM.Adamax, {"lr": 0.01}),
    "asgd": Kind(OPTIM.ASGD, {"lr": 0.1, "weight_decay": 0.01}),
    "rprop": Kind(OPTIM.Rprop, {"lr": 0.01}),
    "adafactor": Kind(OPTIM.Adafactor, {"lr": 0.01}),
    "lbfgs": Kind(OPTIM.LBFGS, {"lr": 0.1, "max_iter": 3, "history_size": 2}),
}


class Setup(NamedTuple):
    """One way to attach: the name of a row, and of each optimizer."""

    row: str
    kinds: tuple[str, ...] = ("momentum",)
    dtype: torch.dtype = torch.float32
    hooks: bool = False
    skip: Trigger | None = None
    reset: Trigger | None = None
    extra: dict[str, Any] | None = None
    compiled: bool = False


class Holder(nn.Module):
    """A module with the leaves of a tree as its parameters, under their dotted paths,
    and one that is frozen.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        for path, leaf in params.items():
            owner: nn.Module = self
            *parts, name = path.split(".")
            for part in parts:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(name, nn.Parameter(leaf.clone()))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, slopes: Mapping[str, Tensor]) -> Tensor:
        return loss(dict(self.named_parameters()), slopes)


class Trio(NamedTuple):
    """What a user has."""

    module: Holder
    optimizers: list[Optimizer]
    sparse: Any


class Saved(NamedTuple):
    """What a user saves, and the reference of that time."""

    module: Any
    optimizers: Any
    sparse: Any
    reference: Any


class Loop:
    """A training loop, in which each call is followed in the reference. `phase` says
    which calls come next.
    """

    def __init__(self, setup: Setup, attach: Callable[..., Any] = sf.attach) -> None:
        self.setup, self._attach = setup, attach
        case = large(ROWS[setup.row].meta.layout.form, 24)
        self._params = {
            path: leaf.to(setup.dtype) for path, leaf in leaves(case.params).items()
        }
        self.algorithm = self.make(case.sparsity)
        self.names, n = list(self._params), len(setup.kinds)
        # Every second weight belongs to the second optimizer; the last weight has a
        # group of its own.
        own = [self.names[i::n] for i in range(n)]
        split = "lbfgs" not in setup.kinds
        self.groups = [
            [some[:-1], some[-1:]] if split and len(some) > 1 else [some]
            for some in own
        ]
        module, optimizers = self.fresh(self._params)
        self.trio = Trio(module, optimizers, self.attached(module, optimizers))
        self.phase, self.stepped, self.changes, self.hides = (
            "idle",
            set[int](),
            0,
            False,
        )
        kinds = [KINDS[kind] for kind in setup.kinds]
        skip, reset = setup.skip or sf.never(), setup.reset or sf.never()
        self.reference = Reference(
            self.algorithm, self._params, self.groups, kinds, skip, reset, setup.extra
        )
        self.hooks = setup.hooks
        self.mark()
        self.check()

    def make(self, sparsity: float) -> sf.Algorithm:
        return ROWS[self.setup.row].make(sparsity, sf.random.key(3), self._params)

    def fresh(self, params: Mapping[str, Tensor]) -> tuple[Holder, list[Optimizer]]:
        module = Holder(params)
        own, kinds = (
            dict(module.named_parameters()),
            [KINDS[kind] for kind in self.setup.kinds],
        )
        rows = zip(kinds, self.groups, strict=True)
        return module, [
            kind([{"params": [own[n] for n in group]} for group in some])
            for kind, some in rows
        ]

    def attached(
        self, module: nn.Module, optimizers: list[Optimizer], **options: Any
    ) -> Any:
        given = {name: getattr(self.setup, name) for name in ("hooks", "skip", "reset")}
        given |= {"extra_group": self.setup.extra, **options}
        given = {name: value for name, value in given.items() if value}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "attach: the mask of .* keeps none")
            module = (
                torch.compile(module, backend="eager")
                if self.setup.compiled
                else module
            )
            return self._attach(
                self.algorithm,
                module,
                optimizers if len(optimizers) > 1 else optimizers[0],
                **given,
            )

    def run(self, slopes: Mapping[str, Tensor]) -> Tensor:
        """The loss of the module."""
        module = self.trio.module
        return (
            torch.compile(module, backend="eager")(slopes)
            if self.setup.compiled
            else module(slopes)
        )

    # ---- what is read ----------------------------------------------------------------

    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            name: p
            for name, p in self.trio.module.named_parameters()
            if name != "frozen"
        }

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights that the module has."""
        return {name: p.detach().clone() for name, p in self.parameters().items()}

    def grads(self) -> dict[str, Tensor | None]:
        return {
            name: None if p.grad is None else p.grad.clone()
            for name, p in self.parameters().items()
        }

    def optimized(self) -> list[nn.Parameter]:
        return [
            p
            for optimizer in self.trio.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def has_grads(self) -> bool:
        return any(p.grad is not None for p in self.parameters().values())

    def follows(self, name: str) -> bool:
        """Whether something trains in the place of a weight: latents, or scores."""
        return name in self.reference.led

    @property
    def must_step(self) -> bool:
        """Whether weights that move now, before an optimizer has stepped, are taken for
        the work of another one.
        """
        return (
            self.phase == "before"
            and self.finite
            and not self.stepped
            and not self.reference.skipped
        )

    @property
    def written(self) -> bool:
        """Whether other code wrote to the weights since the last call."""
        return not all(
            bool(same(x, self.seen[name]).all()) for name, x in self.weights().items()
        )

    @property
    def moved(self) -> bool:
        """Whether torch tells that weights were written since the last call, or have
        other memory.
        """
        return self.versions != self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for p in self.parameters().values()]

    def mark(self) -> None:
        """Know the weights as they are."""
        self.seen, self.versions = self.weights(), self._versions()

    def take(self) -> None:
        self.reference.take(self.seen, self.weights())
        self.reference.follow(self.trio.optimizers)

    def check(self) -> None:
        """After a whole step: the bits of the reference, in the state, the module and
        the optimizers.
        """
        sparse, wanted = self.trio.sparse, self.reference.state
        assert_same("the state", sparse.state, wanted)
        assert_same("the masks", sparse.masks, wanted.masks)
        assert_same("the module", self.weights(), self.reference.shown())
        assert_same_moments(self.trio.optimizers, self.reference, live_alone=self.hides)
        assert sparse.check() is None
        assert bool((self.trio.module.frozen == 1).all())

    # ---- a step ----------------------------------------------------------------------

    def slopes(
        self, seed: int, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        drawn = {
            n: torch.randn(x.shape, generator=draw).to(x.dtype)
            for n, x in self._params.items()
        }
        return {name: drawn[name] for name in names or self.names}

    def backward(self, seed: int, names: Sequence[str] | None = None) -> None:
        """Gradients, added to those that are there; perhaps of some weights alone."""
        before = self.phase == "before"
        self.run(self.slopes(seed, names)).backward()
        if before:
            self.reference.write_grads([p.grad for p in self.optimized()])
        self.phase = "graded" if self.phase == "idle" else self.phase

    def before(self, step: int | None = None) -> None:
        self.take()
        dense, now = self.grads(), self.reference.last + 1 if step is None else step
        self.trio.sparse.before_step(*([] if step is None else [step]))
        self.reference.before(dense, now)
        self.now, self.phase, self.stepped = now, "before", set()
        self.mark()
        self.finite = all(x is None or bool(x.isfinite().all()) for x in dense.values())
        for mine, theirs in zip(
            self.optimized(), self.reference.parameters(), strict=True
        ):
            assert (mine.grad is None) == (theirs.grad is None), (
                "a gradient for the optimizer is missing, or too much"
            )
            if mine.grad is not None:
                assert_same("a gradient for the optimizer", mine.grad, theirs.grad)

    def write_grads(self, kind: str) -> None:
        """Clip gradients, or do something else to them."""
        given = [p for p in self.optimized() if p.grad is not None]
        if kind == "norm":
            torch.nn.utils.clip_grad_norm_(given, 0.5)
        elif kind == "value" and given:
            torch.nn.utils.clip_grad_value_(given, 0.1)
        elif kind in ("to zero", "to none"):
            for optimizer in self.trio.optimizers:
                optimizer.zero_grad(set_to_none=kind == "to none")
        elif kind == "model to none":
            self.trio.module.zero_grad()
        for p in given:
            if kind == "noise" and p.grad is not None:
                p.grad.add_(0.125)
            elif kind == "other" and p.grad is not None:
                p.grad = p.grad.clone() + 0.125
        if self.phase == "before":
            self.reference.write_grads([p.grad for p in self.optimized()])
        elif self.phase == "graded" and not self.has_grads():
            self.phase = "idle"

    def step(self, owner: int = 0) -> None:
        if self.hooks:
            self.take()
            self.reference.before(self.grads(), self.reference.last + 1)
            with warnings.catch_warnings():  # gradients may be zero
                warnings.filterwarnings("ignore", "after_step: every gradient was zero")
                self.trio.optimizers[0].step()
            self.reference.step(0)
            self._end(self.reference.last + 1)
            return
        self.take()
        self.trio.optimizers[owner].step()
        self.reference.step(owner)
        self.mark()
        self.stepped.add(owner)
        if len(self.stepped) == len(self.trio.optimizers):
            self.phase = "stepped"

    def closure(self, seed: int, calls: bool, wipes: bool = False) -> None:
        """A step with a closure, which may call `before_step` itself."""
        slopes, (optimizer,) = self.slopes(seed), self.trio.optimizers

        def evaluate() -> Tensor:
            optimizer.zero_grad(set_to_none=not wipes)
            with torch.enable_grad():
                value = self.run(slopes)
            value.backward()
            if calls:
                self.trio.sparse.before_step()
            return value

        self.take()
        self.now = self.reference.last + 1
        optimizer.step(evaluate)
        self.reference.step(0, self.reference.closure(slopes))
        if self.hooks:
            self._end(self.reference.last + 1)
        else:
            self.phase, self.stepped = "stepped", {0}
            self.mark()

    def scaled(self, seed: int, finite: bool) -> None:
        """A step with a GradScaler, which skips the optimizer where a gradient is
        infinite.
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for p in self.optimized():
            p.grad = None
        scaler.scale(self.trio.module(self.slopes(seed))).backward()
        if not finite:
            next(iter(self.parameters().values())).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        for optimizer in self.trio.optimizers:
            scaler.unscale_(optimizer)
        self.before()
        for owner, optimizer in enumerate(self.trio.optimizers):
            has_inf = any(
                bool(x)
                for x in scaler._per_optimizer_states[id(optimizer)][
                    "found_inf_per_device"
                ].values()
            )
            scaler.step(optimizer)
            if not has_inf:
                self.reference.step(owner)
                self.stepped.add(owner)
        scaler.update()
        self.phase = "stepped"
        self.mark()

    def after(self, numpy: bool = False) -> None:
        zero = all(bool((x == 0).all()) for x in self.reference.dense.values())
        self.take()
        with warnings.catch_warnings(record=zero) as found:
            warnings.filterwarnings("always", "after_step: every gradient was zero")
            warnings.filterwarnings(
                "ignore", "after_step: (no optimizer has stepped|expected step)"
            )
            self.trio.sparse.after_step(np.int64(self.now) if numpy else self.now)
        self._end(self.now)
        if zero and self.differs:
            assert any(
                "every gradient was zero" in str(x.message) for x in found or ()
            ), "no warning of zeros"

    def _end(self, step: int) -> None:
        old = self.reference.state.masks
        self.reference.after(step)
        self.check()
        both = zip(
            leaves(old).values(),
            leaves(self.reference.state.masks).values(),
            strict=True,
        )
        self.differs = any(not torch.equal(x, y) for x, y in both)
        grown = self.trio.sparse.changes - self.changes
        assert grown in ([1] if self.differs else [0, 1]), (
            f"{grown} changes in a step, differs: {self.differs}"
        )
        self.changes += grown
        self.phase = "graded" if self.has_grads() else "idle"
        self.mark()

    # ---- what people do between calls ------------------------------------------------

    @torch.no_grad()
    def write(self, kind: str, seed: int) -> None:
        """Write to weights, by one of the calls that there are. Weights that follow
        from something stay.
        """
        draw = torch.Generator().manual_seed(seed)
        own = {
            name: p for name, p in self.parameters().items() if not self.follows(name)
        }
        # the module does not show what is pruned alone
        if self.phase in ("before", "stepped"):
            own = {name: p for name, p in own.items() if not self.reference.keeps(name)}
        new = {
            name: torch.randn(p.shape, generator=draw).to(p.dtype)
            for name, p in own.items()
        }
        self.hides = self.hides or kind in HIDDEN
        if kind == "checkpoint":
            self.trio.module.load_state_dict(new, strict=False)
        elif kind == "other dtype and back":
            self.trio.module.double().to(self.setup.dtype)
        elif kind == "vector" and own:
            convert = torch.nn.utils.vector_to_parameters
            convert(torch.cat([x.reshape(-1) for x in new.values()]), own.values())
        elif kind == "foreach" and own:
            torch._foreach_add_(list(own.values()), 0.5)
        elif kind == "foreach data" and own:
            torch._foreach_mul_([p.data for p in own.values()], 1.5)
        elif kind == "functional call":
            torch.func.functional_call(
                _Scaled(own),
                {f"own.{i}": p.data for i, p in enumerate(own.values())},
                (),
            )
        else:
            for name, p in own.items():
                _write_one(kind, p, new[name])

    def apply_masks(self) -> None:
        """Mask what was written."""
        self.take()
        self.trio.sparse.apply_masks()
        assert_same(
            "the module after apply_masks", self.weights(), self.reference.shown()
        )
        assert_same(
            "the state after apply_masks", self.trio.sparse.state, self.reference.state
        )
        self.mark()

    def rate(self, factor: float) -> None:
        """Another learning rate, as schedulers set it; not for Rprop, whose step sizes
        begin at it.
        """
        for group in self.trio.optimizers[0].param_groups:
            group["lr"] *= 1.0 if self.setup.kinds[0] == "rprop" else factor

    def regroup(self) -> None:
        """Take the first parameter of a group into one of its own."""
        for optimizer in (self.trio.optimizers[0], self.reference.optimizers[0]):
            group = next(
                group for group in optimizer.param_groups if len(group["params"]) > 1
            )
            options = {name: x for name, x in group.items() if name != "params"}
            first = group["params"].pop(0)
            optimizer.add_param_group({**options, "params": [first]})
        self.rate(0.5)
        self.groups = None  # type: ignore[assignment]

    def save(self) -> Saved:
        """The three state dicts, as read from a file."""
        found = (
            self.trio.module.state_dict(),
            [optimizer.state_dict() for optimizer in self.trio.optimizers],
            self.trio.sparse.state_dict(),
        )
        return Saved(*_through_a_file(found), self.reference.saved())

    def load(self, saved: Saved, order: Sequence[str]) -> None:
        """Load state dicts, in any order; the sparse one comes with that of the
        module.
        """
        for what in order:
            if what == "module":
                self.trio.module.load_state_dict(saved.module)
            elif what == "optimizers":
                for optimizer, found in zip(
                    self.trio.optimizers, copy.deepcopy(saved.optimizers), strict=True
                ):
                    optimizer.load_state_dict(found)
                self.reference.load_optimizers(saved.reference)
            else:
                self.trio.sparse.load_state_dict(saved.sparse)
        if "sparse" in order:
            self.reference.load_state(saved.reference)
            self.changes = self.trio.sparse.changes
            self.mark()
            assert_same(
                "the module after a load", self.weights(), self.reference.shown()
            )
            self.clear()

    def clear(self) -> None:
        """Begin a new step."""
        for p in self.optimized():
            p.grad = None
        self.phase = "idle"

    def resume(self, saved: Saved, order: Sequence[str], seed: int) -> None:
        """Go on in a new process, with all state dicts."""
        old, (module, optimizers) = self.trio, self.fresh(self.slopes(seed))
        self.hides = False
        loads = [what.replace("secret", "module") for what in order if what != "attach"]
        for what in order:
            if what == "attach":
                self.trio = Trio(
                    module,
                    optimizers,
                    self.attached(module, optimizers, hooks=self.hooks),
                )
            elif what == "module":
                module.load_state_dict(saved.module)
            elif what == "secret":
                # the same values are no write unless torch tells
                for name, p in module.named_parameters():
                    same_values = torch.equal(p, saved.module[name])
                    (p.detach() if same_values else p.data).copy_(saved.module[name])
            elif what == "optimizers":
                for optimizer, found in zip(
                    optimizers, copy.deepcopy(saved.optimizers), strict=True
                ):
                    optimizer.load_state_dict(found)
            else:
                self.trio.sparse.load_state_dict(saved.sparse)
        assert set(loads) == {"module", "optimizers", "sparse"} and self.trio is not old
        self.reference.load_optimizers(saved.reference)
        self.reference.load_state(saved.reference)
        self.changes, self.phase = self.trio.sparse.changes, "idle"
        self.mark()
        assert_same(
            "the state of a new process", self.trio.sparse.state, self.reference.state
        )
        assert_same(
            "the module of a new process", self.weights(), self.reference.shown()
        )

    def copies(self, order: Sequence[int], pickles: bool) -> None:
        """Go on with a copy of all three; the other trains on by itself, and then is
        gone.
        """
        given = tuple(self.trio[i] for i in order)
        copied: Any = _through_a_file(given) if pickles else copy.deepcopy(given)
        old, self.trio = (
            self.trio,
            Trio(*(copied[list(order).index(i)] for i in range(3))),
        )
        for p in self.optimized():
            p.grad = None
        self.phase = "idle"
        train(Trio(*old), self.slopes(1), self.reference.last + 1, self.hooks)

    def reattach(self, hooks: bool, keeps: bool) -> None:
        """Detach and attach again; with the old state, or by new masks of the
        settled weights.
        """
        self.take()
        found, sparse = self.trio.sparse.state_dict(), self.trio.sparse
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "detach: the settled mask of")
            sparse.detach()
        state, self.hooks = self.reference.state, hooks
        rested = sf.settled(self.algorithm, state)
        assert_same("the settled state", sparse.state, rested)
        assert_same("the settled module", self.weights(), self.weights_of(rested))
        self.reference.detach()
        new = self.attached(self.trio.module, self.trio.optimizers, hooks=hooks)
        self.reference.attach(self.algorithm, self.weights_of(rested))
        if keeps:
            last = found["step"]
            new.load_state_dict(found)
            self.reference.state, self.reference.last = state, last
        self.trio = self.trio._replace(sparse=new)
        self.clear()
        self.changes = new.changes
        self.mark()
        assert_same(
            "the state of what is attached again", new.state, self.reference.state
        )

    def weights_of(self, state: Any) -> dict[str, Tensor]:
        return leaves(sf.effective(state))

    # ---- misuse ----------------------------------------------------------------------

    @contextmanager
    def refused(self, kind: type[Exception], text: str) -> Iterator[None]:
        """What is done inside raises, says a text, and changes nothing."""
        before = self.everything()
        with pytest.raises(kind, match=text):
            yield
        assert_same("what a call that raised has left", self.everything(), before)

    def everything(self) -> Tree:
        """Copies of all tensors that a user can see."""
        moments = [
            one
            for optimizer in self.trio.optimizers
            for one in optimizer.state.values()
        ]
        tensors = [x for one in moments for x in one.values() if isinstance(x, Tensor)]
        grads = [
            torch.zeros(()) if p.grad is None else p.grad for p in self.optimized()
        ]
        found = [*tensors, *grads, *self.optimized()]
        return {str(i): x.detach().clone() for i, x in enumerate(found)}


class _Scaled(nn.Module):
    """A module whose forward pass writes to its weights."""

    def __init__(self, own: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.own = nn.ParameterList(own.values())

    def forward(self) -> None:
        for weight in self.own:
            weight.mul_(1.5)


# Ways to write that move neither a version nor an address.
HIDDEN = ("data", "some data", "foreach data", "functional call")


def _write_one(kind: str, p: nn.Parameter, new: Tensor) -> None:
    if kind == "times":
        p.mul_(1.5)
    elif kind == "some":
        p.copy_(torch.where(new > 1, new, p))
    elif kind == "memory":
        p.data = torch.where(new > 0, new, p)
    elif kind == "data":
        p.data.copy_(new)
    elif kind == "some data":
        p.data.copy_(torch.where(new > 0, new, p))
    elif kind == "set":
        p.set_(new)  # type: ignore[call-overload]
    elif kind == "swap":
        other = nn.Parameter(new)
        other.grad = p.grad
        torch.utils.swap_tensors(p, other)


def train(trio: Trio, slopes: Mapping[str, Tensor], step: int, hooks: bool) -> None:
    """A step as users write it."""
    trio.module(slopes).backward()
    if not hooks:
        trio.sparse.before_step()
    for optimizer in trio.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if not hooks:
        trio.sparse.after_step(step)


def _through_a_file(found: Any) -> Any:
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
