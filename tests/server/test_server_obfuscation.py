"""Tests stream_options.include_obfuscation, which pads events with choices or deltas to multiples of 64
bytes.
"""

import json

import pytest

from mmengine.server.chat.obfuscation import STEP, obfuscate
from tests.server.openai_answers import events_of, named_events
from tests.server.running import served

ON = {"include_obfuscation": True}
TEXT = 'a "text" of which the answer has\nall letters, é and 日'


@pytest.fixture(scope="module")
def server():
    with served() as one:
        yield one


def sizes(text):
    return [len(each.encode()) + 2 for each in text.split("\n\n") if "obfuscation" in each]


def plain(events):
    """Return the events without `obfuscation` and without the fields that differ between calls."""
    dropped = ("obfuscation", "id", "created")
    return [{name: each[name] for name in each if name not in dropped} for each in events]


@pytest.mark.parametrize("usage", [{}, {"include_usage": True}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_events_of_choices_have_even_sizes(server, path, usage):
    chat = {"messages": [{"role": "user", "content": TEXT}]} if "chat" in path else {"prompt": TEXT}
    body = {**chat, "stream": True, "max_tokens": 60, "n": 2}
    found = {}
    for name, options in (("on", {**ON, **usage}), ("off", usage)):
        status, _, text = server.call(path, {**body, "stream_options": options} if options else body)
        assert status == 200, text
        found[name] = text
    events = [json.loads(each) for each in events_of(found["on"]) if each != "[DONE]"]
    padded = [each for each in events if each["choices"]]
    assert len(padded) > 20 and all(isinstance(each["obfuscation"], str) for each in padded)
    assert all(size % STEP == 0 for size in sizes(found["on"])) and len(sizes(found["on"])) == len(padded)
    assert "obfuscation" not in found["off"]
    other = [json.loads(each) for each in events_of(found["off"]) if each != "[DONE]"]
    text_of = [sorted(map(json.dumps, plain(each))) for each in (events, other)]
    assert text_of[0] == text_of[1]


def test_deltas_of_a_response_have_even_sizes(server):
    found = {}
    for name, options in (("on", ON), ("off", None)):
        status, _, text = server.respond(TEXT, stream=True, stream_options=options)
        assert status == 200, text
        found[name] = text
    events = [data for _, data in named_events(found["on"])]
    padded = [each for each in events if "obfuscation" in each]
    assert padded == [each for each in events if each["type"].endswith(".delta")] != []
    assert all(size % STEP == 0 for size in sizes(found["on"]))
    said = {name: [d["delta"] for _, d in named_events(t) if "delta" in d] for name, t in found.items()}
    assert said["on"] == said["off"] and "obfuscation" not in found["off"]


def test_a_repeated_stream_has_the_same_bytes(tmp_path):
    headers = {"Idempotency-Key": "k"}
    with served(engine_options={"log": tmp_path / "log"}) as server:
        body = {"messages": [{"role": "user", "content": TEXT}], "stream": True, "stream_options": ON}
        first, again = (server.call("/v1/chat/completions", body, headers) for _ in range(2))
        assert first[2] == again[2] and "obfuscation" in first[2]


def test_sizes_do_not_say_the_length_of_a_text():
    made = [obfuscate(b'data: {"a":"%b"}\n\n' % (b"x" * n)) for n in range(200)]
    assert len({len(each) for each in made}) == 4 and all(len(each) % STEP == 0 for each in made)
    assert all(json.loads(each[6:])["a"] == "x" * n for n, each in enumerate(made))


def test_it_requires_a_stream(server):
    for status, _, answer in (
        server.chat("hi", stream_options=ON),
        server.respond("hi", stream_options=ON),
    ):
        assert (status, answer["error"]["param"]) == (400, "stream_options")
