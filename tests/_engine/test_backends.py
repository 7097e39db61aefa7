"""Backends are asked on their devices, for what their module says, and what they
decline is done as without them.
"""

import importlib.metadata

import pytest
import torch

import sparsefn as sf
from sparsefn._engine import backends
from sparsefn._engine.backends import BACKENDS
from sparsefn._engine.draws import leaf_draws
from sparsefn._engine.draws.draws import flips
from sparsefn._engine.selection.dispatch import Entry, winners

KEY = sf.random.key(3)
X = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
MOMENTUM = sf.optimizers.sgd(0.1, momentum=0.9)
NAMES = {
    "winners",
    "draws",
    "draws_of_leaves",
    "coins",
    "adam",
    "adam_updates",
    "sgd",
}


def under_masks(optimizer):
    params = {"w": X[0]}
    state = optimizer.init(params)
    masks = {"w": X[1] > 0}
    return optimizer.under_masks(params, state, params, masks, clear=True)


def adam_updates():
    params = {"w": X[0]}
    optimizer = sf.optimizers.adamw(0.1)
    updates, _ = optimizer.update(params, optimizer.init(params), params=params)
    return updates["w"]


# The CPU's memory is read as it is: a transform hides it.
CALLS = {
    "winners": (
        "cpu",
        lambda: torch.vmap(lambda x: winners([Entry(x, absolute=True)], [7])[0])(X),
    ),
    "draws": (
        "cpu",
        lambda: torch.vmap(lambda key: sf.random.normal(key, (5,)))(
            sf.random.split(KEY, 2)
        ),
    ),
    "draws_of_leaves": (
        "cpu",
        lambda: leaf_draws.draws_laid(
            KEY, ["a", "b"], [*X], 3, "uniform", torch.float32
        )[1],
    ),
    "coins": (
        "cpu",
        lambda: torch.vmap(lambda p: flips(KEY, p, None, 40))(X[0].sigmoid()),
    ),
    "adam": ("cpu", lambda: under_masks(sf.optimizers.adam(0.1))[0]["w"]),
    "adam_updates": ("cpu", adam_updates),
    "sgd": ("cpu", lambda: under_masks(MOMENTUM)[0]["w"]),
}


def test_every_name_of_the_module_is_asked_for():
    assert CALLS.keys() == NAMES and all(
        f"`{name}(" in backends.__doc__ for name in NAMES
    )


@pytest.mark.parametrize("name", CALLS)
def test_what_a_backend_declines_is_done_as_without_it(name, monkeypatch):
    (device, call), asked = CALLS[name], []
    want = call()
    for other in NAMES:
        monkeypatch.setitem(
            BACKENDS, (other, device), lambda *args, other=other: asked.append(other)
        )
    got = call()
    assert name in asked and torch.equal(got, want)


@pytest.mark.parametrize("name", CALLS)
def test_of_another_device_it_is_not_asked(name, monkeypatch):
    monkeypatch.setitem(BACKENDS, (name, "cuda"), lambda *args: pytest.fail("asked"))
    CALLS[name][1]()


def test_what_a_backend_makes_is_taken(monkeypatch):
    monkeypatch.setitem(
        BACKENDS,
        ("winners", "cpu"),
        lambda entries, *rest: [x.scores > 9 for x in entries],
    )
    monkeypatch.setitem(
        BACKENDS,
        ("draws", "cpu"),
        lambda key, index, n, *rest: torch.full((*key.shape[:-1], n), 7.0),
    )
    made = -X[0]
    moved = [(made, made)], torch.tensor(7)
    monkeypatch.setitem(BACKENDS, ("sgd", "cpu"), lambda *args: moved)
    assert not CALLS["winners"][1]().any() and (CALLS["draws"][1]() == 7.0).all()
    params, state = under_masks(MOMENTUM)
    assert params["w"] is made and state.momentum["w"] is made
    assert state.count is moved[1]


def test_compiled_code_sees_a_backend_that_is_registered_later(monkeypatch):
    compiled = torch.compile(
        lambda x: x + backends.has_backend("sgd", "meta"),
        backend="eager",
        fullgraph=True,
    )
    assert compiled(torch.zeros(1)) == 0
    monkeypatch.setitem(BACKENDS, ("sgd", "meta"), lambda *args: None)
    assert compiled(torch.zeros(1)) == 1


class Point:
    """An entry point of a package, with what its function gives."""

    value = "some.kernels:installed"

    def __init__(self, made):
        self.made = made

    def load(self):
        return lambda device: self.made(device)


@pytest.fixture
def install(monkeypatch):
    """Lets a package be installed for a kind of device that nobody has."""
    monkeypatch.setattr(backends, "LOOKED", dict(backends.LOOKED))
    monkeypatch.setattr(backends, "BACKENDS", dict(BACKENDS))
    looked = []

    def entry_points(group, name):
        assert group == "sparsefn.backends"
        looked.append(name)
        return [Point(install.made)]

    def install(made):
        install.made = made
        return looked

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    return install


def test_an_installed_package_is_asked_once_for_a_kind_of_device(install):
    looked = install(lambda device: {("sgd", device): len, ("adam", device): len})
    backends.BACKENDS["adam", "new"] = max
    assert backends.call_backend("sgd", "new", "four") == 4
    assert backends.backend_of("adam", "new") is max  # by hand
    assert not backends.has_backend("coins", "new") and looked == ["new"]
    for device in ("cpu", "meta"):
        backends.has_backend("coins", device)
    assert looked == ["new"]


def test_one_line_leaves_installed_packages_out(install, monkeypatch):
    looked = install(lambda device: {("sgd", device): len})
    monkeypatch.setenv("SPARSEFN_KERNELS", "0")
    assert not backends.has_backend("sgd", "new") and looked == []


def test_a_package_that_does_not_load_is_named(install):
    install(lambda device: 1 / 0)
    with pytest.warns(
        UserWarning,
        match="the kernels of 'some.kernels:installed' do not load, so torch alone "
        "computes on 'new': ZeroDivisionError: .* SPARSEFN_KERNELS=0",
    ):
        assert not backends.has_backend("sgd", "new")
    assert not backends.has_backend("sgd", "new")  # and says so once


@pytest.mark.deep
def test_compiled_code_looks_while_it_is_traced(install):
    looked = install(lambda device: {("sgd", device): len})
    compiled = torch.compile(
        lambda x: x + backends.has_backend("sgd", "new"),
        backend="eager",
        fullgraph=True,
    )
    assert compiled(torch.zeros(1)) == compiled(torch.zeros(1)) == 1
    assert looked == ["new"]
