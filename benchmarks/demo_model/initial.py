"""The state that training starts from: a Llama whose two layers can already look a name up, if poorly.

From random weights the look-up is learnt late: a model first answers with some code of its prompt, and stays there for
long before it matches names. So the residual stream starts with a plan (training is free to leave it):

    dimension 0         the same in all tokens: lets a head without biases attend by distance alone
    [1, 33)             which name this is; zero in all other tokens; alike with and without a space before the name
    [33, 64)            which token this is
    [64, 128)           which name stood 3, 4, 5 or 6 tokens ago, each distance in a rotation of its own

In ``The code of Mira is 4817.`` the digits stand 3 to 6 tokens after the name, and so do, in the chat form, the places
that predict them. Layer 0 has one head for each of these distances, which fills the last part. Layer 1
attends to positions with the same last part, and copies their token. All else starts random and small.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

HIDDEN = 128
CONSTANT, NAME, TOKEN, PAST = slice(0, 1), slice(1, 33), slice(33, 64), slice(64, 128)
QUIET = 0.1
EMBEDDING_NORM = 0.55  # of the constant, and of all else
DISTANCE_SHARPNESS = 3.0
NAME_DISTANCES = (3, 4, 5, 6)
PAST_GAIN, MATCH_GAIN, COPY_GAIN = 0.12, 1.8, 0.1


def orthonormal(rows: int, columns: int) -> torch.Tensor:
    return torch.nn.init.orthogonal_(torch.empty(rows, columns))


def slow_rows(head_dim: int) -> list[int]:
    """Rows of a head that RoPE turns least: they compare contents alike over any distance in the context."""
    half = head_dim // 2
    return [*range(half // 2 + 1, half), *range(half + half // 2 + 1, head_dim)]


@torch.no_grad()
def initialise(model: LlamaForCausalLM, name_ids: list[list[int]]) -> None:
    """Sets embeddings and the attention of layers 0 and 1; ``name_ids`` has the token ids that spell one name."""
    embeddings_VD = model.model.embed_tokens.weight
    embeddings_VD.zero_()
    embeddings_VD[:, TOKEN].normal_()
    for ids in name_ids:
        embeddings_VD[ids, NAME] = torch.randn(NAME.stop - NAME.start)
    # Equal norms: RMSNorm then leaves the constant alike in all tokens, and no token draws the distance heads to it.
    embeddings_VD *= EMBEDDING_NORM / embeddings_VD.norm(dim=-1, keepdim=True)
    embeddings_VD[:, CONSTANT] = EMBEDDING_NORM
    for block in model.model.layers:
        block.self_attn.o_proj.weight *= QUIET  # what a layer adds at first is what is planned, and little else
        block.mlp.down_proj.weight *= QUIET
    initialise_look_back(model)
    initialise_match(model)


def initialise_look_back(model: LlamaForCausalLM) -> None:
    """Layer 0: each head attends to one distance, and writes the name there into ``PAST``."""
    config, attention = model.config, model.model.layers[0].self_attn
    head_dim, half = config.head_dim, config.head_dim // 2
    fast = half - len(slow_rows(head_dim)) // 2
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(fast) / half)
    amplitude = (DISTANCE_SHARPNESS * head_dim**0.5 / (HIDDEN / 2)) ** 0.5
    name_dim, past_dim = NAME.stop - NAME.start, PAST.stop - PAST.start
    for first in range(0, config.num_key_value_heads * head_dim, head_dim):
        attention.k_proj.weight[first : first + fast, 0] += amplitude
        attention.v_proj.weight[first : first + name_dim, NAME] += torch.eye(name_dim)
    for head, distance in zip(range(config.num_attention_heads), NAME_DISTANCES, strict=True):
        first, angles = head * head_dim, distance * frequencies
        attention.q_proj.weight[first : first + fast, 0] += amplitude * torch.cos(angles)
        attention.q_proj.weight[first + half : first + half + fast, 0] -= amplitude * torch.sin(angles)
        attention.o_proj.weight[PAST, first : first + name_dim] += PAST_GAIN * orthonormal(past_dim, name_dim)


def initialise_match(model: LlamaForCausalLM) -> None:
    """Layer 1: each head attends to positions with a ``PAST`` like its own, and adds their ``TOKEN`` part."""
    config, attention = model.config, model.model.layers[1].self_attn
    head_dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    token_dim, past_dim = TOKEN.stop - TOKEN.start, PAST.stop - PAST.start
    rows = torch.tensor(slow_rows(head_dim))
    for kv_head in range(config.num_key_value_heads):
        view = MATCH_GAIN * orthonormal(len(rows), past_dim)
        first = kv_head * head_dim
        attention.k_proj.weight[first + rows, PAST] += view
        attention.v_proj.weight[first : first + token_dim, TOKEN] += torch.eye(token_dim)
        for head in range(kv_head * group, (kv_head + 1) * group):
            first = head * head_dim
            attention.q_proj.weight[first + rows, PAST] += view
            attention.o_proj.weight[TOKEN, first : first + token_dim] += COPY_GAIN * torch.eye(token_dim)
