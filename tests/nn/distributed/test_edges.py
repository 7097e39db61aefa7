"""The edges on two processes: commit and grads_of, save and load, check_replicas,
attach.
"""

import re
from functools import partial
from pathlib import Path

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsefn as sf
from sparsefn._engine.processes.lines import GATHER
from sparsefn.nn.checkpoint import tree_equal
from tests.nn.distributed.harness import on_ranks

STEPS = 8


def net():
    """Some shards are uneven and, of the last layer, empty."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9),
        nn.ReLU(),
        nn.Sequential(nn.Linear(9, 8), nn.ReLU()),
        nn.Linear(8, 1),
    )


def sharded():
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model[2])
    return fully_shard(model)


def masks():
    """Masks for `static`: the same on all processes."""
    draws = torch.Generator().manual_seed(1)
    return {
        n: torch.rand(p.shape, generator=draws) < 0.4
        for n, p in net().named_parameters()
        if p.ndim > 1
    }


def fixed(like):
    """An algorithm with these masks, laid out as the tensors of a dict."""
    found = masks()
    return sf.from_masks(
        {
            n: laid(found[n], p) if n in found else torch.tensor(True)
            for n, p in like.items()
        }
    )


KEY = sf.random.key(0)
ALGORITHMS = {
    "fixed": fixed,
    "rigl": lambda like: sf.rigl(
        0.6, drop_fraction=0.3, when=sf.every(2), distribution=sf.budgets.erk(), key=KEY
    ),
    "gmp": lambda like: sf.gmp(
        sf.schedules.polynomial(0.0, 0.8, 0, 6), distribution=sf.budgets.global_()
    ),
    "ste": lambda like: sf.ste(0.5),  # the module does not show all weights
    "supermask": lambda like: sf.supermask(0.5, key=KEY),  # scores join the optimizer
}


def laid(x, like):
    from torch.distributed.tensor import DTensor, distribute_tensor

    return (
        distribute_tensor(x, like.device_mesh, like.placements)
        if isinstance(like, DTensor)
        else x
    )


def full(tree):
    """The whole of every tensor."""
    from torch.distributed.tensor import DTensor

    return optree.tree_map(
        lambda x: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone(),
        tree,
    )


def backward(model, step, rank):
    """A backward pass on a batch that each process has for itself."""
    draws = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(5, 6, generator=draws)
    (model(x).squeeze(1) - x.sum(1)).square().mean().backward()


# ---- cases: each runs on both processes ----------------------------------------------


def a_loop_of_fsdp_is_that_of_one_process(rank, folder, name="rigl"):
    model = sharded()
    algorithm, alone = (
        sf.with_optimizer(
            ALGORITHMS[name](sf.modules.params_of(m)), sf.optimizers.adamw(1e-2)
        )
        for m in (model, net())
    )
    state = algorithm.init(sf.modules.params_of(model))
    one = alone.init(sf.modules.params_of(net()))
    assert tree_equal(full(state), one)
    for step in range(STEPS):
        sf.distributed.commit(model, state)
        backward(model, step, rank)
        grads = sf.distributed.grads_of(model, state)
        assert all(p.grad is None for p in model.parameters())
        state, one = (
            algorithm.update(state, grads, step),
            alone.update(one, full(grads), step),
        )
        assert tree_equal(full(state), one), step
        with torch.no_grad():
            model(torch.ones(1, 6))  # leaves the parameters of the root gathered
    sf.distributed.commit(model, state)
    assert tree_equal(full(sf.modules.params_of(model)), sf.effective(one))
    assert torch.equal(
        model(torch.ones(1, 6)), sf.modules.call(net(), one, torch.ones(1, 6))
    )


def gradients_that_are_missing_are_zeros(rank, folder):
    model = sharded()
    state = sf.dense().init(sf.modules.params_of(model))
    with pytest.raises(
        ValueError, match="grads_of: expected gradients, but no parameter has one"
    ):
        sf.distributed.grads_of(model, state)
    model.set_requires_gradient_sync(False)
    backward(model, 0, rank)
    with pytest.raises(
        ValueError,
        match="when gradients are accumulated, after the backward.. that reduces",
    ):
        sf.distributed.grads_of(model, state)
    model.set_requires_gradient_sync(True)
    backward(model, 1, rank)
    next(iter(model.parameters())).grad = None
    grads = sf.distributed.grads_of(model, state)
    assert not full(grads)["0.weight"].any() and full(grads)["2.0.weight"].any()
    assert all(
        g.placements == p.placements
        for g, p in zip(grads.values(), model.parameters(), strict=True)
    )


def what_does_not_fit_is_refused(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = sharded()
    before = full(sf.modules.params_of(model))
    state = sf.dense().init(sf.modules.params_of(model))
    for other, words in (
        (lambda p: p.full_tensor() + 1, "got one that is plain"),
        (
            lambda p: distribute_tensor(
                p.full_tensor(), init_device_mesh("cpu", (2,)), [Replicate()]
            ),
            "[Replicate()]",
        ),
    ):
        odd = sf.dense().init(
            {n: other(p) if n == "3.bias" else p + 1 for n, p in state.params.items()}
        )
        for name, fn in (
            ("commit", sf.distributed.commit),
            ("grads_of", sf.distributed.grads_of),
        ):
            with pytest.raises(
                ValueError,
                match=f"{name}: expected params as the module's parameter, laid out",
            ) as e:
                fn(model, odd)
            assert words in str(e.value) and "at '3.bias'" in str(e.value)
    assert tree_equal(full(sf.modules.params_of(model)), before)
    for name, fn in (
        ("call", lambda: sf.modules.call(model, state, torch.ones(1, 6))),
        (
            "call",
            lambda: sf.modules.call_with_buffers(model, state, {}, torch.ones(1, 6)),
        ),
        (
            "call",
            lambda: sf.modules.value_and_grad(
                lambda p: sf.modules.call(model, p, torch.ones(1, 6))
            )(state.params),
        ),
        ("bake", lambda: sf.modules.bake(model, state)),
    ):
        text = (
            f"sf.modules.{name}: expected a module that is not sharded, but it is a "
            "FSDPSequential of fully_shard, which cannot be copied and, after its "
            "first backward pass, ignores the weights that "
            "torch.func.functional_call gives it: write them into it with "
            "sf.distributed.commit(model, state), run it as it is, and take the "
            "gradients with sf.distributed.grads_of(model, state)"
        )
        with pytest.raises(ValueError, match=re.escape(text)):
            fn()
    inner = nn.Sequential(sharded())
    with pytest.raises(
        ValueError, match="but '0' in it is a FSDPSequential of fully_shard"
    ):
        sf.modules.call(inner, sf.modules.params_of(inner), torch.ones(1, 6))


def a_module_of_ddp_has_the_same_loop(rank, folder):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net())
    algorithm = sf.with_optimizer(
        sf.rigl(0.5, when=sf.every(2), key=sf.random.key(0)), sf.optimizers.adam(1e-2)
    )
    state = algorithm.init(sf.modules.params_of(model))
    for step in range(4):
        sf.distributed.commit(model, state)
        backward(model, step, rank)
        state = algorithm.update(state, sf.distributed.grads_of(model, state), step)
    sf.distributed.check_replicas(state)


def tensor_parallelism_has_the_same_loop(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8))
    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(1)),
        "3": SequenceParallel(),  # whose gradients are partial sums
    }
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    parallelize_module(
        model[3],
        init_device_mesh("cpu", (2,)),
        PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate()
        ),
    )
    algorithm = sf.with_optimizer(ALGORITHMS["rigl"](None), sf.optimizers.adam(1e-2))
    state = algorithm.init(sf.modules.params_of(model))
    one = algorithm.init(full(state.params))
    kinds = set()
    for step in range(4):
        sf.distributed.commit(model, state)
        # tensor parallel ranks share it
        x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().sin().sum().backward()
        kinds |= {str(p.grad.placements) for p in model.parameters()}
        grads = sf.distributed.grads_of(model, state)
        assert all(
            g.placements == p.placements
            for g, p in zip(grads.values(), model.parameters(), strict=True)
        )
        state, one = (
            algorithm.update(state, grads, step),
            algorithm.update(one, full(grads), step),
        )
        assert tree_equal(full(state), one), step
    assert any("Partial" in kind for kind in kinds), kinds


def a_checkpoint_fits_any_layout(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    draws = torch.Generator().manual_seed(0)
    params = {
        "w": torch.randn(7, 5, generator=draws),
        "short": torch.randn(1, 6, generator=draws).bfloat16(),
        "row": torch.randn(3, generator=draws),
    }
    algorithm = sf.with_optimizer(sf.dense(), sf.optimizers.adam(0.1))

    def state(placement, add=0.0):
        sharded = {
            n: distribute_tensor(p + add, mesh, [placement(p)])
            for n, p in params.items()
        }
        new = algorithm.update(
            algorithm.init(sharded), {n: p.sin() for n, p in sharded.items()}, 0
        )
        flags = {
            n: distribute_tensor(p > 0, mesh, [placement(p)])
            for n, p in params.items()
            if n != "row"
        }
        return new._replace(masks={**flags, "row": torch.tensor(True)})

    layouts = {
        "first": lambda p: Shard(0),
        "last": lambda p: Shard(p.ndim - 1),
        "replicated": lambda p: Replicate(),
    }
    for saved, placement in layouts.items():
        old = state(placement)
        sf.distributed.save(old, Path(folder) / saved)
        for other in layouts.values():
            template = state(other, add=1.0)
            before = full(template)
            found = sf.distributed.load(template, Path(folder) / saved)
            assert tree_equal(full(found), full(old))
            assert tree_equal(full(template), before), "the template is not changed"
            rows = zip(
                optree.tree_leaves(found), optree.tree_leaves(template), strict=True
            )
            assert all(
                getattr(a, "placements", None) == getattr(b, "placements", None)
                for a, b in rows
            )
        assert tree_equal(
            sf.distributed.load(full(old), Path(folder) / saved), full(old)
        ), "plain tensors"
        torch.save(
            sf.checkpoint.state_dict(full(old)), Path(folder) / f"{saved}{rank}.pt"
        )
        with pytest.raises(
            ValueError,
            match=re.escape(
                "missing are ['extra'] and unexpected ['masks.row', 'masks.short'"
            ),
        ):
            sf.distributed.load({"extra": old.params["w"]}, Path(folder) / saved)
        with pytest.raises(ValueError, match="save: expected a new folder"):
            sf.distributed.save(old, Path(folder) / saved)


def copies_that_differ_are_found(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2,))

    def tree(spoilt=""):
        def local(name, n):
            return torch.arange(n, dtype=torch.float32) + (
                rank if name == spoilt else 0
            )

        return {
            "copied": DTensor.from_local(
                local("copied", 4), mesh, [Replicate()], run_check=False
            ),
            "plain": {"flags": local("flags", 3) > 1, "0-d": local("0-d", 1)[0]},
            "split": DTensor.from_local(
                local("split", 4), mesh, [Shard(0)], run_check=False
            ),
        }

    sf.distributed.check_replicas(tree())
    # other processes hold other parts of it
    sf.distributed.check_replicas(tree("split"))
    for path in ("copied", "plain.flags", "plain.0-d"):
        text = (
            f"check_replicas: expected equal copies on all ranks, but at {path!r} "
            "ranks [0] and [1] have different ones: do all ranks see the same "
            "gradients, weights, keys and steps?"
        )
        with pytest.raises(ValueError, match=re.escape(text)):
            sf.distributed.check_replicas(tree(path.rpartition(".")[2]))
    zero = torch.tensor(-0.0 if rank else 0.0)
    with pytest.raises(ValueError, match="at 'w'"):
        sf.distributed.check_replicas({"w": zero})
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"expected the same leaves on every rank, got ['{'ab'[rank]}'] on"
        ),
    ):
        sf.distributed.check_replicas({"ab"[rank]: zero})
    with pytest.raises(
        TypeError, match="expected the state to hold tensors, got int at 'w'"
    ):
        sf.distributed.check_replicas({"w": 3})
    sf.distributed.check_replicas({"w": torch.tensor(float("nan"))})


def finite_is_one_answer(rank, folder):
    params = dict(sharded().named_parameters())
    assert sf.tree.all_finite(params)
    if rank == 1:
        params["0.weight"].detach().to_local()[0, 0] = float("nan")
    assert not sf.tree.all_finite(params)


def attach_trains_as_in_one_process(rank, folder):
    for make in ALGORITHMS.values():
        attach_trains_as_one(make, rank)


def attach_trains_as_one(make, rank):
    model, one = sharded(), net()
    optimizer, alone = (
        torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1)
        for m in (model, one)
    )
    algorithm = make(dict(model.named_parameters()))
    with torch.no_grad():
        model(torch.ones(1, 6))  # leaves the parameters of the root gathered
    sparse = sf.attach(algorithm, model, optimizer)
    other = sf.attach(make(dict(one.named_parameters())), one, alone)
    assert tree_equal(full(sparse.state), other.state)
    for step in range(STEPS):
        backward(model, step, rank)
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            q.grad = full(p.grad)
        for attached, opt in ((sparse, optimizer), (other, alone)):
            attached.before_step()
            opt.step()
            opt.zero_grad()
            attached.after_step(step)
        assert tree_equal(full(sparse.state), other.state), step
        assert tree_equal(
            full(sf.modules.params_of(model)), sf.modules.params_of(one)
        ), step
        moments, wanted = (
            [dict(opt.state[p]) for p in trained(opt)] for opt in (optimizer, alone)
        )
        assert tree_equal(full(moments), wanted), step
        if step == 4:  # goes on from what it has saved
            saved = {
                k: v.clone() if isinstance(v, torch.Tensor) else v
                for k, v in sparse.state_dict().items()
            }
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
            sparse.load_state_dict(saved)
            assert tree_equal(full(sparse.state), other.state)
    sparse.detach()
    assert tree_equal(full(sf.modules.params_of(model)), sf.modules.params_of(one))


def trained(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def a_step_that_rests_sends_nothing(rank, folder):
    from torch.distributed.tensor.debug import CommDebugMode

    model = sharded()
    algorithm = sf.with_optimizer(
        sf.rigl(0.5, when=sf.every(2), key=KEY), sf.optimizers.adam(1e-2)
    )
    state = algorithm.init(sf.modules.params_of(model))
    grads = sf.tree.copied(state.params)
    sent = []
    with pytest.MonkeyPatch.context() as patch, CommDebugMode() as seen:
        for name in ("all_reduce", GATHER, "all_to_all_single", "broadcast"):
            send = getattr(dist, name)
            patch.setattr(
                dist,
                name,
                lambda *args, send=send, **kwargs: (
                    sent.append(send) or send(*args, **kwargs)
                ),
            )
        state = algorithm.update(state, grads, 1)
        sf.distributed.commit(model, state)
        assert not sent and not seen.get_total_counts()
        algorithm.update(state, grads, 2)
        assert sent


CASES = (
    a_loop_of_fsdp_is_that_of_one_process,
    gradients_that_are_missing_are_zeros,
    what_does_not_fit_is_refused,
    a_module_of_ddp_has_the_same_loop,
    tensor_parallelism_has_the_same_loop,
    a_checkpoint_fits_any_layout,
    copies_that_differ_are_found,
    finite_is_one_answer,
    attach_trains_as_in_one_process,
    a_step_that_rests_sends_nothing,
)


def on_two(folder):
    for case in CASES:
        yield case.__name__, partial(case, dist.get_rank(), folder)


def test_on_two_processes(tmp_path):
    on_ranks(2, on_two, tmp_path)
    # one process, without a process group
    for layout in ("first", "last", "replicated"):
        wanted = torch.load(tmp_path / f"{layout}0.pt")
        assert tree_equal(sf.distributed.load(wanted, tmp_path / layout), wanted)
