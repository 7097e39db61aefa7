"""Formulas over the leaves of a tree: in one pass over memory, or in one launch."""

from sparsefn._engine.leaves import leafwise, lists, steps
from sparsefn._engine.leaves.buffers import (
    BLOCK,
    as_tensor_on,
    brought,
    check_device,
    placed,
    run_jobs,
    written,
)
from sparsefn._engine.leaves.donation import (
    Emptied,
    claim,
    donate,
    donating,
    empty,
    saves_memory,
    unshared_memory,
)
from sparsefn._engine.leaves.leafwise import (
    are_zeroed,
    either,
    is_sparse,
    sparse_among,
    zero_,
    zeroed,
)
from sparsefn._engine.leaves.lists import (
    MOST,
    end_to_end,
    foreach_at_once,
    packs,
    pays,
    repeated,
    small_packs,
    split_like,
)
from sparsefn._engine.leaves.matrix_products import (
    member_product,
    plain_product,
    without_autocast,
)
from sparsefn._engine.leaves.member_operators import hidden, one_by_one
