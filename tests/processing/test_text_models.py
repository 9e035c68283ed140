"""Tests text-only models: refused media, chat templates that expect string contents, and tokenizers from data
or files.
"""

import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mmengine.errors import InvalidMedia, InvalidRequest, ModelError
from mmengine.models.plugin import MediaSource
from mmengine.processing.chat.template import NO_TEMPLATE, ChatTemplate
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.description import Description
from mmengine.processing.processor import ChatProcessor
from mmengine.request import MediaItem

SPECIALS = ["<|begin|>", "<|start|>", "<|end|>"]
NAMES = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
# Like many text models' templates, this one expects each content to be a string.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + "
    "message['content'] | trim + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
PRINTS = TEMPLATE.replace("message['content'] | trim", "(message['content'] | string)")
DROPS = TEMPLATE.replace(
    "message['content'] | trim", "(message.content if message.content is string else '')"
)
TEXTS = ["the cat sat on the mat", "what is the time, the end", "start and begin", "über 12 Köche"] * 3


def trained(texts=TEXTS):
    """Return a byte-level BPE tokenizer that puts a BOS token before a text. The tokenizer's special tokens
    are also in the ordinary vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    return tokenizer


def made(tokenizer):
    """Build the tokenizer as a plugin does for a model without a tokenizer file."""
    return ChatTokenizer(json.loads(tokenizer.to_str()), "model.gguf")


@pytest.fixture(scope="module")
def reference():
    return PreTrainedTokenizerFast(tokenizer_object=trained(), chat_template=TEMPLATE, **NAMES)


@pytest.fixture(scope="module")
def tokenizer():
    return made(trained())


def processor_of(tokenizer, source=TEMPLATE, **fields):
    template = ChatTemplate.of_source(source, NAMES, tokenizer, "in model.gguf")
    end = tokenizer.special["<|end|>"]
    described = {"version": "1", "max_positions": 4000, "generation": {}, "eos_token_ids": (end,)}
    return ChatProcessor(Description(tokenizer=tokenizer, template=template, **{**described, **fields}))


@pytest.fixture(scope="module")
def processor(tokenizer):
    return processor_of(tokenizer)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
pieces = st.lists(st.one_of(st.sampled_from(["the cat", " sat\n", "<|", "|>", *SPECIALS]), text), max_size=6)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(texts=st.lists(pieces.map("".join), min_size=1, max_size=3), generate=st.booleans())
def test_chats_equal_transformers(processor, reference, texts, generate):
    messages = [{"role": "user", "content": content} for content in texts]
    told = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    prepared = processor.prepare(messages, add_generation_prompt=generate)
    assert prepared.text == told and prepared.media == ()
    if not any(special in content for special in SPECIALS for content in texts):
        assert prepared.prompt_token_ids.tolist() == reference(told, add_special_tokens=False).input_ids


@quick
@given(content=pieces.map("".join))
def test_no_text_becomes_a_special_token_that_is_in_the_vocabulary(processor, content):
    ids = processor.prepare([{"role": "user", "content": content}]).prompt_token_ids.tolist()
    names = processor.tokenizer.special
    special = [token for token in ids if token in processor.tokenizer.special_ids]
    assert special == [names[name] for name in ("<|begin|>", "<|start|>", "<|end|>", "<|start|>")]


@quick
@given(prompt=pieces.map("".join))
def test_plain_texts_equal_transformers(processor, reference, prompt):
    """A plain prompt gets the tokenizer's prefix token (BOS), as in transformers."""
    assert processor.prepare_text(prompt).prompt_token_ids.tolist() == reference(prompt).input_ids


@pytest.mark.parametrize("source", [TEMPLATE, PRINTS, DROPS])
def test_parts_of_text_are_one_text_for_a_template_that_knows_of_none(tokenizer, source):
    processor = processor_of(tokenizer, source)
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the time?"}]
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    joined = [asked[0], {"role": "user", "content": "What is\nthe time?"}]
    told = processor.prepare(asked)
    assert told.text == processor.prepare(joined).text and "What is\nthe time?<|end|>" in told.text
    continued = processor.prepare(asked, continue_final_message=True).text
    assert continued.endswith("the time?")


def test_parts_are_left_to_a_template_that_reads_them(tokenizer):
    source = (
        "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}{{ eos_token }}"
    )
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    told = processor_of(tokenizer, source).prepare([{"role": "user", "content": content}])
    assert told.text == "(a)(b)<|end|>"


