"""Pruning of trained networks by calibration data or gradients, without training."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sparsefn._engine.numbers import Real
from sparsefn.algorithms.prune import one_shot
from sparsefn.algorithms.rewrite import rewrite
from sparsefn.core.checks import check_sparsity, described
from sparsefn.core.state import Algorithm, Level, Step, Trigger, Where
from sparsefn.core.tree import Tree, check_tree, flatten
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import at
from sparsefn.masks import scores
from sparsefn.masks.budgets.distributions import Distribution, global_, n_kept
from sparsefn.masks.patterns.kinds import Pattern, row_balanced, unstructured
from sparsefn.masks.patterns.units import units_of
from sparsefn.masks.scores.data import Stats
from sparsefn.posttraining import curvature, solve
from sparsefn.posttraining.curvature.derivatives import Batch, Loss


@described
def wanda(
    sparsity: Level | None,
    stats: Stats,
    *,
    pattern: Pattern = row_balanced(),
    when: Trigger = at([0]),
    where: Where = default_where,
) -> Algorithm:
    """Wanda: prunes each output's weights of least |weight| * norm of the input.

    >>> model, x = (
    ...     torch.nn.Linear(3, 2, bias=False),
    ...     torch.tensor([[1.0, 3.0, 0.0], [2.0, 4.0, 1.0]]),
    ... )
    >>> stats = sf.calibration.inputs(model, None, x, of="square")
    >>> algorithm = sf.methods.wanda(1 / 3, stats)
    >>> state = algorithm.init(
    ...     {"weight": torch.tensor([[4.0, 1.0, 3.0], [1.0, 5.0, 2.0]])}
    ... )
    >>> algorithm.update(state, state.params, 0).params
    {'weight': tensor([[4., 1., 0.],
            [1., 5., 0.]])}

    Args:
        sparsity: The sparsity of each output, a float, a 0-d tensor or a Schedule. None
            where the pattern fixes it: `wanda(None, stats, pattern=sf.patterns.nm(2,
            4))`.
        stats: Statistics by path, from `sf.calibration.inputs`, with "square".
        pattern: Which weights compete. Default: the weights of an output. In the Conv1D
            of transformers outputs lie along axis 1, `row_balanced(axis=1)`; in experts
            of one leaf along two, `row_balanced(axis=(0, 1))`.
        when: The trigger that prunes.
        where: Which leaves are sparsified.

    Returns:
        An algorithm that starts dense. The weights that are kept stay as they are.

    Raises:
        TypeError: `stats` are not by path, or `sparsity` is neither a float nor a
            schedule.
        ValueError: `sparsity` is outside [0, 1], a leaf has no statistics or bad ones,
            or outputs lie along other axes, as for `sf.scores.wanda`.

    The norm is over the calibration tokens (eq. 1). In the paper the blocks of a model
    are pruned in turn, each with inputs from the pruned blocks before it:
    `sf.calibration.in_order(model, None, blocks, lambda stats: wanda(0.5, stats), x)`.

    Differs from the authors' code: exactly as many weights of an output are kept as the
    sparsity says, where their code truncates the number of pruned weights.

    Verified by recordings of the authors' masks of a model of blocks (4 cases, counts
    given), a worked example, the invariances of the score, and the laws.

    Sun, Liu, Bair and Kolter 2023, arXiv 2306.11695.
    """
    return one_shot(
        sparsity, scores.wanda(stats), pattern=pattern, when=when, where=where
    )


@described
def ria(
    sparsity: Level | None,
    stats: Stats,
    *,
    power: Real = 0.5,
    pattern: Pattern = unstructured(),
    when: Trigger = at([0]),
    where: Where = default_where,
) -> Algorithm:
    """RIA: prunes by a weight's shares in its row and column, and its input's norm.

    >>> stats = {
    ...     "w": {"count": torch.tensor(2), "square": torch.tensor([10.0, 50.0, 2.0])}
    ... }
    >>> algorithm = sf.methods.ria(0.5, stats)
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 1.0, 3.0], [1.0, 5.0, 2.0]])})
    >>> algorithm.update(state, state.params, 0).params
    {'w': tensor([[4., 0., 3.],
            [0., 5., 0.]])}

    Args:
        sparsity: The sparsity of each leaf, a float, a 0-d tensor or a Schedule. None
            for `pattern=sf.patterns.nm(2, 4)`, which fixes it.
        stats: Statistics by path, from `sf.calibration.inputs`, with "square".
        power: The exponent of the norm. With 0 the data does not matter, with 1 it
            counts as in Wanda.
        pattern: Which weights compete. Default: all weights of a leaf, as shares are
            comparable in a whole leaf, Wanda's scores only inside of an output.
        when: The trigger that prunes.
        where: Which leaves are sparsified.

    Returns:
        An algorithm that starts dense. The weights that are kept stay as they are.

    Raises:
        TypeError: `stats` are not by path, or `sparsity` is neither a float nor a
            schedule.
        ValueError: `sparsity` is outside [0, 1], `power` is not finite, or a leaf has
            no statistics or bad ones, as for `sf.scores.ria`.

    The sum of the shares is multiplied by a power of the norm. Use it block after block
    as `wanda`, for 2:4 perhaps after `sf.permutation.channels` has put the inputs into
    another order.

    Differs from the authors' code: exactly as many weights are kept as the sparsity
    says, while their code truncates the number of pruned weights and prunes the weight
    at the threshold, too; its reallocation of channels is not a part of this.

    Verified by recordings of the authors' masks of a model of blocks (3 cases, counts
    given), a worked example, power 0 ignoring the data, and the laws.

    Zhang et al. 2024, "Plug-and-Play: An Efficient Post-training Pruning Method for
    Large Language Models", ICLR.
    """
    return one_shot(
        sparsity, scores.ria(stats, power), pattern=pattern, when=when, where=where
    )


@described
def sparsegpt(
    sparsity: float | None,
    stats: Stats,
    *,
    pattern: Pattern | None = None,
    block: int = 128,
    damp: float = 0.01,
    when: Trigger = at([0]),
    where: Where = default_where,
) -> Algorithm:
    """SparseGPT: prunes columns from left to right, and later columns make up for them.

    >>> x = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    >>> stats = sf.calibration.inputs(torch.nn.Linear(2, 1, bias=False), None, x)
    >>> algorithm = sf.methods.sparsegpt(0.5, stats, damp=0.0)
    >>> state = algorithm.init({"weight": torch.tensor([[1.0, 2.0]])})
    >>> algorithm.update(state, state.params, 0).params
    {'weight': tensor([[0.0000, 2.5000]])}

    Args:
        sparsity: The sparsity of each leaf. None for `pattern=sf.patterns.nm(2, 4)`,
            which fixes it.
        stats: Statistics by path, from `sf.calibration.inputs`, with "gram".
        pattern: Which weights compete. None: the weights of a block, over all outputs.
        block: How many columns are a block.
        damp: The damping of the gram, as in `sf.solve.obs`.
        when: The trigger that prunes.
        where: Which leaves are sparsified.

    Returns:
        An algorithm that starts dense.

    Raises:
        TypeError: `stats` are not by path, or `sparsity` is not a float.
        ValueError: `sparsity` is outside [0, 1], a leaf has no statistics, its gram is
            singular at this `damp` or not finite, or groups cross blocks, each with the
            path.

    Scores are w^2 / [H^-1]_jj, where H is the gram of the inputs. `sf.solve.obs` has
    the details, and `docs/solve.md` says what is promised: it may be worse than
    magnitude pruning, and is never better than `sf.solve.refit` on its own mask. Use it
    block after block as `wanda`. A convolution is solved as a matrix of (outputs,
    patches), and so are its groups.

    Differs from the authors' code: the count of the whole leaf is exact, where theirs
    prunes one weight more than the truncated count in each block.

    Verified by recordings of the authors' masks and weights (6 cases, counts given), a
    worked example, and the theorem that no weights on the same mask are better than the
    refitted ones; the laws do not bind it, as they try weights that are not finite.

    Frantar and Alistarh 2023, arXiv 2301.00774.
    """
    counts = _counts(sparsity, pattern)

    def solved(weight: Tensor, gram: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return solve.obs(
            weight,
            gram,
            keep=counts(weight)[0],
            pattern=pattern,
            block=block,
            damp=damp,
        )

    return rewrite(solve.layerwise(stats, solved), when=when, where=where)


def _counts(
    sparsity: float | None, pattern: Pattern | None
) -> Callable[[Tensor], tuple[int, int] | tuple[None, None]]:
    # How many of a matrix, or of each group of a pattern, are kept and pruned; None
    # where the pattern says it.
    if sparsity is not None:
        check_sparsity(sparsity)

    def counts(weight: Tensor) -> tuple[int, int] | tuple[None, None]:
        if sparsity is None:
            return None, None
        if pattern is None:
            size = weight.numel()
        else:
            size = units_of(pattern, tuple(weight.shape)).rows[1]
        kept = int(n_kept(size, sparsity))
        return kept, size - kept

    return counts


@described
def obs(
    sparsity: float | None,
    stats: Stats,
    *,
    pattern: Pattern | None = None,
    damp: float = 0.01,
    when: Trigger = at([0]),
    where: Where = default_where,
) -> Algorithm:
    """OBC: optimal brain surgeon for each layer, exactly, one weight after the other.

    >>> x = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    >>> stats = sf.calibration.inputs(torch.nn.Linear(2, 2, bias=False), None, x)
    >>> algorithm = sf.methods.obs(
    ...     0.5, stats, damp=0.0, pattern=sf.patterns.row_balanced()
    ... )
    >>> state = algorithm.init({"weight": torch.tensor([[1.0, 2.0], [0.5, 0.1]])})
    >>> algorithm.update(state, state.params, 0).params
    {'weight': tensor([[0.0000, 2.5000],
            [0.5500, 0.0000]])}

    Args:
        sparsity: The sparsity of each leaf. None where the pattern fixes it.
        stats: Statistics by path, from `sf.calibration.inputs`, with "gram".
        pattern: Which weights compete. None: all rows of a leaf, by what their next
            weight costs. With `row_balanced()` or `nm(n, m)` each group loses as many.
        damp: The damping of the gram, as in `sf.solve.obs_exact`.
        when: The trigger that prunes.
        where: Which leaves are sparsified.

    Returns:
        An algorithm that starts dense. The weights are what `sf.solve.refit` gives for
        the mask.

    Raises:
        TypeError: `stats` are not by path, or `sparsity` is not a float.
        ValueError: `sparsity` is outside [0, 1], a leaf has no statistics, its gram is
            singular at this `damp` or not finite, or the pattern is another, each with
            the path.

    Each row loses the weight of least w_q^2 / [H^-1]_qq over the columns that it has
    left, where H is the gram of the inputs, and its other weights change to make up for
    it. A row takes time of inputs^2 for each weight that it loses: this is for small
    layers, and `sparsegpt` for large ones. Blocks and convolutions are as in
    `sparsegpt`.

    Differs from the authors' code: the count of the whole leaf is exact, and a row is
    pruned in the order of its steps, where theirs counts how many of its losses are
    among the least.

    Verified by recordings of the authors' weights (3 cases, counts given), a worked
    example, the cost of one weight against brute force, and being the refit of its
    mask; the laws do not bind it, as they try weights that are not finite.

    Frantar, Singh and Alistarh 2022, arXiv 2208.11580.
    """
    counts = _counts(sparsity, pattern)

    def solved(weight: Tensor, gram: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return solve.obs_exact(weight, gram, counts(weight)[1], pattern, damp=damp)

    return rewrite(solve.layerwise(stats, solved), when=when, where=where)


@described
def woodfisher(
    sparsity: float,
    gradients: Tree,
    *,
    damp: float = 1e-5,
    block: int = 2000,
    when: Trigger = at([0]),
    where: Where = default_where,
) -> Algorithm:
    """WoodFisher: optimal brain surgeon with the empirical Fisher matrix of the loss.

    >>> gradients = {"w": torch.tensor([[[1.0, 2.0]], [[3.0, 1.0]]])}
    >>> algorithm = sf.methods.woodfisher(0.5, gradients, damp=0.5)
    >>> state = algorithm.init({"w": torch.tensor([[1.0, -1.0]])})
    >>> algorithm.update(state, state.params, 0).params
    {'w': tensor([[0.5455, 0.0000]])}

    Args:
        sparsity: The sparsity of each leaf.
        gradients: Gradients of single examples, a tree like params with one more axis
            in front: `sf.curvature.example_gradients(loss, params, batch)`. To prune in
            stages, take new gradients for each stage: gradients of pruned weights do
            not count.
        damp: The number on the diagonal of F, above 0. The default is the damping of
            the authors' runs of ResNet-50.
        block: How many consecutive weights are a block, outside of which F is taken to
            be 0; 2000 in the same runs. Memory is so many times the size of the largest
            leaf.
        when: The trigger that prunes.
        where: Which leaves are sparsified.

    Returns:
        An algorithm that starts dense.

    Raises:
        TypeError: `sparsity` is not a float, or `gradients` are no tree.
        ValueError: `sparsity` is outside [0, 1], gradients lack a leaf, are of other
            shapes or not finite, `damp` is not above 0, or `block` is below 1.

    F = damp * I + the mean over examples of g g'. Each leaf loses the weights of least
    w_q^2 / (2 [F^-1]_qq), and its other weights change by -w_q [F^-1]_q / [F^-1]_qq for
    each lost weight (section 4).

    Differs from the authors' code: each leaf has its own count (their "independent"
    pruning), and the score has the factor 1/2 of the paper, which changes no mask of a
    leaf.

    Verified by brute force with the inverse of the matrix, a worked example, OBD at a
    diagonal Fisher matrix, and the laws.

    Singh and Alistarh 2020, arXiv 2004.14340.
    """
    check_sparsity(sparsity)
    check_tree("gradients", gradients)
    found = flatten(gradients)[0]

    def pruned(
        path: str, weight: Tensor, mask: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        if path not in found:
            raise ValueError(
                f"woodfisher: no gradients for the leaf {path!r}, but for "
                f"{len(found)} others"
            )
        kept = int(n_kept(weight.numel(), sparsity))
        try:
            return solve.obs_fisher(
                weight, found[path], kept, mask=mask, damp=damp, block=block
            )
        except ValueError as error:
            raise ValueError(f"at {path!r}, {error}") from None

    return rewrite(pruned, when=when, where=where)


@described
def obd(
    sparsity: Level,
    loss: Loss,
    batch: Batch,
    *,
    chunk_size: int | None = None,
    distribution: Distribution = global_(),
    when: Trigger = at([0]),
    where: Where = default_where,
) -> Algorithm:
    """OBD: prunes the weights without which the loss rises least, by the Fisher matrix.

    >>> def loss(params, g):
    ...     return (g @ params["w"]).mean()
    >>> algorithm = sf.methods.obd(
    ...     0.5, loss, (torch.tensor([[1.0, 2.0], [3.0, 1.0]]),), where="w"
    ... )
    >>> state = algorithm.init({"w": torch.tensor([1.0, -1.0])})
    >>> algorithm.update(state, state.params, 0).params
    {'w': tensor([1., 0.])}

    Args:
        sparsity: The sparsity over all leaves, a float, a 0-d tensor or a Schedule.
        loss: `loss(params, *batch)`, 0-d.
        batch: The other arguments of `loss`, as for `sf.curvature.fisher`.
        chunk_size: How many examples are taken at a time. None: all.
        distribution: How many weights each leaf keeps. Default: all leaves compete.
        when: The trigger that prunes.
        where: Which leaves are sparsified.

    Returns:
        An algorithm that starts dense. The kept weights stay as they are.

    Raises:
        TypeError: `loss` or `batch` is of another kind, or `sparsity` is neither a
            float nor a schedule.
        ValueError: `sparsity` is outside [0, 1], `chunk_size` is below 1, the batch has
            no example, or the loss is not 0-d.

    Scores are weight^2 * h / 2, where h is the mean of the squared gradients of single
    examples (the empirical Fisher matrix stands for the Hessian of a trained network).
    With the exact diagonal of the Hessian, for small networks, this is
    `sf.one_shot(sparsity, sf.curvature.obd(sf.curvature.hessian_diagonal(loss, batch)),
    distribution=distribution)`.

    The paper published no code; its diagonal is the Hessian's, without second
    derivatives of the activations.

    Verified by a worked example, the rise of a loss at its minimum, WoodFisher at a
    diagonal Fisher matrix, and the laws.

    LeCun, Denker and Solla 1989, "Optimal Brain Damage", NeurIPS.
    """
    score = curvature.obd(curvature.fisher(loss, batch, chunk_size))
    return one_shot(sparsity, score, distribution=distribution, when=when, where=where)
