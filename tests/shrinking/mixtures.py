"""Models with experts: one by hand, and those of transformers."""

import torch
import transformers as hf
from torch import nn

import sparsefn as sf

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
PATTERN = sf.patterns.tied(
    [["*.gate.weight", 0], ["*.experts.gate_up_proj", 0], ["*.experts.down_proj", 0]]
)
IDS = {"input_ids": torch.arange(24).reshape(2, 12) % 17 + 3}


class Experts(nn.Module):
    def __init__(self, experts=4, width=3):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 5, width))
        self.down = nn.Parameter(torch.randn(experts, width, 5))

    def one(self, x, number):
        return (x @ self.up[number].T).relu() @ self.down[number].T

    def forward(self, x, index, *, weights):
        out = torch.zeros_like(x)
        for slot in range(index.shape[1]):
            given = torch.stack(
                [
                    self.one(row, number)
                    for row, number in zip(x, index[:, slot].tolist(), strict=True)
                ]
            )
            out = out + weights[:, slot, None] * given
        return out


class Mixture(nn.Module):
    """Each token goes to two experts; to none of those in `out`, which is how it would
    be without them.
    """

    def __init__(self, experts=4, width=3, k=2):
        super().__init__()
        self.router, self.experts = nn.Linear(width, experts), Experts(experts, width)
        self.number, self.k, self.out = experts, k, []

    def forward(self, x):
        logits = self.router(x)
        assert logits.shape[1] == self.number
        logits = logits.index_fill(
            1, torch.tensor(self.out, dtype=torch.int64), -torch.inf
        )
        weights, index = logits.softmax(1).topk(self.k)
        return self.experts(x, index, weights=weights / weights.sum(1, keepdim=True))


BY_HAND = sf.patterns.tied(
    [["router.weight", 0], ["router.bias", 0], ["experts.up", 0], ["experts.down", 0]]
)


def seeded(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def mixtral(**sizes):
    config = hf.MixtralConfig(
        **{**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, **sizes}
    )
    return seeded(hf.MixtralForCausalLM(config))


def qwen(**sizes):
    own = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "head_dim": 8,
    }
    return seeded(
        hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**{**SIZES, **own, **sizes}))
    )


def without(model, pattern, gone):
    """The state of a model in which these experts of each set are masked."""
    params = sf.modules.params_of(model)
    masks = {path: torch.ones_like(x, dtype=torch.bool) for path, x in params.items()}
    for units in pattern.sets(params).values():
        for place in units.places:
            masks[place.path][gone] = False
    return sf.State(params, masks)
