"""Presets: functions that are another one with other defaults."""

import inspect
import pickle
import pydoc

import pytest
import torch

import sparsefn as sf
from sparsefn.core.checks.presets import preset

PRESETS = {
    "set": (sf.set, sf.drop_grow, []),
    "rigl": (sf.rigl, sf.drop_grow, []),
    "snfs": (sf.snfs, sf.drop_grow, []),
    "one_shot": (sf.one_shot, sf.gmp, ["steps", "init"]),
    "ste": (sf.ste, sf.gmp, ["steps", "pruned", "regrow"]),
}


def draw(shape, *, color="black", width=1):
    return lambda: f"{shape} in {color}, {width} wide"


@preset(draw, color="red", fixed={"width": 2})
def outline():
    """A red outline."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_own_name_and_the_keywords_of_its_base(name):
    make, base, fixed = PRESETS[name]
    assert make.__name__ == make.__qualname__ == name
    assert make.__module__.startswith("sparsefn.algorithms.")
    shown = inspect.signature(make).parameters
    whole = inspect.signature(base).parameters
    assert [*shown] == [keyword for keyword in whole if keyword not in fixed]
    assert all(shown[keyword].kind is whole[keyword].kind for keyword in shown)
    text = pydoc.plain(pydoc.render_doc(make))
    assert all(f"{keyword}: " in text for keyword in shown)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_fixed_cannot_be_given(name):
    make, _, fixed = PRESETS[name]
    for keyword in fixed:
        with pytest.raises(
            TypeError, match=rf"{name}\(\) got an unexpected .*{keyword}"
        ):
            make(0.5, **{keyword: None})


def test_defaults_give_way_and_fixed_ones_do_not():
    assert outline("circle")() == "circle in red, 2 wide"
    assert outline("circle", color="blue")() == "circle in blue, 2 wide"
    assert outline(shape="circle")() == "circle in red, 2 wide"
    with pytest.raises(
        TypeError, match=r"outline\(\) .*'colour'; did you mean 'color'"
    ):
        outline("circle", colour="blue")
    with pytest.raises(TypeError, match="width"):
        outline("circle", width=3)
    with pytest.raises(TypeError, match="shape"):
        outline()


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (sf.set, {"by_sign": True}, {"drop": sf.scores.ranked(sf.scores.magnitude)}),
        (sf.set, {"by_sign": False}, {}),
        (sf.snfs, {"decay": 0.5}, {"grow": sf.scores.momentum(0.5)}),
    ],
)
def test_keywords_of_the_last_release_warn_and_do_what_they_did(make, old, new):
    words = "write (drop=ranked|grow=momentum)" if new else "leave by_sign out"
    with pytest.warns(DeprecationWarning, match=words) as caught:
        algorithm = make(0.5, **old)
    assert caught[0].filename == __file__
    params = {"w": torch.arange(24.0).reshape(4, 6).cos()}
    states = [
        one.update(one.init(params), params, 0) for one in (algorithm, make(0.5, **new))
    ]
    assert sf.checkpoint.tree_equal(*states)
    if new:
        with pytest.raises(TypeError, match=rf"{make.__name__}: expected .*, got both"):
            make(0.5, **old, **new)


def test_a_preset_is_shown_and_pickled_as_its_own_call():
    algorithm = sf.one_shot(0.5, sf.scores.saliency, pruned="keep")
    assert repr(algorithm) == "one_shot(0.5, saliency, pruned='keep')"
    again = pickle.loads(pickle.dumps(algorithm))
    assert repr(again) == repr(algorithm) and again.made_by.make is sf.one_shot
    assert algorithm.made_of.make is sf.gmp
    assert algorithm.made_by.arguments()["when"] == sf.at([0])


def test_one_shot_is_gmp_from_dense_masks():
    params = {"w": torch.arange(12.0).reshape(3, 4).cos()}
    whole = sf.gmp(0.5, sf.scores.magnitude, when=sf.at([0]), init="dense")
    for step in (0, 1):
        states = [
            algorithm.update(algorithm.init(params), params, step)
            for algorithm in (sf.one_shot(0.5), whole)
        ]
        assert sf.checkpoint.tree_equal(*states)
