"""A run that is saved, and continued in a new process, equals one that was never
interrupted.
"""

import subprocess
import sys
from pathlib import Path

import optree
import pytest
import torch
import torchopt

import sparsefn as sf

STEPS = 60
MAKE = torch.Generator().manual_seed(0)
PARAMS = {
    "0": {"weight": torch.randn(6, 8, generator=MAKE), "bias": torch.zeros(6)},
    "1": {"weight": torch.randn(4, 6, generator=MAKE)},
}

# Name -> factory of an algorithm with its optimizer, built in every process.
RUNS = {
    "rigl+adam": lambda: sf.with_optimizer(
        sf.rigl(
            0.7,
            when=sf.every(5, stop=50),
            drop_fraction=sf.schedules.cosine_decay(0.5, 50),
            distribution=sf.budgets.erk(),
            key=sf.random.key(1),
        ),
        sf.optimizers.adam(0.02, weight_decay=0.01),
    ),
    # TorchOpt's sgd treats the first call in a process apart.
    "set+torchopt": lambda: sf.with_optimizer(
        sf.set(0.5, when=sf.every(4), key=sf.random.key(2)),
        torchopt.sgd(0.02, momentum=0.9, weight_decay=0.01),
    ),
    "snfs": lambda: sf.with_optimizer(
        sf.snfs(0.6, when=sf.every(6)), sf.optimizers.sgd(0.02, momentum=0.9)
    ),
    "mixed": lambda: sf.with_optimizer(
        sf.phases(
            [
                (
                    0,
                    sf.partition(
                        [
                            ("0.*", sf.ste(0.5)),
                            ("1.*", sf.iterative(0.1, when=sf.every(7))),
                        ]
                    ),
                ),
                (
                    20,
                    sf.chain(
                        sf.static(0.25),
                        sf.one_shot(
                            0.5, sf.scores.mean(sf.scores.saliency), when=sf.at([30])
                        ),
                    ),
                ),
            ]
        ),
        torchopt.adamw(0.02),
        skip=sf.never(),
    ),
    "latents": lambda: sf.with_optimizer(
        sf.reparametrised(
            sf.reparam.soft_threshold(init=-2.0), sf.set(0.3, when=sf.every(5))
        ),
        sf.optimizers.adamw(0.02, weight_decay=0.1),
    ),
}
# Every split point of the first; a few of the others.
SPLITS = {
    name: range(STEPS) if name == "rigl+adam" else (0, 1, 19, 20, 33) for name in RUNS
}


def slopes(params):
    return optree.tree_map(lambda p: 0.5 * p + torch.sin(5 * p) + 0.1, params)


def advance(algorithm, state, steps):
    for step in steps:
        state = algorithm.update(state, slopes(sf.effective(state)), step)
    return state


def resume(folder):
    """In the new process: continue every saved state to the end, and save the ends in
    one file.
    """
    ends = {}
    zeros = optree.tree_map(torch.zeros_like, PARAMS)
    for name, make in RUNS.items():
        for split in SPLITS[name]:
            algorithm = make()
            saved = torch.load(folder / f"{name}-{split}.pt", weights_only=True)
            state = sf.checkpoint.load_state_dict(algorithm.init(zeros), saved)
            ends[f"{name}-{split}"] = sf.checkpoint.state_dict(
                advance(algorithm, state, range(split + 1, STEPS))
            )
    torch.save(ends, folder / "ends.pt")


@pytest.mark.deep
def test_every_split_point_resumes_in_a_new_process(tmp_path):
    finals = {}
    for name, make in RUNS.items():
        algorithm = make()
        state = algorithm.init(PARAMS)
        for step in range(STEPS):
            state = advance(algorithm, state, [step])
            if step in SPLITS[name]:
                torch.save(
                    sf.checkpoint.state_dict(state), tmp_path / f"{name}-{step}.pt"
                )
        finals[name] = sf.checkpoint.state_dict(state)
    here = Path(__file__).parent
    script = (
        f"import sys; sys.path[:0] = {[str(here), str(here.parent)]!r}\nimport "
        "pathlib, test_resume\n"
    )
    script += "test_resume.resume(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    ends = torch.load(tmp_path / "ends.pt", weights_only=True)
    assert len(ends) == STEPS + 4 * 5
    for label, end in ends.items():
        assert sf.checkpoint.tree_equal(end, finals[label.rsplit("-", 1)[0]]), label


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_a_run(name):
    # The test above compares values that change: masks move, and the last step differs
    # from the one before.
    algorithm = RUNS[name]()
    first = algorithm.init(PARAMS)
    before = advance(algorithm, first, range(STEPS - 1))
    last = advance(algorithm, before, [STEPS - 1])
    assert not sf.checkpoint.tree_equal(last.masks, first.masks)
    assert not sf.checkpoint.tree_equal(last.params, before.params)
    assert not sf.checkpoint.tree_equal(last.opt, before.opt)


def test_a_loaded_state_shares_no_memory_with_the_file():
    algorithm = RUNS["rigl+adam"]()
    state = advance(algorithm, algorithm.init(PARAMS), range(3))
    saved = optree.tree_map(torch.clone, sf.checkpoint.state_dict(state))
    loaded = sf.checkpoint.load_state_dict(algorithm.init(PARAMS), saved)
    for leaf in saved.values():
        leaf.zero_()
    assert sf.checkpoint.tree_equal(loaded, state)
