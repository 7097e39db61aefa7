"""A fit of Lightning with the callback: steps, checkpoints, and what is done twice or
in another order.
"""

import copy
import logging

import pytest
import torch
from torch import nn

import sparsefn as sf

lightning = pytest.importorskip("lightning")
SparsityCallback = sf.integrations.lightning.SparsityCallback
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X[:, :4].argmax(1))
ALGORITHM = sf.rigl(0.75, when=sf.every(2), key=sf.random.key(1))
STEPS = 3  # optimizer steps of an epoch: 6 batches, two for each


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 4)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.down(self.up(x).relu()), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(callback, epochs=4, **options):
    return lightning.Trainer(
        **{
            "max_epochs": epochs,
            "callbacks": [callback],
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 1.0,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            **options,
        }
    )


def loader():
    return torch.utils.data.DataLoader(DATA, batch_size=8)


def fitted(algorithm=ALGORITHM, epochs=4, checkpoint=None, **options):
    module, callback = Module(), SparsityCallback(algorithm)
    run = trainer(callback, epochs, **options)
    run.fit(module, loader(), ckpt_path=checkpoint)
    return run, module, callback


def pruned(module, state):
    return not any(
        module.get_parameter(n)[~m].any() for n, m in state.masks.items() if m.ndim
    )


def final(module, callback):
    return {"weights": dict(module.state_dict()), "state": callback.sparse.state}


def test_a_fit_is_a_loop_with_attach():
    run, module, callback = fitted()
    assert run.global_step == 4 * STEPS and callback.sparse.changes == 6
    plain = Module()
    optimizer = plain.configure_optimizers()
    sparse, step = sf.attach(ALGORITHM, plain, optimizer), 0
    for _ in range(4):
        for index, batch in enumerate(loader()):
            (plain.training_step(batch, index) / 2).backward()
            if index % 2:
                sparse.before_step()
                nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                sparse.after_step(step)
                step += 1
    assert sf.checkpoint.tree_equal(
        final(module, callback)["state"].masks, sparse.state.masks
    )
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()))
    assert pruned(module, sparse.state)


