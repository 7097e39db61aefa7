"""Losses of a student and its teacher: identities, masks of tokens, transforms, bad
input.
"""

import functools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import sparsefn as sf

kl, relations = sf.recovery.kl, sf.recovery.relations
mean_square, cosine_distance = sf.recovery.mean_square, sf.recovery.cosine_distance


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


STUDENT, TEACHER = normal(3, 5, 8, seed=1), normal(3, 5, 8, seed=2)
TOKENS = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()


def in_heads(student, teacher, tokens=None):
    return relations(student, teacher, tokens, heads=2)


def over_top(student, teacher, tokens=None):
    return kl(student, teacher, tokens, temperature=1.5, top=3)


def softened(student, teacher, tokens=None):
    return kl(student, teacher, tokens, temperature=0.5)


LOSSES = [kl, softened, over_top, mean_square, cosine_distance, in_heads]


def gradient(loss, student, teacher, tokens=None):
    return torch.func.grad(loss)(student, teacher, tokens)


# ---- values --------------------------------------------------------------------------


@given(temperature=st.sampled_from([0.5, 1.0, 4.0]), seed=st.integers(0, 99))
def test_kl_is_torchs(temperature, seed):
    student, teacher = normal(6, 9, seed=seed), normal(6, 9, seed=seed + 100)
    theirs = functional.kl_div(
        (student / temperature).log_softmax(-1),
        (teacher / temperature).log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )
    ours = kl(student, teacher, temperature=temperature)
    torch.testing.assert_close(ours, temperature**2 * theirs)


def test_kl_differs_from_cross_entropy_by_the_entropy_of_the_teacher():
    p = TEACHER.softmax(-1)
    crossed = functional.cross_entropy(STUDENT.flatten(0, 1), p.flatten(0, 1))
    entropy = -(p * p.log()).sum(-1).mean()
    torch.testing.assert_close(kl(STUDENT, TEACHER), crossed - entropy)


def test_the_gradient_of_kl_at_a_high_temperature_is_that_of_squared_logits():
    # Hinton et al., eq. 4: for logits of mean 0, (student - teacher) / classes
    student, teacher = (
        STUDENT - STUDENT.mean(-1, True),
        TEACHER - TEACHER.mean(-1, True),
    )
    found = torch.func.grad(lambda x: kl(x, teacher, temperature=1e4))(student)
    torch.testing.assert_close(
        found, (student - teacher) / 8 / 15, rtol=1e-3, atol=1e-6
    )


def test_top_compares_the_teachers_likeliest_classes_alone():
    top = TEACHER.topk(3, -1).indices  # no two of these are equal
    few = kl(STUDENT.gather(-1, top), TEACHER.gather(-1, top), temperature=1.5)
    torch.testing.assert_close(over_top(STUDENT, TEACHER), few)
    torch.testing.assert_close(kl(STUDENT, TEACHER, top=8), kl(STUDENT, TEACHER))


def test_equal_logits_are_ranked_by_the_lower_class():
    teacher = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    found = torch.func.grad(lambda x: kl(x, teacher, top=2))(torch.arange(4.0)[None])
    assert (found != 0).tolist() == [[False, True, True, False]]


def test_classes_that_the_teacher_rules_out_add_nothing():
    teacher = torch.tensor([[0.0, 1.0, -torch.inf]])
    student = torch.tensor([[2.0, 0.0, 1.0]])
    p, q = teacher.softmax(-1), student.softmax(-1)
    expected = (p * (p / q).log())[0, :2].sum()
    torch.testing.assert_close(kl(student, teacher), expected)
    found = gradient(kl, student, teacher)
    torch.testing.assert_close(found, q - p)
    both = gradient(kl, torch.tensor([[2.0, 0.0, -torch.inf]]), teacher)
    assert both.isfinite().all() and both[0, 2] == 0.0


def test_mean_square_is_torchs():
    theirs = functional.mse_loss(STUDENT, TEACHER)
    torch.testing.assert_close(mean_square(STUDENT, TEACHER), theirs)


def test_cosine_is_torchs():
    theirs = functional.cosine_embedding_loss(
        STUDENT.flatten(0, 1), TEACHER.flatten(0, 1), torch.ones(15)
    )
    torch.testing.assert_close(cosine_distance(STUDENT, TEACHER), theirs)


