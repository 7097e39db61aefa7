"""What surrounds a call: vmap, grad, compile, a device, the release of torch."""

from sparsefn.engine.surroundings import backends
from sparsefn.engine.surroundings.backends import asked
from sparsefn.engine.surroundings.old_paths import find_moved
from sparsefn.engine.surroundings.older import differentiating, guards_by_name, is_exporting, replaceable
from sparsefn.engine.surroundings.transforms import (
    ADD_EACH,
    CAST,
    COPY_EACH,
    GROUPED,
    LARGER_EACH,
    LARGEST_EACH,
    LESS_EACH,
    OVER_EACH,
    ROOT_EACH,
    SUM_EACH,
    TIMES_EACH,
    VMAP_REINTERPRETS,
    Array,
    Onlooker,
    See,
    TorchDispatchMode,
    at_compile_time,
    computed_once,
    concrete,
    constants,
    differentiated,
    eagerly,
    fused,
    in_mode,
    is_in_torch_dispatch_mode,
    known,
    outside_modes,
    read,
    reinterpreted,
    temporarily_clear_interpreter_stack,
    transformed,
    unwrapped,
    visible,
    visible_inside,
)
