"""Makes the checkpoint's tokenizer: byte-level BPE in Qwen's format, trained on the texts of the tasks.

Python's help texts are added to the training texts, so that other English text and code are not split into
single bytes.
"""

import json
import pathlib
import random
from collections.abc import Iterator
from pydoc_data.topics import topics

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mmengine_shapes.questions import clip_questions, image_questions, pair_questions
from mmengine_shapes.scenes import random_clip, random_scene
from mmengine_shapes.training.texts import SYSTEM_PROMPTS, TEXT_TASKS, filler, text_pair

BPE_SIZE = 1510
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def corpus(seed: int = 0, scenes: int = 3000) -> Iterator[str]:
    """Yield questions, answers, prompts and some general English, to train the tokenizer."""
    rng = random.Random(f"tokenizer {seed}")
    # Every prompt contains these words, so each word must become a single token.
    yield from ["system\nuser\nassistant\n<0 seconds>"] * scenes
    for _ in range(scenes):
        scene, other = random_scene(rng, split="train"), random_scene(rng, split="train")
        yield from _strings(image_questions(scene, rng))
        yield from _strings(pair_questions(scene, other, rng))
        yield from _strings(clip_questions(random_clip(rng, split="train"), rng))
        for task in TEXT_TASKS:
            yield from text_pair(rng, task)
        yield filler(rng, 3)
        yield rng.choice(SYSTEM_PROMPTS)
    yield from (text[:3000] for _, text in sorted(topics.items()))


def _strings(questions: dict[str, list[tuple[str, str]]]) -> Iterator[str]:
    """Yield all questions and all answers."""
    return (text for pairs in questions.values() for pair in pairs for text in pair)


def make_tokenizer() -> Tokenizer:
    """Train the BPE merges, then add Qwen's special tokens in Qwen's order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return tokenizer


CHAT_TEMPLATE = """\
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' or 'video' in part -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def write_tokenizer(folder: pathlib.Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "additional_special_tokens": list(SPECIAL),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