def test_relations_are_the_papers():
    # eq. 5 to 8, one example and one head at a time
    total = 0.0
    for student, teacher in zip(STUDENT, TEACHER, strict=True):
        for head in range(2):
            own, other = student.chunk(2, -1)[head], teacher.chunk(2, -1)[head]
            r_s = (own @ own.T / 4**0.5).softmax(-1)
            r_t = (other @ other.T / 4**0.5).softmax(-1)
            for t in range(5):
                total += float((r_t[t] * (r_t[t] / r_s[t]).log()).sum())
    expected = torch.tensor(total / (3 * 2 * 5), dtype=torch.float64)
    torch.testing.assert_close(in_heads(STUDENT, TEACHER), expected)


def test_relations_with_a_number_of_heads_are_a_loss_of_layers():
    loss = functools.partial(relations, heads=2)
    found = sf.recovery.over_layers(
        loss, {"0": STUDENT}, {"1": TEACHER}, {"0": "1"}, TOKENS
    )
    assert torch.equal(found, in_heads(STUDENT, TEACHER, TOKENS))
    sf.recovery.blockwise(sf.optimizers.sgd(0.1), loss=loss)


def test_relations_compare_models_of_other_widths():
    assert relations(STUDENT, normal(3, 5, 12, seed=4), heads=4) > 0
    rotated = TEACHER @ torch.linalg.qr(normal(8, 8, seed=5)).Q
    torch.testing.assert_close(
        relations(rotated, TEACHER, heads=1), torch.zeros((), dtype=torch.float64)
    )


# ---- zero where the student is the teacher, and only there ---------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_zero_and_without_gradient_at_the_teacher(loss):
    assert abs(loss(TEACHER, TEACHER)) < 1e-14
    assert gradient(loss, TEACHER, TEACHER).abs().max() < 1e-14


@pytest.mark.parametrize("loss", LOSSES)
@given(seed=st.integers(0, 99), place=st.integers(0, 14))
def test_positive_elsewhere(loss, seed, place):
    student = TEACHER.clone().flatten(0, 1)
    at = TEACHER.flatten(0, 1)[place].argmax() if loss is over_top else seed % 8
    student[place, at] += 0.5
    student = student.view_as(TEACHER)
    assert loss(student, TEACHER) > 1e-6
    assert gradient(loss, student, TEACHER).abs().max() > 1e-6


def test_a_constant_in_the_logits_and_a_factor_of_states_change_nothing():
    torch.testing.assert_close(
        kl(STUDENT + normal(3, 5, 1), TEACHER), kl(STUDENT, TEACHER)
    )
    torch.testing.assert_close(
        cosine_distance(STUDENT * normal(3, 5, 1).exp(), TEACHER),
        cosine_distance(STUDENT, TEACHER),
    )


# ---- tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [kl, softened, over_top, mean_square, cosine_distance])
def test_tokens_that_do_not_count_might_as_well_not_be_there(loss):
    without = loss(STUDENT[TOKENS], TEACHER[TOKENS])
    torch.testing.assert_close(loss(STUDENT, TEACHER, TOKENS), without)


def test_relations_among_tokens_that_count_are_all():
    alone = [
        (int(n), in_heads(STUDENT[i : i + 1, :n], TEACHER[i : i + 1, :n]))
        for i, n in enumerate(TOKENS.sum(-1))
        if n
    ]
    expected = sum(n * loss for n, loss in alone) / sum(n for n, _ in alone)
    torch.testing.assert_close(in_heads(STUDENT, TEACHER, TOKENS), expected)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("filled", [torch.nan, torch.inf, -1e30, 7.0])
def test_what_is_in_tokens_that_do_not_count_changes_no_bit(loss, filled):
    absent = ~TOKENS[..., None]
    student = STUDENT.masked_fill(absent, filled)
    teacher = TEACHER.masked_fill(absent, -filled)
    expected = loss(STUDENT, TEACHER, TOKENS)
    assert torch.equal(loss(student, teacher, TOKENS), expected)
    found = gradient(loss, student, teacher, TOKENS)
    assert torch.equal(found, gradient(loss, STUDENT, TEACHER, TOKENS))
    assert not found[~TOKENS].any() and found[TOKENS].any()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tokens", [None, TOKENS])
@given(place=st.integers(0, 119))
def test_nan_in_a_token_that_counts_is_nan(loss, tokens, place):
    here = (torch.arange(120) == place).view_as(TEACHER)
    broken = TEACHER.masked_fill(here, torch.nan)
    counts = tokens is None or bool(here[tokens].any())
    assert bool(loss(STUDENT, broken, tokens).isnan()) == counts
    assert bool(gradient(loss, STUDENT, broken, tokens).isnan().any()) == counts
    if loss is not over_top:  # which leaves out classes of the student
        assert bool(loss(broken, TEACHER, tokens).isnan()) == counts


