"""How the kernels are tested without a GPU: run by Triton's interpreter, or compiled
for GPUs that are not here.

`make triton` runs both, in two processes: Triton looks at TRITON_INTERPRET when a
kernel is defined.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sparsefn._engine.backends import BACKENDS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
by_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="runs with TRITON_INTERPRET=1"
)
by_compiler = pytest.mark.skipif(INTERPRETED, reason="runs without TRITON_INTERPRET")
# its key, by the bits of a score
INFINITY = {16: 0x7F80, 32: 0x7F800000, 64: 0x7FF << 52}
POINTERS = {
    **dict.fromkeys(
        ("spans", "lots", "counts", "table", "tally", "states", "keys", "index"), "*i64"
    ),
    **dict.fromkeys(("near_place", "found"), "*i32"),
    **dict.fromkeys(("allow", "deny"), "*i8"),
}


def without() -> Any:
    """A context in which no kernel serves."""
    return mock.patch.dict(BACKENDS, clear=True)


class Built(NamedTuple):
    ptx: str
    spills: int  # instructions that store to or load from local memory
    loads: set[str]  # of global memory, in the machine's words
    stores: set[str]


def built(
    fn: Any,
    types: dict[str, str],
    warps: int,
    capability: int,
    fused: bool = True,
    **constants: Any,
) -> Built:
    """A kernel compiled for a GPU by its capability; pointers are multiples of 16
    bytes.
    """
    kinds = {**POINTERS, **types}
    names = [p.name for p in fn.params]
    signature = {
        p.name: "constexpr" if p.is_constexpr else kinds.get(p.name, "i32")
        for p in fn.params
    }
    source = ASTSource(
        fn=fn,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if str(signature[n]).startswith("*")
        },
    )
    made = compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": fused},
    )
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        sass = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    operations = re.findall(
        r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9_.]+)", sass
    )
    return Built(
        made.asm["ptx"],
        sum(name.startswith(("STL", "LDL")) for name in operations),
        {name for name in operations if name.startswith("LDG")},
        {name for name in operations if name.startswith("STG")},
    )
