"""A small pruned network, and adapters of peft for it."""

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import sparsefn as sf


class Net(nn.Module):
    """A convolution, two linear layers and a head."""

    def __init__(self):
        super().__init__()
        self.conv, self.up, self.down = (
            nn.Conv2d(3, 6, 3, padding=1, dilation=1),
            nn.Linear(96, 20),
            nn.Linear(20, 12),
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x, **kwargs):
        x = self.conv(x).relu().flatten(1)
        return self.head(self.down(self.up(x, **kwargs).relu(), **kwargs).relu())


X = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
NAMES = ["conv", "up", "down"]


def pruned(sparsity=0.5, where="[!h]*.weight"):
    torch.manual_seed(0)
    model = Net()
    algorithm = sf.static(sparsity, init="magnitude", where=where)
    return sf.modules.bake(model, algorithm.init(sf.modules.params_of(model)))


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            eos_token_id=None,
        )
    )


def config(**options):
    return peft.LoraConfig(
        **{"r": 3, "lora_alpha": 6, "target_modules": NAMES, **options}
    )


def wrapped(base=None, **options):
    return sf.integrations.peft.keep_zeros(
        peft.get_peft_model(pruned() if base is None else base, config(**options))
    )


def train(model, steps=4):
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.05
    )
    model.train()
    for _ in range(steps):
        nn.functional.cross_entropy(model(X), torch.arange(8) % 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
