"""A whole pruned model learns from its dense teacher, and its zeros stay."""

import copy

import pytest
import torch
from torch import nn

import sparsefn as sf

PATHS = ["0", "2"]


@pytest.fixture(scope="module")
def teacher():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)
    ).requires_grad_(False)


def data(batches=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batches, 32, 8, generator=generator)


def pruned(teacher, **options):
    algorithm = sf.one_shot(**{"sparsity": 0.7} | options)
    state = algorithm.init(sf.modules.params_of(teacher))
    return algorithm.update(state, state.params, 0)


def distance(student, own, answer, hidden):
    pairs = sf.recovery.layer_map(PATHS, PATHS)
    far = sf.recovery.over_layers(sf.recovery.cosine_distance, own, hidden, pairs)
    return sf.recovery.kl(student, answer, temperature=2.0) + 0.5 * far


def apart(teacher, state):
    x = data(1)[0]
    found = sf.recovery.outputs(teacher, state, x, paths=PATHS)
    return float(distance(*found, *sf.recovery.outputs(teacher, None, x, paths=PATHS)))


def zeros_stay(params, masks):
    return not any(
        params[path][~mask].any() for path, mask in masks.items() if mask.ndim
    )


OPTIMIZERS = [
    sf.optimizers.sgd(0.1, momentum=0.9),
    sf.optimizers.adam(5e-3),
    sf.optimizers.adamw(5e-3, weight_decay=0.1),
]
PATTERNS = [
    {},
    {"sparsity": None, "pattern": sf.patterns.nm(2, 4)},
    {"pattern": sf.patterns.channel(axis=1)},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("options", PATTERNS, ids=repr)
def test_as_pure_functions(teacher, optimizer, options):
    start = pruned(teacher, **options)
    algorithm = sf.with_optimizer(sf.from_masks(start.masks), optimizer)
    state = algorithm.init(start.params)

    def loss(params, x, answer, hidden):
        student = sf.recovery.outputs(teacher, params, x, paths=PATHS)
        return distance(*student, answer, hidden)

    for step, x in enumerate(data()):
        answer, hidden = sf.recovery.outputs(teacher, None, x, paths=PATHS)
        grads = torch.func.grad(loss)(sf.effective(state), x, answer, hidden)
        state = algorithm.update(state, grads, step)
        assert zeros_stay(state.params, start.masks)
    assert sf.checkpoint.tree_equal(state.masks, start.masks)
    assert apart(teacher, state) < 0.9 * apart(teacher, start)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_under_attach(teacher, kind):
    start = pruned(teacher)
    student = sf.modules.bake(copy.deepcopy(teacher), start).requires_grad_(True)
    optimizer = kind(student.parameters(), lr=0.1 if kind is torch.optim.SGD else 5e-3)
    sparse = sf.attach(sf.from_masks(start.masks), student, optimizer)
    for step, x in enumerate(data()):
        answer, hidden = sf.recovery.outputs(teacher, None, x, paths=PATHS)
        found = sf.recovery.outputs(student, None, x, paths=PATHS)
        distance(*found, answer, hidden).backward()
        sparse.before_step()
        optimizer.step()
        optimizer.zero_grad()
        sparse.after_step(step)
        assert zeros_stay(dict(student.named_parameters()), start.masks)
    sparse.detach()
    after = sf.modules.params_of(student)
    assert apart(teacher, after) < 0.9 * apart(teacher, start)


def test_many_students_at_once(teacher):
    # one for each seed, under vmap, with the numbers of each alone
    start = pruned(teacher)
    algorithm = sf.with_optimizer(
        sf.from_masks(start.masks), sf.optimizers.sgd(0.1, momentum=0.9)
    )
    x = data(1)[0]
    answer, hidden = sf.recovery.outputs(teacher, None, x, paths=PATHS)

    def loss(params):
        student = sf.recovery.outputs(teacher, params, x, paths=PATHS)
        return distance(*student, answer, hidden)

    def student(size):
        params = {path: size * leaf for path, leaf in start.params.items()}
        state = algorithm.init(params)
        for step in range(3):
            grads = torch.func.grad(loss)(sf.effective(state))
            state = algorithm.update(state, grads, step)
        return state.params

    sizes = torch.tensor([0.5, 1.0])
    together = torch.vmap(student)(sizes)
    for i, size in enumerate(sizes):
        for path, leaf in student(size).items():
            torch.testing.assert_close(together[path][i], leaf)
