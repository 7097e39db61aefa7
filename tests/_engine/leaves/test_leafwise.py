"""The passes have the bits of torch.where, whatever the size, the dtype, the layout,
the values and the threads.
"""

import pytest
import torch

import sparsefn as sf
from sparsefn._engine.leaves import blockwise, donation, leafwise, lists
from sparsefn._engine.leaves.buffers import BLOCK
from sparsefn.core import state as state_module

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ODD = (
    float("nan"),
    -float("nan"),
    -0.0,
    0.0,
    float("inf"),
    -float("inf"),
    1e-45,
    -1e-40,
    3e38,
    1.0,
)
# Below and above what is left to torch, one block, and a little over two; one dimension
# and several.
SHAPES = ((0,), (7,), (64, 65), (3, 5, 7, 97), (BLOCK,), (2 * BLOCK + 3,))
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def values(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    odd = torch.tensor(ODD, dtype=torch.float64)[
        torch.randint(0, len(ODD), shape, generator=generator)
    ]
    return torch.where(torch.rand(shape, generator=generator) < 0.3, odd, x).to(dtype)


def mask_of(shape, seed=9):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4


def same(a, b):
    """The same bits; a NaN that arithmetic made may have any sign."""
    assert a.dtype == b.dtype and a.shape == b.shape
    words = WORDS[a.element_size()]
    assert bool(
        (
            (a.contiguous().view(words) == b.contiguous().view(words))
            | (a.isnan() & b.isnan())
        ).all()
    )


def identical(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(
        a.contiguous().view(WORDS[a.element_size()]),
        b.contiguous().view(WORDS[b.element_size()]),
    )


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_where(shape, dtype):
    mask, new, old = mask_of(shape), values(shape, dtype, 0), values(shape, dtype, 1)
    zero = torch.zeros((), dtype=dtype)
    identical(leafwise.zeroed([mask], [new])[0], torch.where(mask, new, zero))
    identical(leafwise.either([mask], [new], [old])[0], torch.where(mask, new, old))
    same(leafwise.added([mask], [old], [new])[0], torch.where(mask, old + new, old))
    identical(leafwise.cleaned([mask], [new])[0], torch.where(mask, new, zero))
    # Off the mask a moved leaf keeps its very bits, NaN included.
    identical(
        torch.where(mask, zero, leafwise.added([mask], [old], [new])[0]),
        torch.where(mask, zero, old),
    )


def test_updates_that_are_zeros_off_the_mask_leave_every_bit():
    mask, old = mask_of((100, 100)), values((100, 100), torch.float32, 2)
    for zero in (0.0, -0.0):
        update = torch.where(mask, 1.0, zero)
        identical(
            leafwise.added([mask], [old], [update])[0],
            torch.where(mask, old + update, old),
        )


def test_many_leaves_on_threads():
    shapes = [(1000, 1100), (64, 64), (3,), (700, 700), (70000,)] * 2
    masks, new, old = [mask_of(s) for s in shapes], [], []
    for i, shape in enumerate(shapes):
        new.append(values(shape, DTYPES[i % 2], i))
        old.append(values(shape, DTYPES[i % 2], 100 + i))
    masks[3], zeros = torch.tensor(True), [x.new_zeros(()) for x in new]
    for row in zip(
        masks,
        new,
        old,
        zeros,
        leafwise.zeroed(masks, new),
        leafwise.either(masks, new, old),
        strict=True,
    ):
        mask, a, b, zero, masked, chosen = row
        identical(masked, torch.where(mask, a, zero))
        identical(chosen, torch.where(mask, a, b))
    for mask, a, b, result in zip(
        masks, new, old, leafwise.added(masks, old, new), strict=True
    ):
        same(result, torch.where(mask, a + b, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_layouts_and_dtypes_that_differ(dtype):
    whole, mask = values((130, 128), dtype, 3), mask_of((128, 130))
    channels = values((8, 16, 8, 8), dtype, 4).to(memory_format=torch.channels_last)
    cases = [
        (mask, whole.T),
        (mask.T, whole),
        (mask[::2], whole.T[::2]),
        (mask_of((8, 16, 8, 8)), channels),
    ]
    cases.append((mask[:1].expand(128, 130), whole.T.contiguous()))
    for kept, leaf in cases:
        zero = leaf.new_zeros(())
        identical(leafwise.zeroed([kept], [leaf])[0], torch.where(kept, leaf, zero))
        identical(leafwise.cleaned([kept], [leaf])[0], torch.where(kept, leaf, zero))
        same(
            leafwise.added([kept], [leaf], [leaf])[0],
            torch.where(kept, leaf + leaf, leaf),
        )
    other = values((128, 130), torch.float64, 5)
    # params keep their dtype
    mixed = torch.where(mask, (whole.T + other).to(dtype), whole.T)
    same(leafwise.added([mask], [whole.T.contiguous()], [other])[0], mixed)


def test_nothing_is_written_to_and_a_clean_leaf_is_handed_back():
    mask, leaf, other = (
        mask_of((90, 90)),
        values((90, 90), torch.float32, 6),
        values((90, 90), torch.float32, 7),
    )
    copies = [x.clone() for x in (mask, leaf, other)]
    leafwise.zeroed([mask], [leaf])
    leafwise.either([mask], [leaf], [other])
    leafwise.added([mask], [leaf], [other])
    leafwise.cleaned([mask], [leaf])
    for x, copy in zip((leaf, other), copies[1:], strict=True):
        identical(x, copy)
    assert torch.equal(mask, copies[0])
    (clean,) = leafwise.zeroed([mask], [leaf])
    assert leafwise.cleaned([mask], [clean])[0] is clean
    spot = int((~mask).flatten().nonzero()[-1])
    stained = clean.clone()
    stained.view(-1)[spot] = -0.0  # a zero of the other sign is a stain
    identical(leafwise.cleaned([mask], [stained])[0], clean)
    dense = leafwise.zeroed([torch.tensor(True)], [leaf])[0]
    assert dense is leaf


def test_gradients_flow_as_through_where():
    mask = mask_of((80, 80))
    for dtype in (torch.float32, torch.float64):
        leaf = values((80, 80), dtype, 8).nan_to_num(1.0, 1.0, 1.0).requires_grad_()
        leafwise.zeroed([mask], [leaf])[0].sum().backward()
        identical(leaf.grad, mask.to(dtype))
        old = torch.ones((80, 80), dtype=dtype, requires_grad=True)
        leaf.grad = None
        leafwise.added([mask], [old], [leaf])[0].sum().backward()
        identical(leaf.grad, mask.to(dtype))
        identical(old.grad, torch.ones_like(old))
        with torch.no_grad():
            assert not leafwise.zeroed([mask], [leaf])[0].requires_grad
    parameter = torch.nn.Parameter(torch.ones(80, 80), requires_grad=False)
    assert type(leafwise.zeroed([mask], [parameter])[0]) is torch.Tensor
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(
            torch.ones(80, 80), torch.full((80, 80), 3.0)
        )
        tangent = torch.autograd.forward_ad.unpack_dual(
            leafwise.zeroed([mask], [dual])[0]
        ).tangent
    identical(tangent, torch.where(mask, 3.0, 0.0))


def test_the_same_under_transforms():
    masks = torch.stack([mask_of((70, 70), seed) for seed in range(3)])
    new, old = (
        torch.stack([values((70, 70), torch.float32, 10 * i + j) for j in range(3)])
        for i in (1, 2)
    )

    def all_of(mask, a, b):
        return (
            leafwise.zeroed([mask], [a])[0],
            leafwise.either([mask], [a], [b])[0],
            leafwise.added([mask], [b], [a])[0],
            leafwise.cleaned([mask], [a])[0],
        )

    batched = torch.vmap(all_of)(masks, new, old)
    one = torch.vmap(all_of, in_dims=(None, 0, None))(masks[0], new, old[0])
    compiled = torch.compile(all_of, backend="aot_eager", fullgraph=True)(
        masks[0], new[0], old[0]
    )
    for i in range(3):
        for got, want in zip(batched, all_of(masks[i], new[i], old[i]), strict=True):
            same(got[i], want)
        for got, want in zip(one, all_of(masks[0], new[i], old[0]), strict=True):
            same(got[i], want)
    for got, want in zip(compiled, all_of(masks[0], new[0], old[0]), strict=True):
        same(got, want)
    slope = torch.func.grad(
        lambda a: all_of(masks[0], a, old[0])[0].nan_to_num().sum()
    )(torch.ones(70, 70))
    identical(slope, masks[0].float())


@pytest.mark.parametrize("shape", [(7,), (64, 65)])
def test_leaves_that_torch_negates_lazily(shape):
    mask, leaf = (
        mask_of(shape),
        torch.complex(values(shape, torch.float32, 0), values(shape, torch.float32, 1))
        .conj()
        .imag,
    )
    assert leaf.is_neg()
    identical(leafwise.zeroed([mask], [leaf])[0], torch.where(mask, leaf, 0.0))


def test_few_entries_of_any_layout():
    mask, leaf = mask_of((6, 8)).T, values((6, 8), torch.float32, 0).T
    identical(leafwise.zeroed([mask], [leaf])[0], torch.where(mask, leaf, 0.0))
    identical(
        leafwise.zeroed([mask], [leaf[:, :1].expand(8, 6)])[0],
        torch.where(mask, leaf[:, :1], 0.0),
    )
    own = leaf.clone().requires_grad_()
    leafwise.zeroed([mask], [own])[0].sum().backward()
    identical(own.grad, mask.float())


def test_sums_that_overflow_say_nothing():
    mask, big = torch.ones(70, 70, dtype=torch.bool), torch.full((70, 70), 3e38)
    assert leafwise.added([mask], [big], [big])[0].isinf().all()
    big[0, 0] = float("inf")
    assert leafwise.added([mask], [big], [-big])[0][0, 0].isnan()


def test_a_mask_of_another_shape_is_an_error_as_in_torch():
    with pytest.raises(RuntimeError):
        leafwise.zeroed([mask_of((64, 64))], [torch.ones(64, 65)])


def test_a_state_moves_as_it_is_put():
    params = {
        "w": values((70, 70), torch.float32, 11),
        "b": values((70,), torch.float32, 12),
    }
    updates = {
        "b": values((70,), torch.float32, 13),
        "w": values((70, 70), torch.float32, 14),
    }
    for pruned in ("zero", "keep", "train"):
        state = sf.static(0.5, pruned=pruned, init="magnitude").init(params)
        put = sf.masked_view.put(
            state, {path: state.params[path] + updates[path] for path in params}
        )
        moved = state_module.moved(state, updates)
        for path in params:
            same(moved.params[path], put.params[path])
    with pytest.raises(ValueError, match="there is no leaf at 'b'"):
        state_module.moved(state, {"w": params["w"]})


def test_sparse_is_read_off_shapes():
    assert leafwise.is_sparse(torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2))
    assert not leafwise.is_sparse(torch.tensor(True), torch.ones(2, 2))
    assert not leafwise.is_sparse(torch.tensor(True), torch.tensor(1.0))


def laid_end_to_end(monkeypatch):
    # What a device does, on the CPU: nothing is read as memory, and leaves are laid end
    # to end.
    monkeypatch.setattr(leafwise, "_words", lambda *tensors, **least: None)
    monkeypatch.setattr(lists, "pays", lambda tensors: True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str
)
def test_leaves_that_are_laid_end_to_end_have_the_same_bits(dtype, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 3), (5,), (), (4, 1), (7,)]
    leaves, others = (
        [torch.randn(s, generator=draw).to(dtype) for s in shapes] for _ in range(2)
    )
    leaves[1][:3] = torch.tensor([torch.nan, -0.0, torch.inf])
    masks = [torch.rand(s, generator=draw) > 0.5 for s in shapes]
    masks[3] = torch.tensor(True)  # a dense leaf
    calls = {
        "zeroed": lambda: leafwise.zeroed(masks, leaves),
        "either": lambda: leafwise.either(masks, leaves, others),
        "moved": lambda: leafwise.added(masks, leaves, others),
        "cleaned": lambda: leafwise.cleaned(masks, leaves),
    }
    want = {name: call() for name, call in calls.items()}
    laid_end_to_end(monkeypatch)
    for name, call in calls.items():
        for got, expected in zip(call(), want[name], strict=True):
            assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0)), name
            assert torch.equal(got.signbit(), expected.signbit()) and got.dtype == dtype


