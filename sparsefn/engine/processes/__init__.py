"""Parts of tensors on several processes, and what the processes say to each other."""

from sparsefn.engine.processes import collectives
from sparsefn.engine.processes.agreements import agree, agreement, is_open, scope, tell
from sparsefn.engine.processes.alignment import (
    Alignment,
    alignment_of,
    check_grid,
    realigned,
)
from sparsefn.engine.processes.collectives import Exchange, Gather, Sum, alone, in_step
from sparsefn.engine.processes.extent import Extent
from sparsefn.engine.processes.lines import Groups, is_first
from sparsefn.engine.processes.rows import check_alike, dealing, dealt, gathered, own
from sparsefn.engine.processes.shards import (
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
    outside,
    redistributed,
    sharded_like,
    words_of,
)
