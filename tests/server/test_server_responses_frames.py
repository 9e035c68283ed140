"""Tests the stream events of the Responses API. Their bytes depend only on the tokens, the id and the
envelope (the call's parameters), not on the process or on how many tokens arrive together. The events add up
to the non-streamed response.
"""

import json

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.errors import ErrorCode
from mmengine.request import SamplingParams
from mmengine.serve.chat.completion import AccumulatedChoice
from mmengine.serve.text.choice_deltas import ChoiceDeltas
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.server.chat.parsed_request import Envelope
from mmengine.server.chat.response_echo import ResponseEcho
from mmengine.server.chat.token_texts import TokenTexts
from mmengine.server.http.errors import ApiError, cancelled_error, deadline_error, shutdown_error
from mmengine.server.responses.frames import ResponsesFrames
from mmengine.server.responses.response import ResponseObject
from mmengine.structured_output.request.tool_calls import ToolCalls, tool_calls
from tests.serve.serve_fakes import ByteTokenizer
from tests.serve.test_serve_call_parser import TOOLS, calls, said, written
from tests.server.openai_answers import named_events
from tests.server.responses_answers import check_events

TOKENIZER = ByteTokenizer()
TEXTS = TokenTexts(TOKENIZER)
EITHER = ReasoningTokens(False, tuple(b"<think>"), tuple(b"</think>"))
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2, "image_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 1, "accepted_prediction_tokens": 0},
}
ASKED = ResponseEcho(instructions='Be b"rief.', metadata={"a": "é"}, input=msgspec.Raw(b'[{"id":"x"}]'))
ENVELOPE = Envelope("responses", 7, "m", "owner", responses=ASKED)
FORMS = {form: tool_calls(TOOLS, ToolCalls(form, ())) for form in ("json", "xml")}
thoughts = st.none() | st.text("ab é<", max_size=8)
quick = settings(max_examples=60, deadline=None)


@st.composite
def answers(draw):
    """Return a random model output, which may be truncated, and the format of its tool calls, or None."""
    form = draw(st.sampled_from([None, "json", "xml"]))
    thought = draw(thoughts)
    text = "" if thought is None else f"<think>{thought}</think>"
    if form is None:
        text += draw(st.text("ab é日<", max_size=16))
    else:
        written_calls = [written(form, *each) for each in draw(st.lists(calls, max_size=2))]
        text += draw(said) + "\n".join(each for each in written_calls if each is not None)
    data = text.encode()
    return (data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data), form


def news(data, form, cuts, logprobs, *, is_cut=False):
    """Yield (delta, finish reason, stop) for a choice whose tokens arrive in groups that end at `cuts`. Only
    the last tuple has a finish reason.
    """
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    grammar = FORMS[form] if form else None
    choice = ChoiceDeltas(TOKENIZER, SamplingParams(), EITHER, grammar)
    for start, end in zip(places, places[1:], strict=False):
        chunk = list(data[start:end])
        entries = [((token, -1.5), (token, -1.5), (0, float("-inf"))) for token in chunk]
        yield from ((delta, None, None) for delta in choice.push(chunk, entries if logprobs else None))
    yield choice.finish(), choice.end_reason("length" if is_cut else "stop"), None


def told(found, logprobs=False, after=-1, envelope=ENVELOPE):
    """Return the stream for these deltas, and the body of the non-streamed response."""
    texts = TEXTS if logprobs else None
    frames = ResponsesFrames("r", envelope, texts, after=after)
    whole, made = AccumulatedChoice(0), [frames.first(0)]
    for delta, reason, stop in found:
        whole.add(delta, reason, stop)
        made.append(frames.delta(0, delta) if reason is None else frames.finish(0, delta, reason, stop))
    made.append(frames.usage(USAGE))
    return b"".join(made), ResponsesFrames("r", envelope, texts).whole([whole], USAGE)


cuts_of = st.lists(st.integers(0, 300), max_size=8)


@quick
@given(answers(), cuts_of, st.booleans(), st.booleans())
def test_events_do_not_depend_on_token_batches(answer, cuts, logprobs, is_cut):
    data, form = answer
    at_once, whole = told(news(data, form, (), logprobs, is_cut=is_cut), logprobs)
    for pieces in (cuts, range(len(data))):
        assert told(news(data, form, pieces, logprobs, is_cut=is_cut), logprobs) == (at_once, whole)
    last = named_events(at_once.decode())[-1]
    assert last[0] == ("response.incomplete" if is_cut else "response.completed")
    assert at_once.endswith(b'"response":%b,"sequence_number":%d}\n\n' % (whole, last[1]["sequence_number"]))


@settings(max_examples=12, deadline=None)
@given(answers(), st.booleans(), st.booleans())
def test_events_add_up_and_are_openais(answer, logprobs, is_cut):
    stream, whole = told(news(*answer, (), logprobs, is_cut=is_cut), logprobs)
    assert check_events(stream.decode())[-1]["response"] == json.loads(whole)


@quick
@given(answers(), st.booleans(), st.data())
def test_a_client_may_continue_after_any_event(answer, logprobs, data):
    """Another process, which reads the envelope from the log, may continue the stream."""
    kept = msgspec.json.decode(msgspec.json.encode(ENVELOPE), type=Envelope)
    stream, _ = told(news(*answer, (), logprobs), logprobs)
    events = stream.split(b"\n\n")[:-1]
    after = data.draw(st.integers(-1, len(events)))
    cuts = data.draw(cuts_of)
    rest, _ = told(news(*answer, cuts, logprobs), logprobs, after, kept)
    assert rest.split(b"\n\n")[:-1] == events[after + 1 :]


