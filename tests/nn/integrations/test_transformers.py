"""A run of Trainer with the callback: steps, checkpoints, the best one, and what is
done twice or in another order.
"""

import shutil

import pytest
import torch
from torch import nn

import sparsefn as sf

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.deep  # `make recipes` runs it

SparsityCallback = sf.integrations.transformers.SparsityCallback

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
DATA = [{"x": x, "labels": x[:4].argmax()} for x in X]
ALGORITHM = sf.rigl(0.75, when=sf.every(2), key=sf.random.key(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 4)

    def forward(self, x, labels=None):
        logits = self.down(self.up(x).relu())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer(folder, callback, model=None, steps=8, **options):
    if model is None:
        torch.manual_seed(0)
        model = Net()
    args = transformers.TrainingArguments(
        str(folder),
        **{
            "max_steps": steps,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "save_strategy": "no",
            **options,
        },
    )
    return transformers.Trainer(
        model, args, train_dataset=DATA, eval_dataset=DATA, callbacks=[callback]
    )


def final(run, callback):
    """The weights and masks at the end of a run."""
    return {
        "weights": {n: p.detach().clone() for n, p in run.model.named_parameters()},
        "state": callback.sparse.state,
    }


def zeros_are_those_of_the_masks(model, state):
    return all(
        torch.equal(model.get_parameter(n) == 0, ~m)
        for n, m in state.masks.items()
        if m.ndim
    )


def test_a_run_is_that_of_attach_and_leaves_an_ordinary_model(tmp_path):
    callback = SparsityCallback(ALGORITHM)
    run = trainer(tmp_path, callback, max_grad_norm=0.0)
    run.train()
    state = callback.sparse.state
    assert sf.masks.n_kept(state.masks) == 48 + 24 and not callback.sparse.is_attached
    assert callback.sparse.changes == 4  # steps of the optimizer, not batches
    assert not [name for name in run.model.state_dict() if "mask" in name]
    hooked = trainer(tmp_path, transformers.TrainerCallback(), max_grad_norm=0.0)
    sparse = sf.attach(ALGORITHM, hooked.model, hooked.create_optimizer(), hooks=True)
    hooked.train()
    assert sf.checkpoint.tree_equal(sparse.state, state)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    # no other one is in its way
    sf.attach(sf.static(None, init="from_zeros"), run.model, optimizer).detach()


def test_learned_masks_are_hard_when_training_ends(tmp_path):
    callback = SparsityCallback(sf.methods.maskllm(steps=4))
    run = trainer(tmp_path, callback, steps=4)
    first = run.model.up.weight.detach().clone()
    run.train()
    kept = callback.sparse.masks["up.weight"]
    assert torch.equal(run.model.up.weight, torch.where(kept, first, 0.0))
    assert (kept.unflatten(1, (-1, 4)).sum(-1) == 2).all()


def test_masks_of_a_model_of_which_a_part_is_frozen(tmp_path):
    torch.manual_seed(0)
    model = Net()
    masks = sf.one_shot(0.5).init(sf.modules.params_of(model)).masks
    model.up.bias.requires_grad_(False)
    callback = SparsityCallback(sf.from_masks(masks))
    run = trainer(tmp_path, callback, model, steps=2)
    run.train()
    assert "up.bias" not in callback.sparse.masks
    assert zeros_are_those_of_the_masks(run.model, callback.sparse.state)


def test_the_algorithm_may_be_a_function_of_the_steps(tmp_path):
    seen = []

    def made(steps):
        seen.append(steps)
        return sf.rigl(0.75, steps=steps)

    trainer(tmp_path, SparsityCallback(made), num_train_epochs=1, max_steps=-1).train()
    assert seen == [8]


def test_a_schedule_that_does_not_end_is_told(tmp_path):
    run = trainer(tmp_path, SparsityCallback(sf.gmp(0.9, steps=1000)), steps=4)
    with pytest.warns(UserWarning, match="attach: "):
        run.train()


@pytest.mark.parametrize("copied", [False, True])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path, copied):
    callback = SparsityCallback(ALGORITHM)
    whole = trainer(tmp_path, callback, save_strategy="steps", save_steps=3)
    whole.train()
    expected, folder = final(whole, callback), tmp_path / "checkpoint-3"
    assert (folder / "sparse.pt").is_file()
    if copied:
        shutil.copytree(folder, tmp_path / "copy")
    folder = tmp_path / "copy" if copied else folder
    other = SparsityCallback(ALGORITHM, resume_from=folder if copied else None)
    again = trainer(tmp_path, other)
    again.train(resume_from_checkpoint=str(folder))
    assert sf.checkpoint.tree_equal(final(again, other), expected)
    again.train(resume_from_checkpoint=str(folder))  # once more in the same process
    assert sf.checkpoint.tree_equal(final(again, other), expected)


