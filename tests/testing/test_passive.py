"""`passive`: the bits of the algorithm, and an error for each promise that a broken one
breaks.
"""

import importlib
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.testing import Broken, Meta, passive
from sparsefn.testing.harness import assert_same

Tree = Any
PARAMS = {"a": torch.linspace(-1, 1, 24).reshape(4, 6), "b": torch.arange(3.0)}
GRADS = {"a": torch.linspace(2, -3, 24).reshape(4, 6), "b": torch.ones(3)}
RIGL = sf.rigl(0.5, when=sf.every(2), init="magnitude")
GMP = sf.gmp(sf.schedules.polynomial(0.25, 0.75, begin=0, end=2), when=sf.every(2))
SHARED = torch.zeros(4, 6)


def states(
    algorithm: sf.Algorithm, steps: int = 4, grads: Tree = GRADS
) -> list[sf.State]:
    found = [algorithm.init(PARAMS)]
    for step in range(steps):
        found.append(algorithm.update(found[-1], grads, step))
    return found


@pytest.mark.parametrize(
    "algorithm", [RIGL, GMP, sf.dense(), sf.ste(0.5), sf.snfs(0.5)], ids=repr
)
@pytest.mark.parametrize("inside", [True, False])
def test_the_bits_are_those_without(algorithm: sf.Algorithm, inside: bool) -> None:
    optimizer = sf.optimizers.adamw(0.1)
    trained = sf.with_optimizer(passive(algorithm) if inside else algorithm, optimizer)
    for a, b in zip(
        states(sf.with_optimizer(algorithm, optimizer)),
        states(trained if inside else passive(trained)),
        strict=True,
    ):
        assert_same("a state", a, b)


# ---- planted bugs --------------------------------------------------------------------


def after(
    change: Callable[[sf.State, sf.State, Tree, Any], Any],
    algorithm: sf.Algorithm = RIGL,
) -> sf.Algorithm:
    """`change(old, new, grads, step)` has the last word in every update."""

    def update(state: sf.State, grads: Tree, step: Any) -> Any:
        return change(state, algorithm.update(state, grads, step), grads, step)

    return algorithm._replace(update=update)


def leaf(state: sf.State, field: str, make: Callable[[Any], Any]) -> sf.State:
    tree = getattr(state, field)
    return state._replace(**{field: tree | {"a": make(tree["a"])}})


def writes(which: str) -> sf.Algorithm:
    def change(old: sf.State, new: sf.State, grads: Tree, step: Any) -> sf.State:
        tree = {"grads": grads, "state": old.params, "masks": old.masks}[which]
        tree["a"].logical_or_(tree["a"]) if which == "masks" else tree["a"].add_(0.0)
        return new

    return after(change)


def draws(draw: Callable[[], object]) -> sf.Algorithm:
    return after(lambda old, new, grads, step: (draw(), new)[1])


def all_kept(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x)


def first_flipped(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1).clone()
    flat[0] = ~flat[0]
    return flat.reshape(x.shape)


def negative_zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, -0.0, x)


DECLARED = Meta(when=sf.every(2), start="magnitude")
MONOTONE = Meta(start="magnitude", monotone=True)

