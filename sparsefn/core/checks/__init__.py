"""Checks of what users give, and the calls that made an algorithm."""

from sparsefn.core.checks.callables import check_call, check_keywords
from sparsefn.core.checks.checks import (
    Level,
    Schedule,
    Step,
    as_int,
    check_int,
    check_kind,
    check_pairs,
    check_positive,
    check_sparsity,
    check_step,
    check_trigger,
    check_whole,
    is_int,
    is_number,
    is_sequence,
    number,
    numbers,
    positive_pair,
)
from sparsefn.core.checks.factories import (
    Call,
    Described,
    Made,
    call_of,
    described,
    factory_of,
    has_name,
    own_calls,
    parts_of,
    shown,
    uncalled,
    with_call,
)
from sparsefn.core.checks.plain import called, check_keys, listed, named
from sparsefn.core.checks.presets import keywords_of, preset
from sparsefn.core.checks.table import aligned, natural
