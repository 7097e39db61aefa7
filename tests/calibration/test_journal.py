"""What a run has done, on the disk."""

import pytest
import torch

from sparsefn.calibration.folders import StoredTensor
from sparsefn.calibration.journal import (
    Part,
    digest_of_batches,
    digest_of_model,
    journal_in,
)

ONE, TWO = Part("one", {}), Part("two", {"0.*": 0.5, "1.*": None})
RUN = {"batches": "a", "blocks": "b"}


def test_it_goes_on_where_it_was(tmp_path):
    out = tmp_path / "deep" / "out"
    journal = journal_in(out, RUN)
    assert journal.parts == () and journal_in(out, RUN) == journal
    later = journal.done(ONE).done(TWO)
    assert (
        journal_in(out, RUN) == later
        and later.parts == (ONE, TWO)
        and journal.parts == ()
    )


def test_it_refuses_another_run_and_other_folders(tmp_path):
    journal_in(tmp_path / "out", RUN)
    with pytest.raises(
        ValueError,
        match="expected the run that was killed in '.*out', but of another run were "
        "its batches:",
    ):
        journal_in(tmp_path / "out", RUN | {"batches": "c"})
    with pytest.raises(
        ValueError, match="expected '.*' to be new or a run that was killed, got 'out'$"
    ):
        journal_in(tmp_path, RUN)
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        ValueError, match="to be new or a run that was killed, got a file$"
    ):
        journal_in(tmp_path / "file", RUN)
    # killed before it was there
    (tmp_path / "out" / ".stream" / "journal.json").unlink()
    assert journal_in(tmp_path / "out", RUN).parts == ()


def test_digests_see_every_value_and_no_layout(tmp_path):
    x = torch.arange(6).reshape(2, 3)
    digest = digest_of_batches([{"ids": x}])
    assert digest == digest_of_batches([{"ids": x.T.contiguous().T}])
    others = [
        [{"ids": x + 1}],
        [{"ids": x.T}],
        [{"ids": x.int()}],
        [{"words": x}],
        [{"ids": x}] * 2,
        [(x,)],
        [{"ids": x, "n": 1}],
    ]
    digests = {
        digest,
        *map(digest_of_batches, others),
        digest_of_batches([{"ids": x, "n": 2}]),
    }
    assert len(digests) == len(others) + 2
    config, stored = tmp_path / "config.json", {"a": StoredTensor("f", (1,), "F32")}
    config.write_text("{}")
    first = digest_of_model(config, stored)
    # whichever file it is in
    assert first == digest_of_model(config, {"a": StoredTensor("g", (1,), "F32")})
    assert first != digest_of_model(config, {"a": StoredTensor("f", (2,), "F32")})
    config.write_text("{ }")
    assert first != digest_of_model(config, stored)