@pytest.mark.parametrize(
    "optimizer",
    [
        sf.optimizers.sgd(0.1),
        sf.optimizers.sgd(0.1, momentum=0.9, nesterov=True),
        sf.optimizers.adamw(0.1),
    ],
    ids=str,
)
def test_optimizers_step_leaves_at_once_with_the_same_bits(optimizer, monkeypatch):
    draw = torch.Generator().manual_seed(1)
    params = {str(i): torch.randn(n, generator=draw) for i, n in enumerate((3, 8, 5))}
    masks = {path: x > 0 for path, x in params.items()}

    def run():
        state, weights = optimizer.init(params), params
        for _ in range(3):
            updates, state = optimizer.update(weights, state, params=weights)
            moved = leafwise.added(
                [*masks.values()], [*weights.values()], [*updates.values()]
            )
            weights = dict(zip(params, moved, strict=True))
        return weights

    want = run()
    laid_end_to_end(monkeypatch)
    monkeypatch.setattr(blockwise, "flat_memory", lambda *tensors, **least: None)
    assert all(torch.equal(got, want[path]) for path, got in run().items())


def test_spent_leaves_are_zeroed_in_their_own_memory_if_they_were_offered():
    mask = mask_of((100, 100))
    want = torch.where(mask, values((100, 100), torch.float32, 0), 0.0)
    for overwrite, given, kept in (
        (True, True, True),
        (False, True, False),
        (True, False, False),
    ):
        leaf = values((100, 100), torch.float32, 0)
        at = leaf.data_ptr()
        with donation.donating([leaf]):
            if given:
                donation.donate([leaf], [])
            (zeroed,) = leafwise.zeroed([mask], [leaf], overwrite=overwrite)
        identical(zeroed, want)
        assert (zeroed.data_ptr() == at) is kept is (type(leaf) is donation.Emptied)


