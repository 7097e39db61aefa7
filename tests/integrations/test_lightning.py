"""A fit of Lightning with the callback: steps, checkpoints, and what is done twice or in another order."""

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
    return not any(module.get_parameter(n)[~m].any() for n, m in state.masks.items() if m.ndim)


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
    assert sf.checkpoint.tree_equal(final(module, callback)["state"].masks, sparse.state.masks)
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()))
    assert pruned(module, sparse.state)


@pytest.mark.parametrize("algorithm", [ALGORITHM, sf.reparametrised(sf.reparam.low_rank(2, dropout=0.5))])
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
    assert not sf.checkpoint.tree_equal(state.masks, masks) and sf.masks.n_kept(state.masks) == 48 + 24
    assert pruned(module, state)


def test_a_new_run_needs_a_callback_of_its_own():
    _, module, callback = fitted(epochs=1)
    with pytest.raises(ValueError, match="the run begins after 0 steps, and the masks are those after 3: a new run"):
        trainer(callback).fit(module, loader())


def test_another_module_is_no_second_fit():
    run = fitted(epochs=1)[0]
    run.fit_loop.max_epochs = 2
    with pytest.raises(ValueError, match="prunes weights that are not zero in the model"):
        run.fit(Module(), loader())


def test_a_checkpoint_of_a_run_without_the_callback_is_refused(tmp_path):
    dense = trainer(lightning.Callback(), 1)
    dense.fit(Module(), loader())
    dense.save_checkpoint(tmp_path / "dense.ckpt")
    with pytest.raises(ValueError, match="the run begins after 3 steps, and the masks are those after 0: .*ckpt_path"):
        fitted(checkpoint=tmp_path / "dense.ckpt")


def test_checkpoints_of_model_checkpoint_have_the_masks_of_their_weights(tmp_path):
    save = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    module, callback = Module(), SparsityCallback(ALGORITHM)
    trainer(callback, 2, callbacks=[save, callback], enable_checkpointing=True).fit(module, loader())
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 3
    for file in files:
        saved = torch.load(file)
        (state,) = (value for name, value in saved["callbacks"].items() if "SparsityCallback" in name)
        assert state["sparse"]["step"] == saved["global_step"] - 1
        for name in ("up.weight", "down.weight"):
            assert not saved["state_dict"][name][~state["sparse"]["tensors"][f"masks.{name}"]].any()


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
    assert module.seen[:2] == [48, 48] and max(module.seen) == 48  # two batches before training


def test_the_algorithm_may_be_a_function_of_the_steps():
    seen = []

    def made(steps):
        seen.append(steps)
        return sf.rigl(0.75, steps=steps)

    fitted(made, 2)
    assert seen == [2 * STEPS]


def test_several_optimizers_are_refused():
    class Two(Module):
        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.up, self.down)]

    module = Two()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="SparsityCallback: expected one optimizer, got 2: call sf.attach with a list"):
        trainer(SparsityCallback(ALGORITHM), accumulate_grad_batches=1, gradient_clip_val=None).fit(module, loader())


def test_it_is_copied_with_its_module_and_says_what_it_needs(monkeypatch):
    callback = SparsityCallback(ALGORITHM)
    assert callback.state_dict() == {} and copy.deepcopy(callback).sparse is None
    monkeypatch.setattr(sf.integrations.lightning, "Callback", object)
    with pytest.raises(ModuleNotFoundError, match="SparsityCallback needs lightning: pip install lightning"):
        SparsityCallback(ALGORITHM)
