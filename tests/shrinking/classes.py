"""Smaller models of the same class, and the masked models whose outputs they have to
give.
"""

import torch

from sparsefn.shrinking.groups import groups
from sparsefn.shrinking.rebuild import same_class
from tests.shrinking.compare import differs
from tests.shrinking.cuts import masked


def same(model, example, counted=False, gone=None, share=0.5):
    """What `same_class` makes without a share of the units of each group, or without
    those that are `gone`.
    """
    model.eval()
    found = groups(model, example, counted=counted)
    if gone is None:
        gone = {
            i: range(int(g.size * share))
            for i, g in enumerate(found)
            if g.preferred and int(g.size * share)
        }
    cut = found.cut(gone)
    whole, runs = masked(model, cut), []

    def works(small, exact):
        runs.append(small)
        return not differs(whole, small, example, exact=exact)

    return same_class(model, cut, works), whole, runs


def small_of(model, example, **options):
    """The smaller model, which has to be there."""
    made, whole, _ = same(model, example, **options)
    assert made.model is not None, made.why
    assert type(made.model) is type(model)
    assert sum(p.numel() for p in made.model.parameters()) < sum(
        p.numel() for p in model.parameters()
    )
    return made.model, whole


def drawn(model):
    """The model with parameters and statistics drawn at random."""
    with torch.no_grad():
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if x.is_floating_point():
                x.copy_(
                    torch.rand(x.shape) + 0.5
                    if "var" in name or x.ndim < 2
                    else torch.randn(x.shape) * 0.4
                )
    return model.eval()
