"""Tests special tokens that a chat template builds around a message's role, as in Phi-4 and EXAONE."""

import json

import pytest

from mmengine.errors import InvalidRequest, ModelError
from mmengine.processing.chat.session_turn import render_turn
from mmengine.processing.chat.template import ChatTemplate
from mmengine.processing.chat.tokens import ChatTokenizer

TOKENS = ("<|user|>", "<|assistant|>", "<|critic|>", "<|end|>")
LOOP = "{%% for m in messages %%}%s{{ m.content }}<|end|>{%% endfor %%}"
HEADERS = {
    "+": "{{ '<|' + m['role'] + '|>' }}",
    "text around an output": "<|{{ m.role }}|>",
    "~": "{{ '<|' ~ m.role ~ '|>' }}",
    "%": "{{ '<|%s|>' % m.role }}",
    "format": "{{ '<|{}|>'.format(m.role) }}",
    "join": "{{ ['<|', m.role, '|>'] | join }}",
    "set": "{% set header = '<|' + m.role %}{{ header + '|>' }}",
}


@pytest.fixture(scope="module")
def tokenizer(folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    first = max(data["model"]["vocab"].values(), default=0)
    first = 1 + max([first, *(token["id"] for token in data["added_tokens"])])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] += [{"id": first + i, "content": token, **plain} for i, token in enumerate(TOKENS)]
    return ChatTokenizer(data, "test")


def prompt(tokenizer, header, messages):
    """Return a prompt's pieces (texts and special token ids), and the text that transformers would render."""
    template = ChatTemplate.of_source(LOOP % header, {}, tokenizer, "of the test")
    rendered = template.render(messages, add_generation_prompt=False, continue_final_message=False)
    return template.split(rendered), template.readable(rendered)


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_the_tokens_are_special(tokenizer, header):
    user, assistant, _, end = (tokenizer.special[token] for token in TOKENS)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pieces, text = prompt(tokenizer, header, messages)
    assert pieces == [user, "a", end, assistant, "b", end]
    assert text == "<|user|>a<|end|><|assistant|>b<|end|>"


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_content_and_unknown_roles_stay_text(tokenizer, header):
    user, _, _, end = (tokenizer.special[token] for token in TOKENS)
    content = "<|assistant|> <|user|><|"
    messages = [{"role": "user", "content": content}, {"role": "critic", "content": "c"}]
    pieces, _ = prompt(tokenizer, header, messages)
    assert pieces == [user, content, end, "<|critic|>c", end]


def test_roles_compare_and_serialise_as_text(tokenizer):
    header = (
        "{% if m.role == 'user' and m.role in ['user'] %}{{ '<|' + m.role + '|>' }}{% endif %}"
        "{{ m.role | upper }} {{ m | tojson }} {{ {'user': 1}[m.role] }}"
    )
    pieces, _ = prompt(tokenizer, header, [{"role": "user", "content": "a"}])
    assert pieces[0] == tokenizer.special["<|user|>"]
    assert pieces[1] == 'USER {"role": "user", "content": "a"} 1a'


def test_other_pieces_are_refused_with_advice(tokenizer):
    with pytest.raises(ModelError, match=r"only a message's role may be inserted"):
        prompt(tokenizer, "{{ '<|' + m.role | lower + '|>' }}", [])
    template = ChatTemplate.of_source(LOOP % HEADERS["+"], {}, tokenizer, "of the test")
    with pytest.raises(InvalidRequest, match="chat_template holds an unpaired surrogate at character 0"):
        template.with_source("\ud801user\ud802")


@pytest.mark.parametrize("opens", ["first", "next", ""])
def test_sessions_render_their_turns(tokenizer, opens):
    """Surrogates that mark roles do not disturb surrogates that mark pieces of a turn
    (mmengine/processing/chat/marks.py).
    """
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    source = (LOOP % HEADERS["+"]).replace("{{ m.content }}", parts)
    template = ChatTemplate.of_source(source, {}, tokenizer, "of the test")
    turn = render_turn(
        template, [{"type": "text", "text": "a"}], system="", opens=opens, closes=False, variables={}
    )
    user, *_, end = (tokenizer.special[token] for token in TOKENS)
    assert template.split(turn.text) == {"first": [user, "a"], "next": [end, user, "a"], "": ["a"]}[opens]
