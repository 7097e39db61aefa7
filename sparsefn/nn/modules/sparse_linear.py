"""Linear layers that store and multiply only the weights that a mask keeps, or 2 of
every 4, which the GPU skips.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sparsefn.core.checks import check_int

Layout = Literal["auto", "csr", "bsr", "semi", "dense"]
SIZES = (32, 16, 8, 4)  # square blocks to look for in a mask

# The break-even on CPU, for batches of 1, 32 and 256. Measured as in
# docs/sparse-execution.md (torch 2.13, float32, AVX512): at 1024 x 1024 and above csr
# takes at most 0.9 of the dense time up to 0.05, blocks of 8 to 32 at most 0.95 up to
# 0.1. At 512 x 512 and 256 x 4096 a batch of 1 loses with either.
CSR_DENSITY = 0.05
BSR_DENSITY = 0.1
BSR_SIZE = 8
LEAST_SIDE = 1024

# Of torch's semi-structured tensors.
_DTYPES = (torch.float16, torch.bfloat16)
# rows and columns come in blocks: the smallest side that torch's table has for these
# dtypes
_SIDE = 16
_CAPABILITY = (8, 0)


@contextlib.contextmanager
def _without_beta_warning() -> Iterator[None]:
    # torch warns once in a process, at the first compressed tensor. Making it under
    # this context keeps forward silent.
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Sparse (CSR|BSR) tensor support is in beta", UserWarning
        )
        warnings.filterwarnings(
            "ignore", "Sparse invariant checks are implicitly disabled", UserWarning
        )  # torch 2.12
        yield


class SparseLinear(nn.Module):
    """`nn.Linear` for inference, with a weight in compressed rows or blocks of rows.

    >>> layer = SparseLinear(
    ...     torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([1.0, 5.0])
    ... )
    >>> layer, layer(torch.tensor([3.0, 4.0]))
    (SparseLinear(in_features=2, out_features=2, bias=True, csr, 1 of 4 stored),
    tensor([9., 5.]))

    `weight` is dense and given with its zeros, `block` the side of the blocks, 0 for
    csr. It stores dense buffers without gradients: `crow`, `col`, `values` and `bias`.
    """

    crow: Tensor
    col: Tensor
    values: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, block: int = 0) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.layout = torch.sparse_bsr if block else torch.sparse_csr
        with _without_beta_warning():
            stored = weight.detach().to_sparse(
                layout=self.layout, blocksize=(block, block) if block else None
            )
        # The product reads 32-bit indices faster.
        index = torch.int64
        if weight.numel() < 2**31:
            index = torch.int32
        self.register_buffer("crow", stored.crow_indices().to(index))
        self.register_buffer("col", stored.col_indices().to(index))
        self.register_buffer("values", stored.values())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self._warned()

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._warned()

    def _warned(self) -> None:
        with _without_beta_warning():
            self._stored()

    @property
    def weight(self) -> Tensor:
        """The dense weight, a new tensor, for code that reads it."""
        return self._stored().to_dense()

    def _stored(self) -> Tensor:
        # Made in each forward, which takes microseconds: dense buffers go through `to`,
        # `state_dict` and `deepcopy`.
        values = self.values
        size = (self.out_features, self.in_features)
        return torch.sparse_compressed_tensor(
            self.crow,
            self.col,
            values,
            size,
            layout=self.layout,
            device=values.device,
            check_invariants=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        # Sparse times dense: `F.linear`, dense times sparse, took 3 to 7 times as long
        # at a batch of 32.
        # reshape(-1) fails for a tensor without elements
        columns = x.reshape(x.shape[:-1].numel(), x.shape[-1]).t()
        if self.bias is None:
            out = torch.mm(self._stored(), columns)
        else:
            out = torch.addmm(self.bias[:, None], self._stored(), columns)
        return out.t().contiguous().reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        layout = "csr"
        if self.layout == torch.sparse_bsr:
            layout = f"bsr{self.values.shape[-1]}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {layout}, {self.values.numel()} of "
            f"{self.in_features * self.out_features} stored"
        )


def with_sparse_linears(
    baked: nn.Module,
    masks: Mapping[str, Tensor],
    layout: Layout = "auto",
    blocksize: int | None = None,
) -> nn.Module:
    """The module with a sparse weight in each linear layer whose mask suits the layout.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 1))
    >>> net[0].weight.data[0, 1] = 0.0
    >>> with_sparse_linears(net, {"0.weight": torch.tensor([[True, False]])}, "csr")
    Sequential(
      (0): SparseLinear(in_features=2, out_features=1, bias=True, csr, 1 of 2 stored)
    )

    `sf.modules.to_sparse` calls it on a copy that has the masked weights. The given
    module is changed, and returned unless it is itself a linear layer. `masks` are by
    the parameter's name, 0-d for dense ones.
    """
    if layout not in get_args(Layout):
        raise ValueError(
            f"expected layout to be one of {', '.join(map(repr, get_args(Layout)))}, "
            f"got {layout!r}"
        )
    if blocksize is not None:
        check_int("", "blocksize", blocksize, 1)
        if layout != "bsr":
            raise ValueError(
                "expected blocksize with layout='bsr' alone, got it with "
                f"layout={layout!r}"
            )
    baked.requires_grad_(False)
    uses = Counter(
        id(param) for _, param in baked.named_parameters(remove_duplicate=False)
    )
    layers: dict[str, nn.Linear] = {}
    for path, layer in baked.named_modules():
        name = f"{path}.weight" if path else "weight"
        if (
            name in masks
            and masks[name].ndim
            and _replaceable(baked, path, layer)
            and uses[id(layer.weight)] == 1
        ):
            assert isinstance(layer, nn.Linear)
            layers[name] = layer
    if layout == "semi":
        make_semi_structured(layers, masks)
        return baked
    for name, layer in layers.items():
        known = layer.weight.dtype in (torch.float32, torch.float64)
        block = None
        if known:
            block = _choose(masks[name], layout, blocksize)
        if block is None:
            continue
        sparse = SparseLinear(layer.weight, layer.bias, block).train(layer.training)
        path = name.rpartition(".")[0]
        if not path:
            return sparse
        baked.set_submodule(path, sparse)
    return baked


def _replaceable(root: nn.Module, path: str, layer: nn.Module) -> bool:
    # Exactly Linear: a subclass may compute something else. Hooks and an overridden
    # forward would be lost.
    # In eval mode the encoder layer hands the weights of its linear layers to one fused
    # function.
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    if layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return not path or not isinstance(
        root.get_submodule(path.rpartition(".")[0]), nn.TransformerEncoderLayer
    )


def _choose(mask: Tensor, layout: Layout, blocksize: int | None) -> int | None:
    """The side of the blocks, 0 for csr, None for dense."""
    if layout in ("csr", "dense"):
        return 0 if layout == "csr" else None
    if layout == "bsr":
        if blocksize is None:
            return next((size for size in SIZES if _fits(mask, size)), 0)
        return blocksize if _divides(mask, blocksize) else 0
    if mask.device.type != "cpu" or min(mask.shape) < LEAST_SIDE:
        return None
    # counts are rounded: 95 % sparse may keep a little above 5 %
    density = round(int(mask.sum()) / mask.numel(), 2)
    sizes = [size for size in SIZES if size >= BSR_SIZE and density <= BSR_DENSITY]
    return next(
        (size for size in sizes if _fits(mask, size)),
        0 if density <= CSR_DENSITY else None,
    )


def _divides(mask: Tensor, size: int) -> bool:
    return mask.shape[0] % size == 0 and mask.shape[1] % size == 0


def _fits(mask: Tensor, size: int) -> bool:
    # Every block is kept or pruned as a whole.
    if not _divides(mask, size):
        return False
    rows, columns = mask.shape
    blocks = mask.reshape(rows // size, size, columns // size, size)
    return torch.equal(blocks.any(3).any(1), blocks.all(3).all(1))


def make_semi_structured(
    layers: Mapping[str, nn.Linear], masks: Mapping[str, Tensor]
) -> None:
    """Put semi-structured weights into linear layers, given with their masks by the
    path of the weight.

    >>> layer = torch.nn.Linear(16, 16).half()
    >>> make_semi_structured({"0.weight": layer}, {"0.weight": torch.ones(16, 16) > 0})
    Traceback (most recent call last):
        ...
    ValueError: layout='semi': expected a mask that keeps at most 2 of every 4 weights
    along axis 1 at '0.weight', got 4

    No layer is changed unless all of them can be. Raises ValueError for weights that
    torch or the device does not take, RuntimeError where torch itself refuses; all name
    the path.
    """
    faults = [
        fault
        for path, layer in layers.items()
        if (fault := _fault(layer.weight, masks[path], path))
    ]
    if faults:
        raise ValueError(f"layout='semi': {'; '.join(faults)}")
    made = {path: _made(path, layer.weight) for path, layer in layers.items()}
    for path, layer in layers.items():
        layer.weight = nn.Parameter(made[path], requires_grad=False)


def _fault(weight: Tensor, mask: Tensor, path: str) -> str:
    # Why torch or the device does not take a weight; "" where it does.
    def reason(expected: str, got: object) -> str:
        return f"expected {expected} at {path!r}, got {got}"

    if weight.dtype not in _DTYPES:
        return reason("torch.float16 or torch.bfloat16 weights", weight.dtype)
    if any(size % _SIDE or not size for size in weight.shape):
        return reason(
            f"rows and columns in multiples of {_SIDE}", f"shape {tuple(weight.shape)}"
        )
    most = int(mask.unflatten(1, (mask.shape[1] // 4, 4)).sum(-1).max())  # type: ignore[no-untyped-call]
    if most > 2:
        return reason(
            "a mask that keeps at most 2 of every 4 weights along axis 1", most
        )
    lacking = without_sparse_cores(weight.device)
    if lacking:
        return reason("a CUDA device of compute capability 8.0 or higher", lacking)
    return ""


def without_sparse_cores(device: torch.device) -> str:
    """What a device is, if it cannot multiply by semi-structured weights.

    It is empty if it can.

    >>> without_sparse_cores(torch.device("cpu"))
    'cpu'
    """
    if device.type != "cuda":
        return str(device)
    capability = torch.cuda.get_device_capability(device)
    if capability >= _CAPABILITY:
        return ""
    return f"{device} of capability {'.'.join(map(str, capability))}"


def _made(path: str, weight: Tensor) -> Tensor:
    # torch says once in a process that the class is a prototype
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            "The PyTorch API of SparseSemiStructuredTensor is in prototype",
            UserWarning,
        )
        try:
            return torch.sparse.to_sparse_semi_structured(weight.detach().contiguous())
        except RuntimeError as error:
            raise RuntimeError(
                f"layout='semi': torch makes no semi-structured tensor of {path!r}: "
                f"{error}"
            ) from error
