import importlib
import pickle
import subprocess
import sys

import pytest

import sparsefn as sf
from sparsefn.engine.surroundings.old_paths import _Moved

MOVED = {old: new for finder in sys.meta_path if isinstance(finder, _Moved) for old, new in finder.paths.items()}


def test_a_module_that_moved_is_the_same_module_by_its_old_path():
    assert len(MOVED) >= 15
    for old, new in MOVED.items():
        assert importlib.import_module(old) is importlib.import_module(new)
        assert importlib.import_module(new).__spec__.name == new


@pytest.mark.deep
def test_old_paths_work_first_in_a_fresh_process():
    script = (
        "from sparsefn.schedules import cosine_decay; from sparsefn.where import default_where; "
        "import sparsefn.select as select, sparsefn as sf; from sparsefn import redistribute, gates; "
        "assert sf.schedules.cosine_decay is cosine_decay and sf.topk_mask is select.topk_mask; "
        "assert gates.gate is sf.gate and sf.redistribute is redistribute"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_pickles_of_old_paths_are_read():
    new = pickle.dumps(sf.schedules.polynomial, protocol=0)
    old = new.replace(b"sparsefn.timing.schedules", b"sparsefn.schedules")
    assert old != new and pickle.loads(old) is sf.schedules.polynomial


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'sparsefn\.moon'"):
        importlib.import_module("sparsefn.moon")
