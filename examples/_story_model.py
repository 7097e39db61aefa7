"""The text, the tokens and the training of `story.py`."""

import math
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tiny_llm import HELD, TRAIN, factor, sources
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsefn as sf

SAVED = 50  # steps between two checkpoints


class Plan(NamedTuple):
    """How large the model is, and how long everything takes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    window: int  # tokens
    batch: int  # windows
    steps: int  # of training
    recover: int  # steps of recovery of each smaller model
    windows: int  # of calibration
    repeats: int  # of each measured call
    modules: int  # of the text to train on, the first of them
    characters: int  # held out
    seed: int = 0


class Text(NamedTuple):
    """Tokens to train on and tokens held out, and how many bytes those are."""

    train: Tensor
    held: Tensor
    held_bytes: int
    crc: int  # of all bytes: each version of Python has its own text


# ---- text ----------------------------------------------------------------------------


def read(plan: Plan, folder: Path) -> Text:
    """Modules of the standard library, in tokens that are learned from those to train
    on. The tokenizer goes into the folder.
    """
    train, held = (
        "".join(file.read_text(encoding="utf-8") for file in sources(names))
        for names in (TRAIN[: plan.modules], HELD)
    )
    held = held[: plan.characters]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=plan.vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([train], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(folder)
    tokens = [torch.tensor(tokenizer.encode(part).ids) for part in (train, held)]
    crc = zlib.crc32((train + held).encode())
    return Text(*tokens, len(held.encode()), crc)


def windows_of(tokens: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Windows at random places, drawn from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - length, (count,), generator=generator)
    return tokens[starts[:, None] + torch.arange(length)]


@torch.no_grad()
def bits(logits: Callable[[Tensor], Tensor], text: Text, plan: Plan) -> float:
    """Bits per byte of the held-out text, in windows side by side. The first token of
    a window is given, and counts nothing.
    """
    length = plan.window
    tokens = text.held[: len(text.held) // length * length].view(-1, length)
    nats = 0.0
    for part in tokens.split(plan.batch):
        found = logits(part)[:, :-1].flatten(0, 1)
        nats += float(cross_entropy(found, part[:, 1:].flatten(), reduction="sum"))
    a_token = nats / tokens[:, 1:].numel()
    return a_token / math.log(2) * len(text.held) / text.held_bytes


def by_counts(text: Text, plan: Plan) -> dict[str, float]:
    """Bits per byte by the counts of tokens, and of pairs of tokens, in the text to
    train on: what a model has to beat. Pairs are mixed with single tokens in the share
    that serves the held-out text best.
    """
    n = plan.vocab_size
    alone = torch.bincount(text.train, minlength=n).double() + 1
    alone /= alone.sum()
    pairs = torch.zeros(n, n, dtype=torch.float64)
    ones = torch.ones(len(text.train) - 1, dtype=torch.float64)
    pairs.index_put_((text.train[:-1], text.train[1:]), ones, accumulate=True)
    after = pairs / pairs.sum(1, keepdim=True).clamp(min=1)

    def mixed(share: float) -> float:
        table = (share * after + (1 - share) * alone).log().float()
        return bits(lambda ids: table[ids], text, plan)

    pair = min(mixed(share / 20) for share in range(1, 20))
    return {"unigram": mixed(0.0), "bigram": pair}


# ---- the model -----------------------------------------------------------------------


def llama(plan: Plan) -> nn.Module:
    """The model, untrained."""
    config = transformers.LlamaConfig(
        **dict(list(plan._asdict().items())[:6]),
        max_position_embeddings=plan.window,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        return transformers.LlamaForCausalLM(config)


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model as a function of tokens."""
    return lambda ids: model(input_ids=ids, use_cache=False).logits


def write(file: Path, content: Any) -> None:
    """A file that is there only when it is whole."""
    part = file.with_name(file.name + ".part")
    torch.save(content, part)
    os.replace(part, file)


def train(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    text: Text,
    plan: Plan,
    steps: int,
    rate: float,
    bar: Any,
    masks: dict[str, Tensor] | None = None,
    checkpoint: Path | None = None,
    about: Any = None,
) -> float:
    """An ordinary loop of torch, in place. Masks keep their zeros. A loop with a
    checkpoint goes on from it, and gives the seconds of a core that it took before.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.98)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor(steps))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    begin, before = 0, 0.0
    now = time.process_time()
    if checkpoint is not None and checkpoint.exists():
        held = torch.load(checkpoint, weights_only=True)
        if held["about"] == about:
            begin, before = held["step"], held["seconds"]
            for name, part in parts.items():
                part.load_state_dict(held[name])
            print(f"training goes on after step {begin}")
    chosen = sf.dense() if masks is None else sf.from_masks(masks)
    sparse = sf.attach(chosen, model, optimizer)
    model.train()
    bar.update(begin)
    for step in range(begin, steps):
        # other windows for each step, and the same ones in a run that goes on
        seed = 1_000_003 * plan.seed + step
        loss(windows_of(text.train, plan.batch, plan.window, seed)).backward()
        sparse.before_step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        sparse.after_step(step)
        bar.update()
        if checkpoint is not None and (step + 1) % SAVED == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            spent = before + time.process_time() - now
            step_of = {"about": about, "step": step + 1, "seconds": spent}
            write(checkpoint, step_of | states)
    sparse.detach()
    model.eval()
    return before