@pytest.mark.parametrize(
    "algorithm", [ALGORITHM, sf.reparametrised(sf.reparam.low_rank(2, dropout=0.5))]
)
def test_a_fit_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path, algorithm):
    _, module, callback = fitted(algorithm)
    half, _, _ = fitted(algorithm, 2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    _, again, other = fitted(algorithm, 4, tmp_path / "half.ckpt")
    assert sf.checkpoint.tree_equal(final(again, other), final(module, callback))


def test_it_goes_on_from_a_checkpoint_in_the_same_process(tmp_path):
    expected = final(*fitted()[1:])
    half, module, callback = fitted(epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    for _ in range(2):
        trainer(callback).fit(module, loader(), ckpt_path=tmp_path / "half.ckpt")
        assert sf.checkpoint.tree_equal(final(module, callback), expected)


def test_a_second_fit_goes_on_where_the_first_ended():
    run, module, callback = fitted(epochs=2)
    masks = callback.sparse.state.masks
    assert callback.sparse.is_attached
    run.fit_loop.max_epochs = 4
    run.fit(module, loader())
    assert run.global_step == 4 * STEPS and callback._done == 4 * STEPS
    state = callback.sparse.state
    assert (
        not sf.checkpoint.tree_equal(state.masks, masks)
        and sf.masks.n_kept(state.masks) == 48 + 24
    )
    assert pruned(module, state)


def test_learned_masks_go_on_in_a_second_fit_and_are_hard_after_detach():
    run, module, callback = fitted(sf.methods.maskllm(steps=4 * STEPS), epochs=2)
    logits = callback.sparse.state.scores["latent"]["logit"]["up.weight"]
    run.fit_loop.max_epochs = 4
    run.fit(module, loader())
    new = callback.sparse.state.scores
    assert int(new["step"]) == 4 * STEPS
    # Adam moved each by less than its rate a step
    moved = new["latent"]["logit"]["up.weight"] - logits
    assert 0 < moved.abs().max() < 2 * STEPS * 0.011
    callback.sparse.detach()
    kept = callback.sparse.masks["up.weight"]
    assert torch.equal(module.up.weight, torch.where(kept, Module().up.weight, 0.0))
    assert (kept.unflatten(1, (-1, 4)).sum(-1) == 2).all()


def test_a_checkpoint_of_after_detach_goes_on_unless_it_lacks_what_masks_are_made_of(
    tmp_path,
):
    path = tmp_path / "last.ckpt"
    _, _, at_once = fitted()
    run, _, callback = fitted(epochs=2)
    callback.sparse.detach()
    run.save_checkpoint(path)
    _, _, resumed = fitted(checkpoint=path)
    assert sf.checkpoint.tree_equal(resumed.sparse.state, at_once.sparse.state)
    learned = sf.methods.maskllm(steps=4 * STEPS)
    run, _, callback = fitted(learned, epochs=2)
    callback.sparse.detach()
    run.save_checkpoint(path)
    with pytest.raises(
        ValueError,
        match=r"the checkpoint was written after detach\(\), so that it lacks the "
        r"optimizer's state .* save it before callback.sparse.detach\(\)$",
    ):
        fitted(learned, checkpoint=path)


def test_drawn_gates_go_on_in_a_second_fit():
    # its masks of training are others than the settled ones, which detach leaves
    algorithm = sf.reparametrised(sf.reparam.hard_concrete())
    run, module, callback = fitted(algorithm, epochs=2)
    before = callback.sparse.state
    settled = sf.settled(algorithm, before)
    assert not sf.checkpoint.tree_equal(before.masks, settled.masks)
    run.fit_loop.max_epochs = 4
    run.fit(module, loader())
    state = callback.sparse.state
    assert int(state.scores["step"]) == 4 * STEPS
    callback.sparse.detach()
    wanted = sf.effective(sf.settled(algorithm, state))
    assert sf.checkpoint.tree_equal(dict(module.named_parameters()), wanted)


def test_a_new_run_needs_a_callback_of_its_own():
    _, module, callback = fitted(epochs=1)
    with pytest.raises(
        ValueError,
        match="the run begins after 0 steps, and the masks are those after 3: a new "
        "run",
    ):
        trainer(callback).fit(module, loader())


def test_another_module_is_no_second_fit():
    run = fitted(epochs=1)[0]
    run.fit_loop.max_epochs = 2
    with pytest.raises(
        ValueError, match="prunes weights that are not zero in the model"
    ):
        run.fit(Module(), loader())


def test_a_checkpoint_of_a_run_without_the_callback_is_refused(tmp_path):
    dense = trainer(lightning.Callback(), 1)
    dense.fit(Module(), loader())
    dense.save_checkpoint(tmp_path / "dense.ckpt")
    with pytest.raises(
        ValueError,
        match="the run begins after 3 steps, and the masks are those after 0: "
        ".*ckpt_path",
    ):
        fitted(checkpoint=tmp_path / "dense.ckpt")


def test_checkpoints_of_model_checkpoint_have_the_masks_of_their_weights(tmp_path):
    save = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=2, save_top_k=-1
    )
    module, callback = Module(), SparsityCallback(ALGORITHM)
    trainer(callback, 2, callbacks=[save, callback], enable_checkpointing=True).fit(
        module, loader()
    )
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 3
    for file in files:
        saved = torch.load(file)
        (state,) = (
            value
            for name, value in saved["callbacks"].items()
            if "SparsityCallback" in name
        )
        assert state["sparse"]["step"] == saved["global_step"] - 1
        for name in ("up.weight", "down.weight"):
            assert not saved["state_dict"][name][
                ~state["sparse"]["tensors"][f"masks.{name}"]
            ].any()


class Validated(Module):
    def validation_step(self, batch, index):
        self.seen.append(int(self.up.weight.count_nonzero()))


def test_validation_before_training_sees_the_zeros():
    module, callback = Validated(), SparsityCallback(ALGORITHM)
    module.seen = []
    run = trainer(callback, 1)
    run.validate(module, loader(), verbose=False)
    assert callback.sparse is None and set(module.seen) == {192}
    module.seen.clear()
    run.fit(module, loader(), loader())
    # two batches before training
    assert module.seen[:2] == [48, 48] and max(module.seen) == 48


def test_the_algorithm_may_be_a_function_of_the_steps():
    seen = []

    def made(steps):
        seen.append(steps)
        return sf.rigl(0.75, steps=steps)

    fitted(made, 2)
    assert seen == [2 * STEPS]


LOOPS = {
    "rigl": ALGORITHM,
    "gmp": sf.gmp(0.8, steps=20, when=sf.every(1)),
    "supermask": sf.supermask(0.5),
    "low_rank": sf.reparametrised(sf.reparam.low_rank(2), key=sf.random.key(1)),
}


def looped(algorithm, steps, epochs=2):
    """What a loop of one's own makes of so many steps a batch, by its index."""
    plain = Module()
    optimizer = plain.configure_optimizers()
    sparse, step = sf.attach(algorithm, plain, optimizer), 0
    for _ in range(epochs):
        for index, batch in enumerate(loader()):
            for _ in range(steps(index)):
                optimizer.zero_grad()
                plain.training_step(batch, index).backward()
                sparse.before_step()
                optimizer.step()
                sparse.after_step(step)
                step += 1
    return {"weights": dict(plain.state_dict()), "state": sparse.state}


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        for _ in range(2 - index % 2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()


@pytest.mark.parametrize("name", LOOPS)
def test_several_steps_of_a_batch_are_several_steps_of_the_algorithm(name):
    module, callback = Manual(), SparsityCallback(LOOPS[name])
    run = trainer(callback, 2, accumulate_grad_batches=1, gradient_clip_val=None)
    run.fit(module, loader())
    assert run.global_step == callback._done == 18
    assert sf.checkpoint.tree_equal(
        final(module, callback), looped(LOOPS[name], lambda index: 2 - index % 2)
    )


class Skipping(Module):
    def training_step(self, batch, index):
        return None if index in (1, 5) else super().training_step(batch, index)


@pytest.mark.parametrize("name", LOOPS)
def test_batches_that_are_skipped_are_no_steps(name, tmp_path):
    expected, checkpoint = (
        looped(LOOPS[name], lambda index: int(index not in (1, 5))),
        None,
    )
    for epochs in (1, 2):  # the first ends with a batch that is skipped
        module, callback = Skipping(), SparsityCallback(LOOPS[name])
        run = trainer(
            callback, epochs, accumulate_grad_batches=1, gradient_clip_val=None
        )
        run.fit(module, loader(), ckpt_path=checkpoint)
        run.save_checkpoint(checkpoint := tmp_path / "half.ckpt")
    assert sf.checkpoint.tree_equal(final(module, callback), expected)
    run.fit_loop.max_epochs = 3
    run.fit(module, loader())
    assert (
        run.global_step == callback._done == 18
        and callback.sparse.state_dict()["step"] == 11
    )


def test_skipped_batches_among_those_that_are_accumulated():
    class Last(Module):
        def training_step(self, batch, index):
            return (
                None if index in (1, 2, 4, 5) else super().training_step(batch, index)
            )

    module, callback = Last(), SparsityCallback(ALGORITHM)
    run = trainer(callback, 2)
    run.fit(module, loader())
    assert (
        run.global_step == callback._done == 6
        and callback.sparse.state_dict()["step"] == 3
    )
    assert pruned(module, callback.sparse.state)


@pytest.mark.parametrize("kind", [Module, Manual])
def test_a_step_that_a_grad_scaler_leaves_out_is_counted_and_changes_no_mask(kind):
    # the first gradients overflow
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    seen = []

    class Seen(kind):
        def on_train_batch_end(self, *args):
            seen.append(
                (
                    callback.sparse.changes,
                    self.trainer.global_step,
                    pruned(self, callback.sparse.state),
                )
            )

    module, callback = Seen(), SparsityCallback(LOOPS["gmp"])
    options = {} if kind is Module else {"gradient_clip_val": None}
    run = trainer(callback, 8, plugins=[plugin], accumulate_grad_batches=1, **options)
    run.fit(module, loader())
    changes = [x for x, _, _ in seen]
    assert changes[0] == 0 < changes[-1] < run.global_step == callback._done
    assert all(x for _, _, x in seen)


def test_a_checkpoint_of_before_the_count_is_read(tmp_path):
    half, _, _ = fitted(epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt")
    del saved["callbacks"]["SparsityCallback"]["done"]
    torch.save(saved, tmp_path / "half.ckpt")
    run, _, callback = fitted(checkpoint=tmp_path / "half.ckpt")
    assert run.global_step == callback._done == 4 * STEPS


class Two(Module):
    def configure_optimizers(self):
        return [
            torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.up, self.down)
        ]

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        for optimizer in self.optimizers():
            optimizer.step()


def test_the_parts_of_a_module_with_several_optimizers_are_attached_each():
    class Parts(lightning.Callback):
        def on_fit_start(self, trainer, module):
            parts = zip((module.up, module.down), trainer.optimizers, strict=True)
            self.sparse = [
                sf.attach(ALGORITHM, part, optimizer, hooks=True)
                for part, optimizer in parts
            ]

    module, callback = Two(), Parts()
    module.automatic_optimization = False
    trainer(callback, 1, accumulate_grad_batches=1, gradient_clip_val=None).fit(
        module, loader()
    )
    for sparse, part in zip(callback.sparse, (module.up, module.down), strict=True):
        assert (
            sparse.state_dict()["step"] == 5
            and sparse.changes == 3
            and pruned(part, sparse.state)
        )


def test_several_optimizers_are_refused():
    module = Two()
    module.automatic_optimization = False
    with pytest.raises(
        ValueError,
        match="expected one optimizer, got 2: in on_fit_start of a callback .* "
        "hooks=True",
    ):
        trainer(
            SparsityCallback(ALGORITHM),
            accumulate_grad_batches=1,
            gradient_clip_val=None,
        ).fit(module, loader())


def test_it_is_copied_with_its_module_and_says_what_it_needs(monkeypatch):
    callback = SparsityCallback(ALGORITHM)
    assert callback.state_dict() == {} and copy.deepcopy(callback).sparse is None
    monkeypatch.setattr(sf.integrations.lightning, "Callback", object)
    with pytest.raises(
        ModuleNotFoundError,
        match="SparsityCallback needs lightning: pip install lightning",
    ):
        SparsityCallback(ALGORITHM)


def test_an_average_in_the_module_after_fit_is_told_and_made_sparse():
    from lightning.pytorch.callbacks import EMAWeightAveraging

    class Validated(Module):  # the average is swapped into the module for it
        def validation_step(self, batch, index):
            self.training_step(batch, index)

    module, callback, average = (
        Validated(),
        SparsityCallback(ALGORITHM),
        EMAWeightAveraging(decay=0.9),
    )
    with pytest.warns(
        UserWarning,
        match=r"SparsityCallback: after fit, check: .*sf.modules.mask_average\(module, "
        r"call",
    ):
        trainer(callback, callbacks=[average, callback]).fit(module, loader(), loader())
    assert not pruned(module, callback.sparse.state)
    mine, dropped = sf.modules.mask_average(module, callback.sparse.masks)
    theirs, same = sf.modules.mask_average(
        average._average_model, callback.sparse.masks
    )
    assert type(mine) is Validated
    assert dropped == same
    assert dropped.all.weights > 0
    for final in (mine, theirs, theirs.module):
        callback.sparse.check(final)
    assert sf.checkpoint.tree_equal(
        dict(mine.state_dict()), dict(theirs.module.state_dict())
    )


def test_a_fit_without_an_average_says_nothing_at_its_end(recwarn):
    fitted(epochs=1)
    assert not [warning for warning in recwarn if "after fit" in str(warning.message)]
