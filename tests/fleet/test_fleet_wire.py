"""Tests the messages between an ingress and a replica, and how a routing key chooses a replica."""

import msgspec
import numpy as np
import pytest

from mmengine.core.executor import PromptLogprobs
from mmengine.errors import ExecutorFailed, InvalidMedia, InvalidRequest, QueueFull, RequestFailed
from mmengine.fleet import wire
from mmengine.fleet.routing import Ring, affinity
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.tools import ToolCallSpec, parse_tools
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.serve.text.request_output import RequestOutput
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused
from mmengine.token_confidence import TokenConfidence

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def image(data, text="What is it?"):
    return Prompt([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data}}, text]}])


def test_a_request_is_unchanged_on_the_wire():
    messages = [
        {"role": "user", "content": [{"type": "image", "image": b"\x89PNG"}, {"type": "text", "text": "é"}]}
    ]
    prompt = Prompt(messages, media_options={"local_files": False}, template_options={"tools": [TOOL]})
    sampling = SamplingParams(seed=2**63 - 1, logit_bias={5: -1.5}, stop=("a",), bad_words_ids=((1, 2),))
    options = {
        "cache_salt": "s",
        "deadline_s": 2.5,
        "envelope": b"\0",
        "response_format": {"type": "json_object"},
    }
    calls = ToolCallSpec(parse_tools([TOOL]), "json", ("<think>", "</think>"))
    outputs = np.array([0, 2**31 - 1], np.int32).tobytes()
    ask = wire.ReplicaRequest(
        "r", wire.wire_prompt(prompt), sampling, options, calls, outputs, 3, ("b",), "j"
    )
    found = wire.decode_request(wire.encode(ask))
    assert found == ask
    assert wire.prompt_from_wire(found.prompt).messages == messages
    given = wire.submit_options(found)
    assert given["outputs"] == [0, 2**31 - 1] and given["calls"] == calls and given["envelope"] == b"\0"


def test_messages_are_unchanged_on_the_wire():
    scores = PromptLogprobs(0, np.arange(6, dtype=np.int32).reshape(3, 2), np.ones((3, 2), np.float32))
    output = RequestOutput(
        "r", 1, "", [7, 8], "stop", None, (9,), [((7, -0.5),), ((8, -1.0),)], "eos", scores
    )
    confidences = [TokenConfidence(-0.5, 0.25, ((7, -0.5), (9, -1.5))), TokenConfidence(0.0, 0.0)]
    output = msgspec.structs.replace(output, confidences=confidences)
    ended = wire.AnswerEnd(np.array([1, 2], np.int32).tobytes(), 16, 4, 2)
    grammar = GrammarRequest("json", "{}", (3,), "close")
    for told in (
        wire.ReplicaName("a"),
        wire.Accepted(ReasoningTokens(True, (1,), (2,)), grammar, {"image": 4}, 10),
        wire.Outputs([wire.wire_output(output)], ended),
        wire.Heartbeat(),
        wire.Redirect("it drains"),
    ):
        assert wire.decode_message(wire.encode(told)) == told
    again = wire.wire_output(output).output("r")
    assert (again.prompt_scores.token_ids == scores.token_ids).all()
    names = ("index", "token_ids", "finish_reason", "after", "logprobs", "detail", "confidences")
    assert [getattr(again, name) for name in names] == [getattr(output, name) for name in names]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QueueFull("full"), QueueFull),
        (InvalidMedia("no image"), InvalidMedia),
        (SchemaRefused("enum", "#/a", "it is empty"), InvalidRequest),
        (RequestFailed("cut"), RequestFailed),
        (ExecutorFailed("gone"), ExecutorFailed),
    ],
)
def test_an_error_keeps_its_kind_and_words(error, kind):
    found = wire.decode_message(wire.encode(wire.Rejection.by(error))).error()
    assert type(found) is kind and str(found) == str(error)


def test_values_without_a_wire_form_are_refused():
    with pytest.raises(InvalidRequest, match="media of a fleet's requests must be bytes"):
        wire.wire_prompt(Prompt(text="<image>", images=[object()]))
    ask = wire.ReplicaRequest(
        "r", wire.wire_prompt(Prompt([{"role": "user", "content": object()}])), SamplingParams()
    )
    with pytest.raises(InvalidRequest, match="that cannot be encoded: object"):
        wire.encode(ask)
    for data in (b"", b"\x80", msgspec.msgpack.encode({"request_id": 1})):
        with pytest.raises(InvalidRequest, match="an invalid request"):
            wire.decode_request(data)
        with pytest.raises(RequestFailed, match="an unknown message"):
            wire.decode_message(data)


def test_requests_about_one_image_belong_together():
    keys = {affinity(image(b"picture", f"Question {n}?"), "salt") for n in range(16)}
    assert len(keys) == 1
    assert affinity(image("data:,x")) == affinity(image("data:,x", "Else?"))
    others = [
        affinity(image(b"picture"), "other salt"),
        affinity(image(b"picture"), "salt", "adapter"),
        affinity(image(b"another"), "salt"),
        affinity(Prompt(text="picture"), "salt"),
        affinity(Prompt(token_ids=[1, 2]), "salt"),
        affinity(Prompt(token_ids=[1, 3]), "salt"),
    ]
    assert len(keys.union(others)) == 7
    system = [{"role": "system", "content": "s" * 2000}]
    first, second = ([*system, {"role": "user", "content": each}] for each in "ab")
    assert affinity(Prompt(first)) == affinity(Prompt(second)), "what they begin with is the same"


def test_a_replica_that_leaves_moves_only_its_own_keys():
    keys = [str(n) for n in range(600)]
    before, after = Ring("abcd"), Ring("abd")
    moved = [key for key in keys if before.order(key)[0] != after.order(key)[0]]
    assert all(before.order(key)[0] == "c" for key in moved)
    assert all(before.order(key)[1] == after.order(key)[0] for key in moved)
    shares = [sum(before.order(key)[0] == name for key in keys) / len(keys) for name in "abcd"]
    assert all(0.1 < share < 0.45 for share in shares), shares
    assert sorted(before.order("x")) == list("abcd") and Ring(()).order("x") == []
