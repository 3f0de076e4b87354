"""Builds the demo model's tokenizer: whole words for names and templates, single digits, bytes for all else.

The vocabulary is written by hand, not learnt: a byte-level BPE without merges, whose pre-tokens that are in the
vocabulary are taken whole (``ignore_merges``). Any text survives ``decode(encode(text))``, as bytes where need be.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from benchmarks.demo_model import corpus

SPACE = "\u0120"  # how byte-level BPE spells a space

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{% if role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + role + ' is not known to this model') }}"
    "{% endif %}"
    "{{ '<|' + role + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(names: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """Vocabulary order: special tokens, 256 bytes, then words and names, each bare and after a space."""
    words = [spelling for word in [*corpus.words_of_corpus(), *names] for spelling in (word, SPACE + word)]
    pieces = [*corpus.SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in corpus.SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=corpus.BEGIN,
        eos_token=corpus.END,
        pad_token=corpus.PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