# what the message says: the algorithm, its promises, the sparsity
BUGS: dict[str, tuple[sf.Algorithm, Meta | None, float | None]] = {
    r"update at step 0 writes to its input, grads at 'a'": (
        writes("grads"),
        None,
        None,
    ),
    r"update at step 0 writes to its input, state at 'params.a'": (
        writes("state"),
        None,
        None,
    ),
    r"update at step 0 writes to its input, state at 'masks.a'": (
        writes("masks"),
        None,
        None,
    ),
    r"update at step 0 reads or advances a global generator": (
        draws(lambda: torch.rand(1)),
        None,
        None,
    ),
    r"step 0 reads or advances a global generator": (
        draws(lambda: np.random.rand()),
        None,
        None,
    ),
    r"0 reads or advances a global generator": (draws(random.random), None, None),
    r"init reads or advances": (
        RIGL._replace(init=lambda p: (torch.rand(1), RIGL.init(p))[1]),
        None,
        None,
    ),
    r"init writes to its input, params at 'b'": (
        RIGL._replace(init=lambda p: (p["b"].add_(0), RIGL.init(p))[1]),
        None,
        None,
    ),
    r"init keeps its params in the state at 'params.a'": (
        sf.dense()._replace(
            init=lambda params: sf.State(params, sf.dense().init(params).masks)
        ),
        None,
        None,
    ),
    r"update at step 0 keeps its grads in the state at 'scores.grad.a'": (
        sf.Algorithm(
            lambda p: (
                sf.dense()
                .init(p)
                ._replace(scores={"grad": optree.tree_map(torch.zeros_like, p)})
            ),
            lambda state, grads, step: state._replace(scores={"grad": grads}),
        ),
        None,
        None,
    ),
    r"keeps a part of a tensor of the old state at 'params.a'": (
        after(
            lambda old, new, grads, step: leaf(
                new, "params", lambda _: old.params["a"].reshape(6, 4).t()
            )
        ),
        None,
        None,
    ),
    r"keeps a view with strides \(1, 4\) at 'params.a'": (
        after(
            lambda old, new, grads, step: leaf(
                new, "params", lambda x: x.t().contiguous().t()
            )
        ),
        None,
        None,
    ),
    r"update at step 0 gives no State, but dict": (
        after(lambda old, new, grads, step: new.params),
        None,
        None,
    ),
    r"changes the structure: .*unknown leaf at 'scores.0' .*the old state lack": (
        after(
            lambda old, new, grads, step: new._replace(
                scores=(torch.ones(()), torch.ones(()))
            )
        ),
        None,
        None,
    ),
    r"update at step 0 changes the structure: .*float32 at 'params.a', got "
    r"torch.float64": (
        after(lambda old, new, grads, step: leaf(new, "params", torch.Tensor.double)),
        None,
        None,
    ),
    r"init changes the structure: expected a bool mask at 'a'": (
        RIGL._replace(
            init=lambda params: leaf(RIGL.init(params), "masks", torch.Tensor.float)
        ),
        None,
        None,
    ),
    r"update at step 1 changes the mask at 'a', where no trigger fires": (
        after(
            lambda old, new, grads, step: (
                leaf(new, "masks", first_flipped) if step == 1 else new
            )
        ),
        DECLARED._replace(pruned="keep"),
        None,
    ),
    r"update at step 0: weights off the mask at 'a' are not \+0.0; declare "
    r"Meta\(pruned=": (
        after(lambda old, new, grads, step: leaf(new, "params", lambda x: x + 1.0)),
        DECLARED,
        None,
    ),
    r"update at step 1: weights off the mask at 'a' are not": (
        after(
            lambda old, new, grads, step: (
                leaf(new, "params", negative_zeros) if step == 1 else new
            )
        ),
        DECLARED,
        None,
    ),
    r"init: weights off the mask at 'a' are not": (
        sf.static(0.5, pruned="keep")._replace(within=None),
        Meta(when=sf.never()),
        None,
    ),
    r"update at step 0: \[24\] units are kept, expected \[12\], in \['a'\]": (
        after(lambda old, new, grads, step: leaf(new, "masks", all_kept)),
        DECLARED,
        0.5,
    ),
    r"init: \[12\] units are kept, expected \[18\], in \['a'\]": (RIGL, DECLARED, 0.25),
    r"update at step 2: \[18\] units are kept, expected \[6\]": (
        after(
            lambda old, new, grads, step: leaf(new, "masks", lambda _: old.masks["a"]),
            GMP,
        ),
        Meta(
            level=lambda s: sf.schedules.polynomial(0.25, s, begin=0, end=2),
            when=sf.every(2),
            start="magnitude",
        ),
        0.75,
    ),
    r"update at step 0: a mask of monotone=True keeps what was pruned": (
        sf.rigl(
            0.5,
            when=sf.every(2),
            init="magnitude",
            drop_fraction=1.0,
            exclude_dropped=True,
        ),
        MONOTONE,
        None,
    ),
}


@pytest.mark.parametrize("message", BUGS)
def test_a_broken_promise_is_noticed(message: str) -> None:
    algorithm, meta, sparsity = BUGS[message]
    with pytest.raises(Broken, match=message):
        states(passive(algorithm, meta=meta, sparsity=sparsity))


