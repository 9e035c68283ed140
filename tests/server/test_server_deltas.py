"""Tests that stream frames depend only on the tokens, not on how many tokens arrive at once."""

import json

from hypothesis import given
from hypothesis import strategies as st

from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.text.choice_deltas import ChoiceDeltas
from mmengine.serve.text.detokenizer import Stops
from mmengine.serve.text.reasoning import NO_REASONING, ReasoningTokens
from mmengine.server.chat.chat_frames import ChatFrames
from mmengine.server.chat.completion_frames import CompletionFrames
from mmengine.server.chat.parsed_request import Envelope
from mmengine.server.chat.token_texts import TokenTexts
from tests.serve.serve_fakes import ByteTokenizer

TOKENIZER = ByteTokenizer()
FORM = GrammarRequest("json_schema", "{}")
TEXTS = TokenTexts(TOKENIZER)
END = ReasoningTokens(True, (), tuple(b"</t>"))
EITHER = ReasoningTokens(False, tuple(b"<t>"), tuple(b"</t>"))


def chunks(data, cuts):
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in zip(places, places[1:], strict=False)]


def told(
    data,
    cuts=(),
    *,
    reasoning=NO_REASONING,
    stop=(),
    grammar=None,
    logprobs=True,
    detail="eos",
    frames=ChatFrames,
):
    sampling = SamplingParams(stop=tuple(stop))
    choice = ChoiceDeltas(TOKENIZER, sampling, reasoning, grammar)
    made = frames("r", Envelope("chat", 7, "m"), TEXTS if logprobs else None, "none")
    out = [made.first(3)]
    for chunk in chunks(list(data), cuts):
        entries = [((token, -1.5), (token, -1.5), (0, float("-inf"))) for token in chunk]
        out += [made.delta(3, delta) for delta in choice.push(chunk, entries if logprobs else None)]
    reason = "length" if detail == "cut" else "stop"
    out.append(made.finish(3, choice.finish(), choice.end_reason(reason), choice.stop_reason(detail)))
    return b"".join(out), choice


def events(data):
    return [json.loads(each.removeprefix(b"data: ")) for each in data.split(b"\n\n") if each]


def text_of(data, name="content"):
    return "".join(event["choices"][0]["delta"].get(name, "") for event in events(data))


@given(
    st.text(max_size=40),
    st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from([NO_REASONING, END, EITHER]),
)
def test_frames_do_not_depend_on_token_batches(text, cuts, reasoning):
    data = text.encode()
    assert told(data, cuts, reasoning=reasoning)[0] == told(data, reasoning=reasoning)[0]


@given(st.text(alphabet="ab</t>é", max_size=30), st.text(alphabet="ab</t>", max_size=30))
def test_reasoning_and_content_are_apart(before, behind):
    data = (before + "</t>" + behind).encode()
    found, _ = told(data, reasoning=END)
    reasoning, _, content = data.decode().partition("</t>")
    assert (text_of(found, "reasoning_content"), text_of(found)) == (reasoning, content)
    found, choice = told(b"<t>" + data, reasoning=EITHER)
    assert (text_of(found, "reasoning_content"), text_of(found)) == (reasoning, content)
    assert choice.num_reasoning_tokens == len(("<t>" + reasoning + "</t").encode())
    found, choice = told(b"x" + data, reasoning=EITHER)
    assert (text_of(found, "reasoning_content"), text_of(found)) == ("", "x" + data.decode())


def test_a_delta_for_each_token_that_yields_text_with_the_bytes_of_all():
    # Tokens are bytes here. A delta has a whole character, and the logprobs of all the character's tokens.
    found = events(told("é€!".encode())[0])
    assert [each["choices"][0]["delta"].get("content") for each in found] == ["", "é", "€", "!", None]
    said = [each["choices"][0]["logprobs"] for each in found]
    assert [len(each["content"]) if each else None for each in said] == [None, 2, 3, 1, None]
    first = said[1]["content"][0]
    assert first["bytes"] == ["é".encode()[0]] and first["token"] == "�" and first["logprob"] == -1.5
    assert first["top_logprobs"][1]["logprob"] == -9999.0  # JSON has no infinity.
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    assert {each["created"] for each in found} == {7} and {each["id"] for each in found} == {"chatcmpl-r"}


def test_a_cut_character_comes_at_the_end():
    assert text_of(told("a€".encode()[:-1], (1, 2))[0]) == "a�"


@given(st.lists(st.integers(0, 60), max_size=6))
def test_a_stop_string_beside_a_form_cuts_it_and_says_so(cuts):
    found, choice = told(b'{"a": "STOP', cuts, stop=("STOP",), grammar=FORM, detail="cut")
    assert text_of(found) == '{"a": "' and choice.stopped and choice.num_tokens == 11
    end = events(found)[-1]["choices"][0]
    assert (end["finish_reason"], end["stop_reason"]) == ("length", "STOP")


@given(st.lists(st.integers(0, 60), max_size=6))
def test_a_completion_follows_text_cut_by_a_stop_string(cuts):
    """With on_truncation "close", the text before a stop string is followed by its completion."""
    form = GrammarRequest("json_schema", "{}", on_truncation="close")
    for cut in ('{"a": "STOP', '{"a": "STO', '{"a": "x'):
        found, choice = told(cut.encode() + b'"}', cuts, stop=("STOP",), grammar=form, detail="closed")
        text = cut.removesuffix("STOP") + '"}'
        end = events(found)[-1]["choices"][0]
        is_cut = cut.endswith("STOP")
        assert (text_of(found), end["finish_reason"]) == (text, "stop")
        assert choice.stopped == is_cut and end["stop_reason"] == ("STOP" if is_cut else None)
        stops = Stops(("STOP",), closes=True)
        assert stops.text(TOKENIZER, list(cut.encode() + b'"}')) == text


def test_a_stop_string_is_named_and_never_shown():
    found, _ = told(b"abSTOP", stop=("STOP", "zz"), detail="string")
    assert text_of(found) == "ab" and events(found)[-1]["choices"][0]["stop_reason"] == "STOP"
    assert events(told(b"ab", detail="token")[0])[-1]["choices"][0]["stop_reason"] == ord("b")


def test_stop_strings_ignore_reasoning():
    found, _ = told(b"a STOP b</t>{} STOP", reasoning=END, stop=("STOP",), grammar=FORM)
    assert text_of(found, "reasoning_content") == "a STOP b" and text_of(found) == "{} "


def test_completions_count_offsets_over_frames():
    found = events(told("aé!".encode(), frames=CompletionFrames)[0])
    said = [each["choices"][0] for each in found]
    assert [each["text"] for each in said] == ["a", "é", "!", ""]
    assert [each["logprobs"] and each["logprobs"]["text_offset"] for each in said] == [[0], [1, 1], [2], None]
