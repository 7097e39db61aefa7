"""Every model of the zoo gets smaller with the outputs of the masked one."""

import pytest

from tests.shrinking import compare, zoo

# Of each idea one; `make test-all` takes them all.
COUNTED = (
    *(
        "resnext",
        "densenet",
        "mobilenet v3",
        "shufflenet v1",
        "convnext",
        "unet with pixel shuffle",
        "block attention",
    ),
    *(
        "sums over channels after a sigmoid",
        "normalised channels",
        "group norms",
        "constant tables",
        "own layer norm",
    ),
    *(
        "concatenations of one",
        "shortcuts with padded channels",
        "windows with a table of relative positions",
        "llama",
    ),
)
PLAIN = (
    "shufflenet v2",
    "gram matrix of pixels",
    "grouped queries",
    "operations of others",
    "experts by einsum",
    "t5",
)
SHRUNK = (
    "resnet bottleneck",
    "unet with transposed convolutions",
    "lstm classifier",
    "gated linear units",
)


@pytest.mark.deep(but=["resnext", "densenet", "mobilenet*"])
@pytest.mark.parametrize("name", [*COUNTED, *PLAIN])
def test_the_program_equals_the_masked_model(name):
    compare.check(*zoo.MODELS[name](), counted=name in COUNTED, forms=())


@pytest.mark.deep(but=["gated linear units"])
@pytest.mark.parametrize("name", SHRUNK)
def test_what_shrink_makes_equals_the_masked_model(name):
    compare.check(*zoo.MODELS[name](), counted=True)


# Once, and of each idea one as a program where it could be of its class: `smaller`
# traces the model anew, which takes seconds.
@pytest.mark.deep
@pytest.mark.parametrize("counted", [False, True], ids=["plain", "counted"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_small_equals_masked_for_other_units(name, counted):
    model, example = zoo.MODELS[name]()
    found = compare.groups(model, example, counted=counted)
    forms = () if counted else (None,)
    if counted and name in COUNTED:
        forms = ("program",)
    for seed in range(1, 5):
        compare.check(
            model, example, seed=seed, found=found, forms=forms if seed == 1 else ()
        )


def test_there_are_many_models_and_they_are_always_the_same():
    assert len(zoo.MODELS) >= 100
    for name in ("vgg", "llama"):
        (one, _), (two, _) = zoo.MODELS[name](), zoo.MODELS[name]()
        assert all(
            x.equal(y)
            for x, y in zip(
                one.state_dict().values(), two.state_dict().values(), strict=True
            )
        )


@pytest.mark.parametrize("name", ["vgg", "grouped queries"])
def test_the_comparison_sees_one_part_in_a_million(name):
    model, example = zoo.MODELS[name]()
    found = compare.groups(model, example)
    gone = compare.random_units(found, 0)
    masks = found.masks(gone)
    wanted = compare.outputs(
        model, example, {n: p.detach() * masks[n] for n, p in model.named_parameters()}
    )
    small = compare.program(found.cut(gone))
    compare.check_outputs(wanted, small, example, "the program")
    next(small.parameters()).data *= 1 + 1e-6
    with pytest.raises(AssertionError, match="the program"):
        compare.check_outputs(wanted, small, example, "the program")
