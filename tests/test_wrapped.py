"""Tensors that others wrap: selection, masking and packing are right for them or
refuse, and make up nothing.
"""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

import sparsefn as sf
from sparsefn._engine.transforms import as_numpy

X = torch.randn(40, 200, generator=torch.Generator().manual_seed(0))


def updated(algorithm):
    return lambda x: algorithm.update(algorithm.init({"w": x}), {"w": x}, 0).masks["w"]


CALLS = {
    "topk": lambda x: sf.masks.topk_mask(x, 20),
    "nm": lambda x: sf.masks.topk_mask(x, None, pattern=sf.patterns.nm(2, 4)),
    "rows": lambda x: sf.masks.topk_mask(x, 3, pattern=sf.patterns.row_balanced()),
    "joint": lambda x: sf.masks.topk_masks([x, x.t()], 99)[1],
    "drop": lambda x: sf.masks.drop_lowest(x, x > 0, 9),
    "grow": lambda x: sf.masks.grow_highest(x, x > 0, 9),
    "apply": lambda x: sf.apply_masks({"w": x}, {"w": x > 0})["w"],
    "pack": lambda x: sf.masks.pack({"w": x > 0})["w"],
    "coins": lambda x: sf.masks.bernoulli_mask(x.sigmoid(), sf.random.key(0)),
    "gmp": lambda x: sf.gmp(0.5).init({"w": x}).masks["w"],
    "erk": lambda x: (
        sf.gmp(0.5, distribution=sf.budgets.erk()).init({"w": x}).masks["w"]
    ),
    "rigl": updated(sf.rigl(0.5)),
}


class Named(torch.Tensor):
    pass


