"""Tiny random checkpoints of every supported family, written by `transformers` itself, with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 384
EOS_TOKEN_ID = 1
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

_SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
_CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = (
    "A prefill worker computes the keys and values of a prompt in chunks, and a decode worker reads them block by block"
    " while they are being computed. The runner hands the baton over without slowing down; whoever drops it loses."
    " Twenty questions: who, what, when, where, why, which, whose, how many, how much, how long, how far, how often?"
)
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {"num_hidden_layers": 3, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 32},
}

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_SCALING = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_SCALING = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def make_checkpoint(
    family: str, folder: Path, seed: int = 0, *, sharded: bool = False, dtype: str = "float32", **config: Any
) -> Path:
    """Write a checkpoint of `family` (one of `FAMILIES`) with random weights into `folder`, and return it.

    `config` overrides fields of the family's configuration. Weights are large enough for logits with clear gaps, and
    biases and norms are random too, so that a forgotten one shows.
    """
    # Here: the process that shares the tests out among others imports this module, and makes none.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    fields = _COMMON | _OF_FAMILY[family] | config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    # A tied head favours the token that was just read, unless the layers outweigh its embedding.
    embedding_std = 0.1 if fields["tie_word_embeddings"] else 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(std=embedding_std)
            else:
                parameter.normal_(std=0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="64KB" if sharded else "1GB")
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `VOCAB_SIZE` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", chat_template=_CHAT_TEMPLATE
    )