def test_plain_lists_are_handed_on():
    given = [torch.ones(2)], [torch.zeros(2)]
    seen = []

    @leafwise.each_local
    def fn(*lists):
        seen.append(lists)
        return list(lists[-1])

    assert fn(*given)[0] is given[1][0]
    assert all(a is b for a, b in zip(seen[0], given, strict=True))
    assert fn([], []) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_are_written_in_place_and_compared_by_their_bits(shape, dtype):
    mask, leaf = mask_of(shape), values(shape, dtype, 0)
    for kept, x in (
        ((mask, leaf), (mask.T, leaf.T)) if len(shape) == 2 else ((mask, leaf),)
    ):
        mine = torch.nn.Parameter(x.clone())
        before = mine.data_ptr(), mine._version
        leafwise.zero_([kept, torch.tensor(True)], [mine, torch.ones(2)])
        identical(mine.detach(), torch.where(kept, x, torch.zeros((), dtype=dtype)))
        assert (mine.data_ptr(), mine._version) == before
        shown = [mine.detach().clone(), x.clone()]
        assert leafwise.are_zeroed([kept, torch.tensor(True)], [x, x], shown)
        for other in shown if x.numel() else ():
            old = other[(-1,) * x.ndim].clone()
            other[(-1,) * x.ndim] = 7.0
            assert not leafwise.are_zeroed([kept, torch.tensor(True)], [x, x], shown)
            other[(-1,) * x.ndim] = old


def test_zeros_are_written_into_other_tensors():
    class Own(torch.Tensor):
        pass

    for leaf in (
        torch.ones(2).as_subclass(Own),
        torch.ones(2, dtype=torch.float8_e5m2),
    ):
        leafwise.zero_([torch.tensor([True, False])], [leaf])
        assert leaf.float().tolist() == [1.0, 0.0]
    assert leafwise.are_zeroed([], [], [])
