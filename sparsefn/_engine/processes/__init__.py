"""Parts of tensors on several processes, and what the processes say to each other."""

from sparsefn._engine.processes import collectives
from sparsefn._engine.processes.agreements import agree, agreement, is_open, scope, tell
from sparsefn._engine.processes.alignment import (
    Alignment,
    alignment_of,
    check_grid,
    realigned,
)
from sparsefn._engine.processes.collectives import Exchange, Gather, Sum, alone, in_step
from sparsefn._engine.processes.extent import Extent
from sparsefn._engine.processes.lines import Groups, is_first
from sparsefn._engine.processes.shards import (
    agreed,
    any_sharded,
    check_bare,
    check_local_size,
    check_plain,
    check_shards,
    extent_of,
    full_tensors,
    groups_of,
    is_sharded,
    is_spread,
    laid_like,
    local_tensor,
    localized,
    outside_vjp,
    redistributed,
    sharded_like,
    words_of,
)
from sparsefn._engine.processes.work_split import (
    check_alike,
    dealing,
    dealt,
    gathered,
    own,
)