@pytest.mark.parametrize(
    "algorithm", [ALGORITHM, sf.reparametrised(sf.reparam.low_rank(2, dropout=0.5))]
)
def test_a_run_that_was_broken_off_goes_on_in_the_same_process(tmp_path, algorithm):
    class Stop(transformers.TrainerCallback):
        def __init__(self):
            self.at = 5

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == self.at:
                self.at = None
                raise KeyboardInterrupt

    callback, stop = SparsityCallback(algorithm), Stop()
    run = trainer(tmp_path, callback, save_strategy="steps", save_steps=3)
    run.add_callback(stop)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    with pytest.raises(
        RuntimeError,
        match="5 steps, and this run begins at step 0: train with resume_from",
    ):
        run.train()
    run.train(resume_from_checkpoint=True)
    whole = SparsityCallback(algorithm)
    straight = trainer(
        tmp_path / "straight", whole, save_strategy="steps", save_steps=3
    )
    straight.train()
    assert sf.checkpoint.tree_equal(final(run, callback), final(straight, whole))


def test_another_trainer_may_go_on_with_the_callback_and_the_model(tmp_path):
    callback = SparsityCallback(ALGORITHM)
    run = trainer(tmp_path, callback, save_strategy="steps", save_steps=3)
    run.train()
    expected = final(run, callback)
    second = trainer(tmp_path, callback, model=run.model)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert sf.checkpoint.tree_equal(final(second, callback), expected)


def test_the_best_model_ends_with_its_own_masks(tmp_path):
    callback = SparsityCallback(ALGORITHM)
    run = trainer(
        tmp_path,
        callback,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the worst loss is the first
    )
    run.train()
    assert run.state.best_global_step == 2
    best = torch.load(tmp_path / "checkpoint-2" / "sparse.pt")["tensors"]
    assert torch.equal(
        best["masks.up.weight"], callback.sparse.state.masks["up.weight"]
    )
    last = torch.load(tmp_path / "checkpoint-8" / "sparse.pt")["tensors"]
    assert not torch.equal(best["masks.up.weight"], last["masks.up.weight"])
    assert (
        run.model.up.weight.count_nonzero() >= 40
        and not run.model.up.weight[~best["masks.up.weight"]].any()
    )


def test_a_second_run_that_begins_anew_is_refused(tmp_path):
    run = trainer(tmp_path, SparsityCallback(ALGORITHM), steps=3)
    run.train()
    with pytest.raises(
        RuntimeError,
        match="3 steps, and this run begins at step 0.*make another callback",
    ):
        run.train()
    kept = SparsityCallback(sf.static(None, init="from_zeros"))
    zeros = run.model.up.weight == 0
    trainer(tmp_path, kept, model=run.model, steps=2).train()
    assert zeros_are_those_of_the_masks(run.model, kept.sparse.state)
    assert torch.equal(run.model.up.weight == 0, zeros)


def test_evaluation_before_and_at_the_start(tmp_path):
    callback = SparsityCallback(ALGORITHM)
    run = trainer(
        tmp_path,
        callback,
        steps=2,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
    )
    run.evaluate()
    assert callback.sparse is None and run.model.up.weight.all()
    seen = []

    class Look(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            seen.append(int(run.model.up.weight.count_nonzero()))

    run.add_callback(Look())
    run.train()
    assert seen[0] == 48 and len(seen) == 2


def test_checkpoints_without_the_file_or_of_other_weights_are_refused(tmp_path):
    run = trainer(
        tmp_path,
        SparsityCallback(ALGORITHM),
        steps=4,
        save_strategy="steps",
        save_steps=2,
    )
    run.train()
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(folder, tmp_path / "other" / "checkpoint-2")
    shutil.copy(
        tmp_path / "checkpoint-4" / "sparse.pt", tmp_path / "other" / "checkpoint-2"
    )
    with pytest.raises(
        ValueError, match="expected masks of step 1, got masks of step 3"
    ):
        trainer(tmp_path / "other", SparsityCallback(ALGORITHM)).train(
            resume_from_checkpoint=True
        )
    (folder / "sparse.pt").unlink()
    with pytest.raises(
        ValueError,
        match=r"expected .*checkpoint-2.sparse.pt, as the checkpoint of a run with .* "
        r"got",
    ):
        trainer(tmp_path, SparsityCallback(ALGORITHM)).train(
            resume_from_checkpoint=str(folder)
        )


def test_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(sf.integrations.transformers, "TrainerCallback", object)
    with pytest.raises(
        ModuleNotFoundError,
        match="SparsityCallback needs transformers: pip install transformers",
    ):
        SparsityCallback(ALGORITHM)