def test_reasoning_a_text_and_calls_are_items_of_their_own():
    call = written("json", "say", {"text": "é"})
    stream, whole = told(news(f"<think>hm</think>So.\n{call}\n{call}".encode(), "json", (), True), True)
    output = json.loads(whole)["output"]
    assert [(item["type"], item["id"]) for item in output] == [
        ("reasoning", "rs_r_0"),
        ("message", "msg_r_1"),
        ("function_call", "fc_r_2"),
        ("function_call", "fc_r_3"),
    ]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}] and output[0]["summary"] == []
    text = output[1]["content"][0]
    assert text["text"] == "So." and [each["token"] for each in text["logprobs"]][-3:] == list("So.")
    assert {json.loads(item["arguments"])["text"] for item in output[2:]} == {"é"}
    assert output[2]["call_id"] != output[3]["call_id"]
    names = [name for name, _ in named_events(stream.decode())]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names.count("response.output_text.delta") == 3
    assert [names.count(f"response.{each}.done") for each in ("output_item", "content_part")] == [4, 2]


def test_each_token_that_yields_text_has_its_event_with_the_bytes_of_all():
    """A delta's logprobs include each token whose bytes form the delta's text."""
    stream, _ = told(news("é!".encode(), None, (), True), True)
    deltas = [event for name, event in named_events(stream.decode()) if name.endswith("text.delta")]
    assert [(each["delta"], len(each["logprobs"])) for each in deltas] == [("é", 2), ("!", 1)]
    first = deltas[0]["logprobs"][0]
    assert first["bytes"] == ["é".encode()[0]] and first["logprob"] == -1.5
    assert [each["logprob"] for each in first["top_logprobs"]] == [-1.5, -9999.0]


def test_an_empty_answer_has_an_empty_text():
    stream, whole = told(news(b"", None, (), False))
    (item,) = json.loads(whole)["output"]
    assert item["status"] == "completed" and item["content"][0]["text"] == ""
    check_events(stream.decode())


def test_a_cut_answer_is_incomplete():
    for data, form, kind in (
        (b"<think>h", None, "reasoning"),
        (b"hel", None, "message"),
        (b'<tool_call>\n{"name": "say", "arguments": {"te', "json", "function_call"),
    ):
        stream, whole = told(news(data, form, (), False, is_cut=True))
        body = json.loads(whole)
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [(item["type"], item["status"]) for item in body["output"]] == [(kind, "incomplete")]
        check_events(stream.decode())


def test_a_background_response_is_queued_first():
    asked = msgspec.structs.replace(ASKED, background=True)
    stream, _ = told(news(b"a", None, (), False), envelope=msgspec.structs.replace(ENVELOPE, responses=asked))
    events = check_events(stream.decode())
    assert [event["type"] for event in events[:3]] == [
        f"response.{x}" for x in ("created", "queued", "in_progress")
    ]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]


def test_a_failed_request_ends_as_failed():
    frames = ResponsesFrames("r", ENVELOPE, None)
    stream = frames.first(0) + b"".join(
        frames.delta(0, delta) for delta, reason, _ in news(b"ab", None, (), False) if reason is None
    )
    stream += frames.error(deadline_error())
    last = check_events(stream.decode())[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
    assert "deadline" in last["response"]["error"]["message"] and last["response"]["output"] == []


def test_a_cancelled_request_ends_as_failed():
    frames = ResponsesFrames("r", ENVELOPE, None)
    last = check_events((frames.first(0) + frames.error(cancelled_error())).decode())[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")


def test_a_shutdown_error_repeats_the_last_number():
    """The error has the same number as the last event, so a client that continues from there misses no
    event.
    """
    stream, _ = told(news(b"abc", None, (), False))
    frames = ResponsesFrames("r", ENVELOPE, None)
    deltas = [delta for delta, _, _ in news(b"abc", None, (), False)]
    begun = frames.first(0) + frames.delta(0, deltas[0])
    (*_, (name, event)) = named_events((begun + frames.error(shutdown_error(9))).decode())
    assert name == "error" and event["error"]["code"] == event["code"] == "shutting_down"
    rest, _ = told(news(b"abc", None, (), False), after=event["sequence_number"])
    assert begun + rest == stream


def test_a_response_without_tokens_has_its_status():
    response = ResponseObject("r", ENVELOPE)
    for status in ("queued", "in_progress", "cancelled"):
        body = json.loads(response.of(status))
        assert (body["status"], body["output"], body["usage"]) == (status, [], None)
        assert (body["id"], body["created_at"], body["model"]) == ("resp_r", 7, "m")
        assert body["metadata"] == {"a": "é"} and body["instructions"] == 'Be b"rief.'
    for error, code in (
        (ApiError(ErrorCode.INVALID_MEDIA, "a"), "invalid_image"),
        (ApiError(ErrorCode.INVALID_VALUE, "a"), "invalid_prompt"),
        (ApiError(ErrorCode.QUEUE_FULL, "a"), "rate_limit_exceeded"),
        (ApiError(ErrorCode.REQUEST_FAILED, "a"), "server_error"),
    ):
        assert json.loads(response.failed(error))["error"] == {"code": code, "message": "a"}
