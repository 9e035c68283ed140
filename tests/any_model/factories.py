"""Writes tiny random checkpoints in hub layout for any architecture of transformers: config, weights,
tokenizer, chat template and processor files.

Names of factories are transformers' model types (`tests/any_model/catalogue.py`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmengine.testing.contract import make_lively

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
VOCABULARY = 320
BASE = {  # Fields that nearly all text configs share.
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
Ids = Mapping[str, int]  # Maps a special token to its id.


@dataclass(frozen=True)
class Words:
    """The special tokens and placeholders for an architecture's tokenizer and chat template.

    `special`: special tokens. `attributes`: the tokenizer's attributes, such as image_token. `image`,
    `video`: the chat template's text for an item. `at_end`: whether special tokens other than PAD, BOS, EOS
    and UNK have the last ids.
    """

    special: Sequence[str] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    video: str = ""
    at_end: bool = False


@dataclass(frozen=True)
class Factory:
    """A recipe for an architecture's checkpoint.

    `model`: builds the model from the special tokens' ids. `processor`: builds the processor from the
    tokenizer, or None for a text model. `seed`: the weights' seed, changed for models that repeat a few
    tokens with seed 0.
    """

    words: Words
    model: Callable[[Ids], torch.nn.Module]
    processor: Callable[[PreTrainedTokenizerFast], object] | None = None
    seed: int = 0


def make_tokenizer(words: Words) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the special tokens; ids 0 to 3 are pad, bos, eos and unk."""
    special = list(dict.fromkeys((PAD, BOS, EOS, UNK, *words.special)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ordered = (*special[:4], *alphabet, *special[4:]) if words.at_end else (*special, *alphabet)
    vocabulary = {token: number for number, token in enumerate(ordered)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens=dict(words.attributes),
    )


def make_template(words: Words) -> str:
    """Return a chat template that takes a string or parts as content."""
    media = "".join(
        f"{{%- elif part.type == '{kind}' %}}{{{{ '{text}' }}}}"
        for kind, text in (("image", words.image), ("video", words.video))
        if text
    )
    return (
        "{{ bos_token }}{% for message in messages %}{{ message.role }}: "
        "{%- if message.content is string %}{{ message.content }}"
        "{%- else %}{% for part in message.content %}"
        "{%- if part.type == 'text' %}{{ part.text }}" + media + "{%- endif %}{% endfor %}{%- endif %}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )


def write_factory(factory: Factory, folder: Path) -> torch.nn.Module:
    """Write a checkpoint, and return its model in float32, in evaluation mode."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(factory.words)
    tokenizer.chat_template = make_template(factory.words)
    ids = MappingProxyType(dict(tokenizer.get_added_vocab()))
    torch.manual_seed(0)
    model = factory.model(ids).eval().float()
    make_lively(model, factory.seed)
    model.save_pretrained(folder)
    if factory.processor is None:
        tokenizer.save_pretrained(folder)
    else:
        processor = factory.processor(tokenizer)
        processor.chat_template = tokenizer.chat_template
        processor.save_pretrained(folder)
    generation = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return model
