"""The file `.metadata`: what an honest one holds, and that a hostile one runs
nothing.
"""

import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as dcp

import sparsefn as sf
from sparsefn.nn.distributed.metadata import read_metadata
from tests.nn.distributed.harness import on_ranks

PARAMS = {
    "w": torch.arange(12.0).reshape(4, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    sf.distributed.save(PARAMS, folder)
    return folder


@pytest.fixture
def own(saved, tmp_path):
    """A copy of an honest checkpoint, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "own"))


def torchs(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def write(folder, what):
    (folder / ".metadata").write_bytes(pickle.dumps(what))


def test_it_is_what_torch_reads(saved):
    found, want = read_metadata(saved), torchs(saved)
    assert found.state_dict_metadata == want.state_dict_metadata
    places = {
        index: (
            info.relative_path,
            info.offset,
            info.length,
            info.transform_descriptors or (),
        )
        for index, info in want.storage_data.items()
    }
    assert found.storage_data == places


def test_a_path_object_in_it_does_no_harm(own):
    held = torchs(own)
    held.storage_meta = dcp.StorageMeta(checkpoint_id=Path("elsewhere"))
    write(own, held)
    assert torch.equal(sf.distributed.load(PARAMS, own)["w"], PARAMS["w"])


# ---- hostile ones --------------------------------------------------------------------


class Calls:
    """Unpickled, it calls a function of the interpreter."""

    def __init__(self, fn, *args):
        self.fn, self.args = fn, args

    def __reduce__(self):
        return self.fn, self.args


def named(module, name):
    """A class that says it is another one."""
    return type(name, (), {"__module__": module, "__qualname__": name})


def spoilt(folder, mark):
    """Hostile contents of the file by what they name."""
    call = Calls(os.system, f"touch {mark}")
    nested = torchs(folder)
    nested.planner_data = {"deep": [(call,)]}
    as_key = torchs(folder)
    as_key.storage_data = {call: 3}
    as_state = torchs(folder)
    as_state.state_dict_metadata["w"].chunks.append(call)
    yield "posix.system", pickle.dumps(call)
    yield "posix.system", pickle.dumps(nested)
    yield "posix.system", pickle.dumps(as_key)
    yield "posix.system", pickle.dumps(as_state)
    yield "posix.system", pickle.dumps({"w": call}, protocol=0)
    yield "builtins.eval", pickle.dumps(Calls(eval, f"open({mark!r}, 'w')"))
    yield "builtins.getattr", pickle.dumps(Calls(getattr, "text", "upper"))
    yield "torch.load", b"ctorch\nload\n(V/\ntR."
    yield (
        "torch.serialization.os.system",
        b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93\x8c\x01x\x85R.",
    )
    for name in ("Metadata.__init__.__globals__", "os", "Metadata.__subclasses__"):
        module = "torch.distributed.checkpoint.metadata"
        text = f"\x80\x04\x8c{chr(len(module))}{module}\x8c{chr(len(name))}{name}\x93."
        yield f"{module}.{name}", text.encode("latin1")


def test_a_hostile_file_runs_nothing_and_says_what_it_names(own, tmp_path):
    mark = tmp_path / "mark"
    for name, content in [*spoilt(own, str(mark))]:
        (own / ".metadata").write_bytes(content)
        with pytest.raises(
            ValueError,
            match=re.escape(f"but its file .metadata names {name}, which no such"),
        ):
            sf.distributed.load(PARAMS, own)
        assert not mark.exists()
    os.system(f"touch {mark}")
    assert mark.exists(), "the call would have been seen"


def test_classes_that_pretend_to_be_torchs_stay_blank(own):
    (own / ".metadata").write_bytes(
        b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93N}\x8c\x08__init__Ns\x86b."
    )
    before = dcp.Metadata.__init__
    with pytest.raises(ValueError, match="file .metadata cannot be read: TypeError"):
        sf.distributed.load(PARAMS, own)
    assert dcp.Metadata.__init__ is before


DAMAGED = {
    "no pickle": (lambda m: b"not a pickle", "cannot be read: UnpicklingError"),
    "nothing": (lambda m: b"", "cannot be read: EOFError"),
    "cut": (lambda m: pickle.dumps(m)[:-20], "cannot be read: UnpicklingError"),
    "another object": (lambda m: pickle.dumps({"w": 1}), "holds {'w': 1}"),
    "a number for a tensor": (lambda m: m.state_dict_metadata.update(w=3), "holds 3"),
    "a path that leads elsewhere": (
        lambda m: [
            setattr(info, "relative_path", "../other/x")
            for info in m.storage_data.values()
        ],
        "holds ../other/x",
    ),
    "no storage": (lambda m: setattr(m, "storage_data", None), "holds None"),
    "a part outside": (
        lambda m: setattr(
            m.state_dict_metadata["w"].chunks[0], "offsets", torch.Size((2, 0))
        ),
        "holds {'offsets': (2, 0), 'sizes': (4, 3)}",
    ),
    "no parts": (
        lambda m: m.state_dict_metadata["w"].chunks.clear(),
        "is not whole: ValueError: its parts hold 0 of",
    ),
    "a negative place": (
        lambda m: [setattr(info, "offset", -1) for info in m.storage_data.values()],
        "holds {'relative_path': '__0_0.distcp', 'offset': -1",
    ),
    "a size that is none": (
        lambda m: setattr(m.state_dict_metadata["w"], "size", (4.0, 3)),
        "which no such checkpoint does",
    ),
    "no dtype": (
        lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", "float32"),
        "which no such",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name, own):
    change, text = DAMAGED[name]
    held = torchs(own)
    made = change(held)
    (own / ".metadata").write_bytes(
        made if isinstance(made, bytes) else pickle.dumps(held)
    )
    words = (
        f"expected a checkpoint of sf.distributed.save in {str(own)!r}, but its file "
        ".metadata "
    )
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        sf.distributed.load(PARAMS, own)
    assert text in str(caught.value)


def test_tensors_are_read_without_code(own, tmp_path):
    """The files of tensors are torch's, which reads nothing but tensors from them."""
    mark = tmp_path / "mark"
    held = torchs(own)
    torch.save(Calls(os.system, f"touch {mark}"), own / "__0_0.distcp")
    for info in held.storage_data.values():
        info.offset, info.length = 0, (own / "__0_0.distcp").stat().st_size
    write(own, held)
    words = (
        f"expected files of tensors in {str(own)!r} that can be read, but rank 0 got "
        "UnpicklingError: Weights only"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        sf.distributed.load(PARAMS, own)
    assert not mark.exists()


# ---- on processes --------------------------------------------------------------------


def on_two(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    place = lambda x: distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(0)])  # noqa: E731
    tree = {path: place(x) for path, x in PARAMS.items()}
    zeros = {path: torch.zeros_like(x) for path, x in tree.items()}

    def honest():
        sf.distributed.save(tree, Path(folder) / "saved")
        found = sf.distributed.load(zeros, Path(folder) / "saved")
        assert all(
            torch.equal(found[path].full_tensor(), x) for path, x in PARAMS.items()
        )
        assert all(found[path].placements == x.placements for path, x in tree.items())

    def hostile():
        if not dist.get_rank():
            write(Path(folder) / "saved", Calls(os.system, f"touch {folder}/mark"))
        dist.barrier()
        with pytest.raises(ValueError, match=r"names posix.system"):
            sf.distributed.load(zeros, Path(folder) / "saved")
        assert not (Path(folder) / "mark").exists()

    def one_sided():
        kind, text = (
            (FileNotFoundError, "")
            if dist.get_rank()
            else (RuntimeError, "failed: rank 1, FileNotFoundError")
        )
        sf.distributed.save(tree, Path(folder) / "again")
        with pytest.raises(kind, match=text):
            sf.distributed.load(
                zeros, Path(folder) / ("nowhere" if dist.get_rank() else "again")
            )

    yield "an honest folder", honest
    yield "a hostile one", hostile
    yield "one that a process lacks", one_sided


def test_two_processes(tmp_path):
    on_ranks(2, on_two, str(tmp_path))