def test_a_teacher_that_overflows_is_nan():
    teacher = (TEACHER * 1e6).half()
    assert teacher.isinf().any()
    for loss in (kl, softened, over_top, in_heads):
        assert loss(STUDENT, teacher).isnan()
        assert gradient(loss, STUDENT, teacher).isnan().any()


@pytest.mark.parametrize("loss", LOSSES)
def test_one_token_counts(loss):
    one = torch.zeros_like(TOKENS)
    one[1, 2] = True
    alone = loss(STUDENT[1:2, 2:3], TEACHER[1:2, 2:3])
    torch.testing.assert_close(loss(STUDENT, TEACHER, one), alone)


@pytest.mark.parametrize("loss", LOSSES)
def test_any_axes_before_the_tokens(loss):
    alone = loss(STUDENT[0], TEACHER[0], TOKENS[0])
    torch.testing.assert_close(loss(STUDENT[:1], TEACHER[:1], TOKENS[:1]), alone)
    outer = loss(STUDENT[None], TEACHER[None], TOKENS[None])
    torch.testing.assert_close(outer, loss(STUDENT, TEACHER, TOKENS))


@pytest.mark.parametrize("loss", LOSSES)
def test_no_token_counts(loss):
    none = torch.zeros_like(TOKENS)
    assert loss(STUDENT, TEACHER, none) == 0.0
    assert not gradient(loss, STUDENT, TEACHER, none).any()


# ---- transforms, dtypes --------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_derivatives(loss):
    student, teacher = STUDENT.clone(), TEACHER.clone()
    both = (student.requires_grad_(), teacher.requires_grad_())
    if loss is over_top:  # which classes are compared is no smooth function
        both = (student, teacher.detach())
    assert torch.autograd.gradcheck(lambda *x: loss(*x, TOKENS), both)
    assert torch.autograd.gradgradcheck(lambda *x: loss(*x, TOKENS), both)


@pytest.mark.parametrize("loss", LOSSES)
def test_under_vmap(loss):
    students = torch.stack([STUDENT, TEACHER, STUDENT + 1.5 * TEACHER])
    found = torch.vmap(loss, (0, None, None))(students, TEACHER, TOKENS)
    alone = [loss(student, TEACHER, TOKENS) for student in students]
    torch.testing.assert_close(found, torch.stack(alone))
    found = torch.vmap(torch.func.grad(loss), (0, None, None))(
        students, TEACHER, TOKENS
    )
    alone = [gradient(loss, student, TEACHER, TOKENS) for student in students]
    torch.testing.assert_close(found, torch.stack(alone))


@pytest.mark.deep
@pytest.mark.parametrize("loss", LOSSES)
def test_compiled(loss):
    compiled = torch.compile(torch.func.grad_and_value(loss), fullgraph=True)
    grads, value = compiled(STUDENT, TEACHER, TOKENS)
    torch.testing.assert_close(value, loss(STUDENT, TEACHER, TOKENS))
    torch.testing.assert_close(grads, gradient(loss, STUDENT, TEACHER, TOKENS))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_dtypes_are_computed_in_float32(loss, dtype):
    student, teacher = STUDENT.to(dtype), TEACHER.to(dtype)
    found = loss(student, teacher)
    assert found.dtype == torch.float32 and found.ndim == 0
    assert torch.equal(found, loss(student.float(), teacher.float()))
    assert gradient(loss, student, teacher).dtype == dtype
    assert loss(STUDENT, TEACHER).dtype == torch.float64


@pytest.mark.parametrize("loss", LOSSES)
def test_arguments_stay_as_they_are(loss):
    student, teacher, tokens = STUDENT.clone(), TEACHER.clone(), TOKENS.clone()
    loss(student, teacher, tokens)
    assert torch.equal(student, STUDENT) and torch.equal(teacher, TEACHER)
    assert torch.equal(tokens, TOKENS)


def test_a_temperature_may_be_a_tensor():
    found = kl(STUDENT.float(), TEACHER.float(), temperature=torch.tensor(2.0))
    torch.testing.assert_close(
        found, kl(STUDENT.float(), TEACHER.float(), temperature=2.0)
    )