def test_counts_of_an_algorithm_of_ours_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an optimizer and terms around it, and nothing declared."""
    broken = sf.with_optimizer(
        sf.with_terms(RIGL, sf.terms.l2(0.1)), sf.optimizers.sgd(0.1)
    )
    states(passive(broken))
    cycle = importlib.import_module("sparsefn.algorithms.drop_grow")._Cycle
    monkeypatch.setattr(
        cycle, "_within", lambda self, units, had, target, lost: had - 3
    )
    monkeypatch.setattr(
        cycle, "_grown", lambda self, units, grow, taken, more: more * 0
    )
    with pytest.raises(
        Broken,
        match=r"update at step 0: \[3\] units are kept, expected \[12\], in \['a'\]",
    ):
        states(passive(broken))


def test_off_the_mask_every_block_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("sparsefn.testing.passive"), "_BLOCK", 5
    )
    late = after(
        lambda old, new, grads, step: (
            leaf(new, "params", lambda x: x + 1.0) if step == 3 else new
        )
    )
    with pytest.raises(Broken, match="update at step [3-8]: weights off the mask"):
        states(passive(late, meta=Meta(when=sf.at([0]))), 9)


def test_a_step_in_which_nothing_is_finite_changes_no_count() -> None:
    grads = {"a": torch.full((4, 6), torch.nan), "b": torch.ones(3)}
    states(
        passive(sf.with_optimizer(GMP, sf.optimizers.sgd(0.1), skip_nonfinite=True)),
        grads=grads,
    )


# ---- where ---------------------------------------------------------------------------


def test_under_transforms_structure_is_checked() -> None:
    healthy, double = (
        passive(RIGL),
        passive(after(lambda o, n, g, s: leaf(n, "params", torch.Tensor.double))),
    )
    stacked = sf.ensemble.stack([RIGL.init(PARAMS)] * 2)
    both = sf.ensemble.stack([GRADS] * 2)
    wanted = RIGL.update(RIGL.init(PARAMS), GRADS, 0)
    for member in sf.ensemble.unstack(
        torch.vmap(healthy.update, in_dims=(0, 0, None))(stacked, both, 0)
    ):
        assert_same("a member", wanted, member)
    with pytest.raises(Broken, match="changes the structure"):
        torch.vmap(double.update, in_dims=(0, 0, None))(stacked, both, 0)
    assert torch.vmap(healthy.init)(
        {name: torch.stack([x, x]) for name, x in PARAMS.items()}
    ).masks["b"].shape == (2,)
    meta = optree.tree_map(lambda x: x.to("meta"), PARAMS)
    assert healthy.update(healthy.init(meta), meta, 0).params["a"].is_meta


@pytest.mark.deep
def test_compiled_it_has_the_same_bits() -> None:
    update = torch.compile(passive(RIGL).update, backend="eager", fullgraph=True)
    state = wanted = RIGL.init(PARAMS)
    for step in range(3):
        state, wanted = (
            update(state, GRADS, torch.tensor(step)),
            RIGL.update(wanted, GRADS, step),
        )
        assert_same(f"step {step}", wanted, state)


def test_under_inference_mode() -> None:
    with torch.inference_mode():
        found = states(passive(RIGL))
    assert_same("the last state", states(RIGL)[-1], found[-1])


def test_in_a_loop_of_torch_optim() -> None:
    def run(algorithm: sf.Algorithm) -> torch.Tensor:
        model = torch.nn.Linear(6, 4)
        with torch.no_grad():
            model.weight.copy_(PARAMS["a"])
            model.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        sparse = sf.attach(algorithm, model, optimizer)
        for step in range(4):
            model(GRADS["a"]).square().sum().backward()
            sparse.before_step()
            optimizer.step()
            optimizer.zero_grad()
            sparse.after_step(step)
        return model.weight.detach()

    assert torch.equal(run(RIGL), run(passive(RIGL)))


def test_what_is_chosen_among_masks_is_watched_too() -> None:
    algorithm = sf.chain(sf.static(0.5, init="magnitude"), passive(RIGL))
    for a, b in zip(
        states(algorithm),
        states(sf.chain(sf.static(0.5, init="magnitude"), RIGL)),
        strict=True,
    ):
        assert_same("a state", a, b)
    assert passive(RIGL).within is not None and passive(sf.dense()).within is None


def test_donated_writes_over_states() -> None:
    trained = sf.with_optimizer(RIGL, sf.optimizers.adamw(0.1))
    with pytest.raises(
        ValueError, match="passive: expected an algorithm that is pure, got sf.donated"
    ):
        passive(sf.donated(trained))
    given = sf.donated(passive(trained))
    state = given.init(PARAMS)
    for step in range(4):
        state = given.update(state, GRADS, step)
    assert_same("the last state", states(trained)[-1], state)


def test_it_is_shown_as_its_call_and_says_what_it_expects() -> None:
    assert repr(passive(sf.rigl(0.5))) == "passive(rigl(0.5))"
    wrong: Any = "rigl"
    with pytest.raises(TypeError, match="passive: expected an Algorithm.*got str"):
        passive(wrong)
    with pytest.raises(
        TypeError,
        match=re.escape("passive: expected meta to be a sf.testing.Meta, got str"),
    ):
        passive(RIGL, meta=wrong)
    with pytest.raises(
        ValueError, match=re.escape("passive: expected meta beside sparsity=0.5")
    ):
        passive(RIGL, sparsity=0.5)