@pytest.mark.parametrize(
    ("content", "beside", "words"),
    [
        (
            [{"type": "image", "image": b""}],
            {},
            r"image 0 \(message 0, part 0\) is not supported: .*no images",
        ),
        ([{"type": "video"}], {"videos": ["a.mp4"]}, r"video 0 \(message 0, part 0\) is not supported"),
        (
            "What is it?",
            {"images": [Image.new("RGB", (4, 4))]},
            "image 0 is not supported: .* accepts text, no",
        ),
        ("What is it?", {"videos": [np.zeros((2, 4, 4, 3), np.uint8)]}, "video 0 is not supported"),
    ],
)
def test_media_are_refused(processor, content, beside, words):
    with pytest.raises(InvalidRequest, match=words):
        processor.prepare([{"role": "user", "content": content}], **beside)
    if beside:
        with pytest.raises(InvalidRequest, match="is not supported: this model accepts text"):
            processor.prepare_text("What is it?", **beside)


def test_a_text_model_has_no_media(processor):
    assert processor.media_cache is None and processor.decoder_recipe is None
    assert processor.max_image_pixels == processor.count_images("<|start|>") == 0
    processor.media_decoder = lambda media: None
    assert processor.media_decoder is None
    with pytest.raises(InvalidMedia, match="accepts only text"):
        processor.restore(MediaItem(b"1" * 32, "image", ((0, 1),), (1, 2, 2)), MediaSource(b"", {}))


def test_a_long_prompt_is_refused_as_any_other(processor):
    with pytest.raises(InvalidRequest, match="tokens > 4000 maximum of the model: shorten it$"):
        processor.prepare([{"role": "user", "content": "mat " * 5000}])


def test_end_of_answer_tokens(tokenizer):
    assert processor_of(tokenizer).eos_token_ids == (tokenizer.special["<|end|>"],)
    assert processor_of(tokenizer, generation={"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)
    for nothing in ((), (10**6,)):
        with pytest.raises(ModelError, match="must name known token ids"):
            processor_of(tokenizer, eos_token_ids=nothing)


def test_fingerprints_tell_versions_templates_and_tokenizers_apart(tokenizer):
    other = made(trained(TEXTS[:1] * 3))
    told_apart = [(tokenizer, "1", TEMPLATE), (tokenizer, "2", TEMPLATE), (other, "1", TEMPLATE)]
    told_apart.append((tokenizer, "1", TEMPLATE + " "))
    prints = [processor_of(*each[::2], version=each[1]).fingerprint for each in told_apart]
    assert len(set(prints)) == 4
    assert processor_of(tokenizer).fingerprint == prints[0]


def test_a_tokenizer_from_data_equals_the_one_from_its_file(tokenizer, tmp_path):
    trained().save(str(tmp_path / "tokenizer.json"))
    stored = ChatTokenizer.of_folder(tmp_path)
    assert stored.special == tokenizer.special and stored.digest == tokenizer.digest
    assert stored.text_prefix == tokenizer.text_prefix == (tokenizer.special["<|begin|>"],)
    assert tokenizer.vocab_size == len(tokenizer.token_bytes()) == len(tokenizer.text_bytes)


def refused(tokenizer):
    with pytest.raises(ModelError, match="model.gguf: a special token is also an ordinary one"):
        made(tokenizer)


def test_text_must_not_reach_a_special_token_in_the_vocabulary():
    for reached in ("the", "!"):  # A merge gives "the"; "!" is a single byte.
        tokenizer = trained()
        tokenizer.add_special_tokens([reached])
        refused(tokenizer)
    whole = trained()
    whole.model.ignore_merges = True  # A text in the vocabulary becomes its token directly.
    refused(whole)
    unknown = trained()
    unknown.model.unk_token = "<|end|>"
    made(unknown)  # Each byte has a token, so no text is unknown.
    unknown.decoder = decoders.Fuse()
    refused(unknown)
    unknown.model.byte_fallback = True  # The vocabulary has no tokens for byte fallback.
    refused(unknown)


def test_a_model_that_was_not_made_to_chat(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    tokenizer = ChatTokenizer.of_folder(tmp_path)
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate.of_folder(tmp_path, tokenizer)
    template = ChatTemplate.of_folder(tmp_path, tokenizer, optional=True)
    eos = (tokenizer.special["<|im_end|>"],)
    processor = ChatProcessor(Description("1", tokenizer, template, 100, {}, eos))
    assert template.source == NO_TEMPLATE and processor.call_format() is None
    question = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidRequest, match="it has none; set chat_template, or send a prompt"):
        processor.prepare(question)
    given = {"chat_template": "{{ messages[0].content }}<|im_end|>"}
    assert processor.prepare(question, template_options=given).text == "a<|im_end|>"
    assert processor.prepare_text("a").prompt_token_ids.tolist() == tokenizer.encode("a")