class Watched(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Boxed(torch.Tensor):
    """A tensor that holds another and has no memory of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        open_ = (
            tree_map(lambda x: x.inner if isinstance(x, Boxed) else x, given)
            for given in (args, kwargs or {})
        )
        args, kwargs = open_
        return tree_map(
            lambda x: Boxed(x) if isinstance(x, torch.Tensor) else x,
            func(*args, **kwargs),
        )


def negated(x):
    view = torch._neg_view(-x)
    assert view.is_neg()
    return view


def imaginary(x):
    part = torch.complex(x, -x).conj().imag
    assert part.is_neg()
    return part


def dual(call):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(X, torch.ones_like(X))).clone()


def inference(call):
    with torch.inference_mode():
        return call(X.clone())


def functional(call):
    with FunctionalTensorMode():
        made = call(FunctionalTensor.to_functional(X))
        torch._sync(made)
        return torch._from_functional_tensor(made.elem)


functionalize, vmap = torch.func.functionalize, torch.func.vmap
WRAPPERS = {
    "functionalize": lambda call: functionalize(call)(X),
    "functional mode": functional,
    "vmap": lambda call: vmap(call)(X[None])[0],
    "nested vmap": lambda call: vmap(vmap(call))(X[None, None])[0, 0],
    "functionalize of vmap": lambda call: functionalize(vmap(call))(X[None])[0],
    "vmap of functionalize": lambda call: vmap(functionalize(call))(X[None])[0],
    "grad": lambda call: torch.func.grad(lambda x: (x.sum(), call(x)), has_aux=True)(X)[
        1
    ],
    "jvp": lambda call: torch.func.jvp(
        lambda x: (x, call(x)), (X,), (X,), has_aux=True
    )[2],
    "dual": dual,
    "inference": inference,
    "parameter": lambda call: call(torch.nn.Parameter(X)),
    "subclass": lambda call: call(X.as_subclass(Named)),
    "torch function": lambda call: call(X.as_subclass(Watched)),
    "torch dispatch": lambda call: call(Boxed(X)).inner,
    "negative view": lambda call: call(negated(X)),
    "conjugate": lambda call: call(imaginary(X)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_tensor_gives_what_it_holds(wrapper, name):
    call = CALLS[name]
    got = WRAPPERS[wrapper](call).detach()
    assert torch.equal(got.as_subclass(torch.Tensor), call(X))


def test_zeros_that_are_not_in_memory():
    zeros = torch._efficientzerotensor((40, 200))
    for name in CALLS.keys() - {"drop"}:  # there is nothing to drop
        assert torch.equal(CALLS[name](zeros), CALLS[name](torch.zeros(40, 200))), name


CAPTURED = {
    "functionalize": lambda call: functionalize(lambda _: call())(torch.ones(1)),
    "grad": lambda call: torch.func.grad(lambda x: (x.sum(), call()), has_aux=True)(
        torch.ones(1)
    )[1],
    "vmap": lambda call: vmap(lambda x: (x, call()), out_dims=(0, None))(torch.ones(2))[
        1
    ],
    "vmap of functionalize": lambda call: vmap(
        functionalize(lambda x: (x, call())), out_dims=(0, None)
    )(torch.ones(2))[1],
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("transform", CAPTURED)
def test_a_plain_tensor_inside_a_transform_of_others(transform, dtype):
    # Under functionalize even what is made from numpy's memory is wrapped, and does not
    # see what is written there.
    for size in (200, 2000):
        x = torch.randn(40, size, generator=torch.Generator().manual_seed(1)).to(dtype)
        for name, call in CALLS.items():
            got = CAPTURED[transform](lambda x=x, call=call: call(x))
            assert torch.equal(got, call(x)), name


REFUSED = {
    "sparse": lambda: X.to_sparse(),
    "compressed": lambda: X.to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(X, 1e-3, 0, torch.qint32),
    "opaque": lambda: X.to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor(list(X)),
    "jagged": lambda: torch.nested.nested_tensor(list(X), layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore")  # torch's, of layouts that it is about to leave
@pytest.mark.parametrize("name", ["topk", "nm", "rows", "joint", "gmp", "rigl"])
@pytest.mark.parametrize("layout", REFUSED)
def test_what_is_not_dense_is_refused(layout, name):
    x = REFUSED[layout]()
    assert as_numpy([x]) is None
    with pytest.raises((RuntimeError, TypeError, AttributeError)):  # torch's own words
        CALLS[name](x)


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_and_meta_tensors_give_shapes(name):
    want = CALLS[name](X)
    mode = FakeTensorMode()
    fake = mode.from_tensor(X)
    with mode:
        got = CALLS[name](fake)
    assert isinstance(got, torch._subclasses.FakeTensor) and (got.shape, got.dtype) == (
        want.shape,
        want.dtype,
    )
    if name != "coins":  # whose key lies on the CPU
        meta = CALLS[name](X.to("meta"))
        assert meta.is_meta and meta.shape == want.shape


@pytest.mark.parametrize(
    "algorithm",
    [
        sf.gmp(0.5),
        sf.gmp(0.5, distribution=sf.budgets.erk()),
        sf.gmp(0.5, distribution=sf.budgets.global_()),
        sf.rigl(0.5),
        sf.ste(0.5, pattern=sf.patterns.nm(2, 4)),
        sf.static(0.3, pattern=sf.patterns.row_balanced()),
        sf.static(0.5, init="bernoulli"),
        sf.supermask(0.5),
    ],
)
def test_an_algorithm_made_before_starts_on_fake_params(algorithm):
    with FakeTensorMode():
        params = {"a": torch.ones(4, 4), "b": torch.ones(4, 8), "c": torch.ones(3)}
        masks = algorithm.init(params).masks
        assert [tuple(masks[path].shape) for path in "abc"] == [(4, 4), (4, 8), ()]
        assert all(
            isinstance(mask, torch._subclasses.FakeTensor) and mask.dtype == torch.bool
            for mask in masks.values()
        )


@pytest.fixture
def mesh(tmp_path):
    if not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_distributed_tensors_are_right_or_refused(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(X, mesh, [Shard(0)])
    for name in CALLS.keys() - {"pack"}:
        assert torch.equal(CALLS[name](x).full_tensor(), CALLS[name](X)), name
    with pytest.raises(
        ValueError,
        match="pack: expected plain tensors, got a DTensor at 'w'; sf.distributed.save",
    ):
        CALLS["pack"](x)


@pytest.mark.filterwarnings("ignore")
def test_what_reads_whole_leaves_refuses_distributed_tensors_by_path(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    params = {"w": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}
    tiles = sf.patterns.transposable(2, 4)
    maps = {
        "soft_topk": sf.reparam.soft_topk(0.5, 1.0),
        "soft_nm": sf.reparam.soft_nm(2, 4),
        "low_rank": sf.reparam.low_rank(2),
        "hard_concrete with channel": sf.reparam.hard_concrete(
            pattern=sf.patterns.channel(0)
        ),
    }
    for name, map_ in maps.items():
        with pytest.raises(
            ValueError, match=f"{name}.*: expected plain tensors, got a DTensor at 'w'"
        ):
            sf.reparametrised(map_).init(params)
    with pytest.raises(
        ValueError,
        match=r"transposable\(2, 4\): expected plain tensors, got a DTensor at 'w'",
    ):
        sf.one_shot(None, pattern=tiles).init(params)
    with pytest.raises(
        ValueError, match=r"transposable\(2, 4\): expected plain tensors, got a DTensor"
    ):
        sf.masks.topk_mask(params["w"], None, pattern=tiles)
    with pytest.raises(
        ValueError,
        match="permutation.channels: expected plain tensors, got a DTensor at 'weight'",
    ):
        sf.permutation.channels(params["w"], 2, 4)
