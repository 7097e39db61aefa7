"""Parts of tensors on several processes, and what the processes say to each other."""

from sparsefn.engine.processes import collectives
from sparsefn.engine.processes.agreements import agree, agreement, inside, scope, tell
from sparsefn.engine.processes.alignment import Seat, check_grid, moved, seat_of
from sparsefn.engine.processes.collectives import Gather, Sum, Talk, alone, together
from sparsefn.engine.processes.extent import Lie
from sparsefn.engine.processes.lines import Groups, group_of, is_first
from sparsefn.engine.processes.shards import (
    agreed,
    any_sharded,
    check_bare,
    check_plain,
    check_shards,
    groups_of,
    here,
    is_sharded,
    is_spread,
    laid_like,
    laid_out,
    lie_of,
    like,
    localized,
    outside,
    whole,
    words_of,
)
