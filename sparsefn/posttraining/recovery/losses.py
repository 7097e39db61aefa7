"""How far a student's logits, hidden states and attention are from its teacher's."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from sparsefn._engine.numbers import Real
from sparsefn.core.checks import check_int, check_positive, number
from sparsefn.masks.patterns.kinds import row_balanced
from sparsefn.masks.select import topk_mask


def kl(
    student: Tensor,
    teacher: Tensor,
    tokens: Tensor | None = None,
    *,
    temperature: Real = 1.0,
    top: int | None = None,
) -> Tensor:
    """Kullback-Leibler divergence of the student's distribution from the teacher's.

    >>> teacher = torch.tensor([[0.0, 0.0]])
    >>> student = torch.tensor([[0.0, 1.0]]).requires_grad_()
    >>> sf.recovery.kl(student, teacher)
    tensor(0.1201, grad_fn=<MulBackward0>)

    Args:
        student: Logits, (..., classes). Any floating-point dtype.
        teacher: Logits of the same shape.
        tokens: Bool tensor of shape (...), False where a token is padding or is not to
            be learned and does not count. None: all count.
        temperature: What logits are divided by. It is above 0.
        top: How many classes of each token are compared, the teacher's likeliest; both
            distributions are over these alone. Ties go to the lowest class. None: all.

    Returns:
        0-d tensor, T^2 times the mean over counted tokens of sum(p * log(p / q)), in
        nats, with p = softmax(teacher / T) and q = softmax(student / T). It is float32,
        or float64 for float64 logits, and 0 where no token counts.

    Raises:
        TypeError: Logits are not floating-point, `tokens` is not bool, `temperature` is
            no number or `top` no int.
        ValueError: Shapes differ, `temperature` is not above 0, or `top` is outside [2,
            classes]: the KL of a single class is 0.

    It is 0, and so is its gradient, exactly where the logits of each counted token
    differ by a constant. T^2 keeps the size of gradients while T changes. A token that
    does not count has a gradient of 0, whatever its logits are. NaN in a counted
    token's logits is NaN in the loss, and so is a teacher's infinite logit; -inf is a
    class of probability 0.

    Hinton, Vinyals & Dean 2015, arXiv 1503.02531, sec. 2; for pruned models
    Muralidharan et al. 2024, arXiv 2407.14679, sec. 3.
    """
    _check_same_shape("kl", student, teacher)
    _check_tokens("kl", tokens, student)
    t = number("temperature", temperature)
    check_positive("kl: temperature", t)
    compared = None if top is None else _likeliest(teacher, top)
    student, teacher = _counted(student, teacher, tokens)
    each = _divergence(student / t, teacher / t, compared)
    return (t * t * _mean(each, tokens)).to(student.dtype)


def mean_square(
    student: Tensor, teacher: Tensor, tokens: Tensor | None = None
) -> Tensor:
    """Mean squared difference of hidden states.

    >>> sf.recovery.mean_square(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0]]))
    tensor(2.)

    Args:
        student: Hidden states, (..., features). Any floating-point dtype.
        teacher: Hidden states of the same shape.
        tokens: Bool tensor of shape (...), False where a token does not count. None:
            all count.

    Returns:
        0-d tensor, the mean over the features of counted tokens. It is float32, or
        float64 for float64 states, and 0 where no token counts.

    Raises:
        TypeError: States are not floating-point, or `tokens` is not bool.
        ValueError: Shapes differ.

    It is 0, and so is its gradient, exactly where the states of counted tokens are
    equal. A student with fewer features needs a linear map to the teacher's, which is
    trained with it: `mean_square(states @ weight, teacher)`.

    Romero et al. 2014, arXiv 1412.6550, eq. 3.
    """
    student, teacher = _states("mean_square", student, teacher, tokens)
    return _mean((student - teacher).square().mean(-1), tokens)


def cosine_distance(
    student: Tensor, teacher: Tensor, tokens: Tensor | None = None
) -> Tensor:
    """Mean of 1 - cosine of the angle between hidden states.

    >>> student, teacher = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    >>> sf.recovery.cosine_distance(student, teacher)
    tensor(1.)

    Args:
        student: Hidden states, (..., features). Any floating-point dtype.
        teacher: Hidden states of the same shape.
        tokens: Bool tensor of shape (...), False where a token does not count. None:
            all count.

    Returns:
        0-d tensor from 0 to 2, the mean over counted tokens. It is float32, or float64
        for float64 states, and 0 where no token counts.

    Raises:
        TypeError: States are not floating-point, or `tokens` is not bool.
        ValueError: Shapes differ.

    Up to rounding it is 0, and so is its gradient, exactly where the student's state of
    each counted token is the teacher's times a positive number. A state of zeros has a
    loss of 1.

    Sanh et al. 2019, arXiv 1910.01108, sec. 3; Muralidharan et al. 2024,
    arXiv 2407.14679, sec. 3.
    """
    student, teacher = _states("cosine_distance", student, teacher, tokens)
    return _mean(1.0 - functional.cosine_similarity(student, teacher, dim=-1), tokens)


def relations(
    student: Tensor,
    teacher: Tensor,
    tokens: Tensor | None = None,
    *,
    heads: int,
) -> Tensor:
    """MiniLM v2: how each token relates to the others, compared between two models.

    >>> teacher = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> sf.recovery.relations(2 * teacher, teacher, heads=1)
    tensor(0.3571)

    Args:
        student: Queries, keys or values of all heads side by side, as a layer's
            projection returns them: (..., tokens, width). Any floating-point dtype.
        teacher: The same vectors of the teacher. Their width may be another one.
        tokens: Bool tensor of shape (..., tokens), False where a token is padding: it
            has no relation to others, and others have none to it. None: all count.
        heads: Number of relation heads, into which both widths are split. It need not
            be the number of attention heads.

    Returns:
        0-d tensor, the mean over heads and counted tokens of the divergence KL(R_T ||
        R_S), in nats, where R = softmax(A A' / sqrt(width / heads)) for the vectors A
        of a head. It is float32, or float64 for float64 vectors, and 0 where no token
        counts.

    Raises:
        TypeError: Vectors are not floating-point, `heads` is no int, or `tokens` is not
            bool.
        ValueError: Shapes differ in front of the width, or `heads` does not divide a
            width.

    The loss of the paper is the sum over queries, keys and values of one layer:
    `sum(relations(s, t, heads=16) for s, t in zip(student, teacher))`. As a loss for
    `over_layers` or `blockwise` it is `functools.partial(sf.recovery.relations,
    heads=16)`. It is 0, and so is its
    gradient, where the vectors are equal.

    Wang et al. 2020, arXiv 2012.15828, eq. 5 to 8.
    """
    _check_float("relations", student=student, teacher=teacher)
    if student.ndim < 2 or student.shape[:-1] != teacher.shape[:-1]:
        raise ValueError(
            "relations: expected vectors of the same tokens, (..., tokens, width), got "
            f"{tuple(student.shape)} of the student and {tuple(teacher.shape)} of the "
            "teacher"
        )
    _check_tokens("relations", tokens, student)
    check_int("relations", "heads", heads, 1)
    for name, x in (("student", student), ("teacher", teacher)):
        if x.shape[-1] % heads:
            raise ValueError(
                f"relations: expected heads to divide the width of the {name}, "
                f"{x.shape[-1]}, got {heads}"
            )
    student, teacher = _counted(student, teacher, tokens)
    keys = None if tokens is None else tokens[..., None, None, :]
    each = _divergence(
        _similarities(student, heads), _similarities(teacher, heads), keys
    )
    return _mean(each.mean(-2), tokens)


def _similarities(vectors: Tensor, heads: int) -> Tensor:
    # Scaled products of all pairs of tokens: (..., heads, tokens, tokens).
    size = vectors.shape[-1] // heads
    of_head = vectors.reshape(*vectors.shape[:-1], heads, size).transpose(-2, -3)
    return of_head @ of_head.mT / math.sqrt(size)


def _divergence(student: Tensor, teacher: Tensor, allowed: Tensor | None) -> Tensor:
    # KL(softmax(teacher) || softmax(student)) of each row, over its allowed entries.
    if allowed is not None:
        student = student.masked_fill(~allowed, -torch.inf)
        teacher = teacher.masked_fill(~allowed, -torch.inf)
    log_q = student.log_softmax(-1)
    log_p = teacher.log_softmax(-1)
    p = log_p.exp()
    # 0 * log 0 is 0, and so are its gradients; NaN is not absent
    absent = p == 0
    if allowed is not None:
        absent = absent | ~allowed
    log_ratio = log_p.masked_fill(absent, 0.0) - log_q.masked_fill(absent, 0.0)
    return (p.masked_fill(absent, 0.0) * log_ratio).sum(-1)


def _likeliest(teacher: Tensor, top: int) -> Tensor:
    check_int("kl", "top", top, 2)  # one class alone has probability 1
    classes = teacher.shape[-1]
    if top > classes:
        raise ValueError(f"kl: expected top <= {classes}, the classes, got {top}")
    rows = teacher.detach().reshape(-1, classes)
    rows = rows.masked_fill(rows.isnan(), torch.inf)  # NaN is compared, not hidden
    return topk_mask(rows, top, pattern=row_balanced()).reshape(teacher.shape)


def _states(
    what: str, student: Tensor, teacher: Tensor, tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    # Both sides of a loss of hidden states, checked.
    _check_same_shape(what, student, teacher)
    _check_tokens(what, tokens, student)
    return _counted(student, teacher, tokens)


def _counted(
    student: Tensor, teacher: Tensor, tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    # Both in float32 at least, with zeros in place of tokens that do not count, so that
    # NaN there reaches no gradient.
    wide = torch.promote_types(student.dtype, teacher.dtype)
    wide = torch.promote_types(wide, torch.float32)
    student = student.to(wide)
    teacher = teacher.to(wide)
    if tokens is None:
        return student, teacher
    absent = ~tokens[..., None]
    return student.masked_fill(absent, 0.0), teacher.masked_fill(absent, 0.0)


def _mean(values: Tensor, tokens: Tensor | None) -> Tensor:
    # The mean of one value a token, over the tokens that count.
    if tokens is None:
        return values.sum() / max(values.numel(), 1)
    return values.masked_fill(~tokens, 0.0).sum() / tokens.sum().clamp(min=1)


def _check_float(what: str, **tensors: object) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(
                f"{what}: expected {name} to be a floating-point tensor, got "
                f"{_kind_of(x)}{_mend_of(x)}"
            )


def _kind_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    return type(value).__name__


def _mend_of(value: object) -> str:
    # What to write for the outputs of a model of transformers.
    return "; give its logits: output.logits" if hasattr(value, "logits") else ""


def _check_same_shape(what: str, student: Tensor, teacher: Tensor) -> None:
    _check_float(what, student=student, teacher=teacher)
    if student.shape == teacher.shape and student.ndim:
        return
    shapes = (
        f"{tuple(student.shape)} of the student and {tuple(teacher.shape)} of the "
        "teacher"
    )
    mend = ""
    if student.ndim and student.shape[:-1] == teacher.shape[:-1]:
        mend = (
            "; give the student the teacher's tokenizer, or compare hidden states"
            if what == "kl"
            else f"; map the student's features: {what}(student @ weight, teacher), "
            "with a weight that is trained"
        )
    raise ValueError(f"{what}: expected tensors of one shape, got {shapes}{mend}")


def _check_tokens(what: str, tokens: object, student: Tensor) -> None:
    if tokens is None:
        return
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.bool:
        raise TypeError(
            f"{what}: expected tokens to be a bool tensor, True for each token that "
            f"counts, got {_kind_of(tokens)}; write attention_mask.bool(), or labels "
            "!= -100"
        )
    if tokens.shape != student.shape[:-1]:
        raise ValueError(
            f"{what}: expected tokens of shape {tuple(student.shape[:-1])}, the "
            f"student's without its last dimension, got {tuple(tokens.shape)}"
        )