def test_losses_are_added_and_weighted():
    total = kl(STUDENT, TEACHER) + 0.5 * mean_square(STUDENT, TEACHER)
    assert total.ndim == 0 and total > kl(STUDENT, TEACHER)


# ---- bad input -----------------------------------------------------------------------


def refused(kind, text, call, *args, **kwargs):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call(*args, **kwargs)


def test_a_teacher_of_another_vocabulary():
    text = (
        "kl: expected tensors of one shape, got (3, 5, 8) of the student and "
        "(3, 5, 6) of the teacher; give the student the teacher's tokenizer, or "
        "compare hidden states"
    )
    refused(ValueError, text, kl, STUDENT, TEACHER[..., :6])


def test_a_teacher_of_another_width():
    for loss in (mean_square, cosine_distance):
        name = loss.__name__
        text = (
            f"{name}: expected tensors of one shape, got (3, 5, 8) of the student and "
            f"(3, 5, 6) of the teacher; map the student's features: {name}(student @ "
            "weight, teacher), with a weight that is trained"
        )
        refused(ValueError, text, loss, STUDENT, TEACHER[..., :6])


@pytest.mark.parametrize("loss", [kl, mean_square, cosine_distance])
def test_a_teacher_of_other_tokens(loss):
    text = (
        f"{loss.__name__}: expected tensors of one shape, got (3, 5, 8) of the student "
        "and (2, 5, 8) of the teacher"
    )
    refused(ValueError, text, loss, STUDENT, TEACHER[:2])


def test_relations_of_other_tokens():
    text = (
        "relations: expected vectors of the same tokens, (..., tokens, width), got "
        "(3, 5, 8) of the student and (3, 4, 8) of the teacher"
    )
    refused(ValueError, text, relations, STUDENT, TEACHER[:, :4], heads=2)
    with pytest.raises(ValueError, match="of the same tokens"):
        relations(STUDENT[0, 0], TEACHER[0, 0], heads=2)


def test_a_temperature_that_is_none():
    for value in (0.0, -1.0):
        text = f"expected kl: temperature > 0, got {value}"
        refused(ValueError, text, kl, STUDENT, TEACHER, temperature=value)
    text = "expected temperature to be finite, got nan"
    refused(ValueError, text, kl, STUDENT, TEACHER, temperature=torch.nan)
    text = "expected temperature to be a number or a 0-d float tensor, got str"
    refused(TypeError, text, kl, STUDENT, TEACHER, temperature="2")


def test_a_number_of_classes_that_is_none():
    text = "kl: expected top >= 2, got 1"
    refused(ValueError, text, kl, STUDENT, TEACHER, top=1)
    text = "kl: expected top <= 8, the classes, got 9"
    refused(ValueError, text, kl, STUDENT, TEACHER, top=9)
    text = "kl: expected top to be an int, got float"
    refused(TypeError, text, kl, STUDENT, TEACHER, top=2.0)


def test_a_number_of_heads_that_does_not_fit():
    text = "relations: expected heads to divide the width of the student, 8, got 3"
    refused(ValueError, text, relations, STUDENT, TEACHER, heads=3)
    text = "relations: expected heads to divide the width of the teacher, 6, got 4"
    refused(ValueError, text, relations, STUDENT, TEACHER[..., :6], heads=4)
    text = "relations: expected heads >= 1, got 0"
    refused(ValueError, text, relations, STUDENT, TEACHER, heads=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_that_do_not_fit(loss):
    name = {softened: "kl", over_top: "kl", in_heads: "relations"}.get(
        loss, loss.__name__
    )
    text = (
        f"{name}: expected tokens of shape (3, 5), the student's without its last "
        "dimension, got (5, 3)"
    )
    refused(ValueError, text, loss, STUDENT, TEACHER, TOKENS.T)
    text = (
        f"{name}: expected tokens to be a bool tensor, True for each token that "
        "counts, got a tensor of torch.int64; write attention_mask.bool(), or labels "
        "!= -100"
    )
    refused(TypeError, text, loss, STUDENT, TEACHER, TOKENS.long())
    with pytest.raises(TypeError, match=f"^{name}: .*, got list; write"):
        loss(STUDENT, TEACHER, TOKENS.tolist())


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_no_tensor_of_floats(loss):
    with pytest.raises(TypeError, match="student .*, got a tensor of torch.int64$"):
        loss(STUDENT.long(), TEACHER)

    class Output:
        logits = TEACHER

    with pytest.raises(TypeError, match="teacher .*, got Output; give its logits: out"):
        loss(STUDENT, Output())
