"""Parameters that a weight is computed from: torch calls them originals. Here their paths tell."""

from __future__ import annotations

from collections.abc import Iterable

from sparsefn.engine.surroundings import at_compile_time


@at_compile_time
def computed_name(path: str) -> str:
    """The path of the weight that a parametrization of torch computes from a parameter; empty for other parameters.

    >>> computed_name("0.parametrizations.weight.original1"), computed_name("0.weight")
    ('0.weight', '')
    """
    layer, found, rest = f".{path}".partition(".parametrizations.")
    return f"{layer}.{rest.split('.')[0]}"[1:] if found else ""


def check_weights(what: str, paths: Iterable[str]) -> None:
    """Raise ValueError for a path that goes through parametrizations: what is there is no weight.

    >>> check_weights("where", ["parametrizations.weight.original"])
    Traceback (most recent call last):
        ...
    ValueError: where: 'parametrizations.weight.original' is no weight: 'weight' is computed from it, and zeros in it
    need not be zeros in 'weight'. Make 'weight' a parameter, before the optimizer is made, with
    torch.nn.utils.parametrize.remove_parametrizations(model, 'weight'), or leave 'parametrizations.weight.original' out
    of `where`
    """
    for path in paths:
        if computed := computed_name(path):
            raise ValueError(f"{what}: {no_weight(path, computed, without_parametrizations(computed))}")


def no_weight(path: str, computed: str, mend: str) -> str:
    """Why a parameter gets no mask: a weight is computed from it.

    >>> no_weight("0.weight_v", "0.weight", "torch.nn.utils.remove_weight_norm(model[0])")[:57]
    "'0.weight_v' is no weight: '0.weight' is computed from it"
    """
    return (
        f"{path!r} is no weight: {computed!r} is computed from it, and zeros in it need not be zeros in {computed!r}. "
        f"Make {computed!r} a parameter, before the optimizer is made, with {mend}, or leave {path!r} out of `where`"
    )


def stays_dense(computed: str, mend: str) -> str:
    """What to do about a weight that is computed, where nothing asked for its mask.

    >>> stays_dense("0.weight", "torch.nn.utils.remove_weight_norm(model[0])")[:41]
    "'0.weight' is computed, so it stays dense"
    """
    return (
        f"{computed!r} is computed, so it stays dense: to sparsify it make it a parameter, before the optimizer is "
        f"made, with {mend}"
    )


def without_parametrizations(computed: str) -> str:
    """The call that makes a weight under parametrizations a parameter.

    >>> without_parametrizations("0.weight")
    "torch.nn.utils.parametrize.remove_parametrizations(model.get_submodule('0'), 'weight')"
    """
    layer, _, name = computed.rpartition(".")
    return f"torch.nn.utils.parametrize.remove_parametrizations({submodule(layer)}, {name!r})"


def submodule(path: str) -> str:
    """How to write a layer of a model.

    >>> submodule("0.a"), submodule("")
    ("model.get_submodule('0.a')", 'model')
    """
    return f"model.get_submodule({path!r})" if path else "model"
