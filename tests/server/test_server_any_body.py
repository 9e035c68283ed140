"""Property tests: no random body gets status 500, and each answer and error matches its schema."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmengine import AsyncEngine
from mmengine.server.chat.field_tables import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from mmengine.server.responses.field_table import RESPONSES
from tests.server.running import served

WORDS = st.text(max_size=6) | st.sampled_from(
    ["user", "text", "data:,", "json_object", "object", "\ud800", "a" * 500]
)
NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-3, 3) | st.floats(width=32) | st.just(1e308)
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS
NAMES = WORDS | st.sampled_from(
    ["type", "role", "content", "text", "url", "image_url", "schema", "json_schema", "json", "regex", "name"]
)
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
FORMS = st.fixed_dictionaries(
    {"type": st.sampled_from(["json_schema", "json_object", "structural_tag", "text", "grammar"])},
    optional={"json_schema": ANY, "schema": ANY, "structural_tag": ANY, "on_truncation": ANY, "bounds": ANY},
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "video_url", "image", "refusal"])},
    optional={"text": WORDS, "image_url": ANY, "image": ANY, "max_pixels": NUMBERS, "video_url": ANY},
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | WORDS},
        optional={"content": WORDS | st.lists(PARTS, max_size=2) | ANY, "tool_calls": ANY, "name": ANY},
    ),
    min_size=1,
    max_size=3,
)
GOOD = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def bodies(table, begins):
    """Return a strategy for bodies with the fields in `begins` and up to two more fields. Names may be
    unknown, and values invalid.
    """
    names = st.sampled_from([field.name for field in table if field.name not in begins] + ["zzz"])
    values = LEAVES | ANY | FORMS
    return st.tuples(begins_with(begins), st.dictionaries(names, values, max_size=2)).map(
        lambda both: {**both[0], **both[1]}
    )


def begins_with(begins):
    return st.fixed_dictionaries({name: st.just(value) | ANY for name, value in begins.items()})


CHAT_BODIES = bodies(CHAT, GOOD) | MESSAGES.map(lambda found: {"messages": found, "max_tokens": 8})
TEXT_BODIES = bodies(COMPLETION, {"prompt": "hi", "max_tokens": 8})
ITEM_KINDS = ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
ITEM_PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "input_image", "input_video", "output_text", "reasoning_text"])},
    optional={
        "text": WORDS,
        "image_url": WORDS | ANY,
        "video_url": ANY,
        "detail": WORDS,
        "max_pixels": NUMBERS,
    },
)
CONTENTS = WORDS | st.lists(ITEM_PARTS, max_size=2) | ANY
ITEMS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(ITEM_KINDS) | WORDS,
            "role": st.sampled_from(["user", "assistant", "system"]),
        },
        optional={
            **dict.fromkeys(("content", "output", "summary"), CONTENTS),
            **dict.fromkeys(("id", "call_id", "name", "status"), WORDS | ANY),
            "arguments": st.sampled_from(["", "{}", '{"a": 1}']) | ANY,
        },
    ),
    min_size=1,
    max_size=3,
)
RESPONSE_BODIES = bodies(RESPONSES, {"input": "hi", "max_output_tokens": 8}) | ITEMS.map(
    lambda found: {"input": found, "max_output_tokens": 8}
)
ROUTES = {
    "/v1/chat/completions": CHAT_BODIES,
    "/v1/completions": TEXT_BODIES,
    "/v1/responses": RESPONSE_BODIES,
    "/tokenize": bodies(TOKENIZE, {"prompt": "hi"})
    | bodies(TOKENIZE, {"messages": GOOD["messages"]})
    | MESSAGES.map(lambda found: {"messages": found}),
    "/detokenize": bodies(DETOKENIZE, {"tokens": [72, 105]}) | bodies(DETOKENIZE, {}),
}


@pytest.fixture(scope="module")
def server():
    # The model that the package contains. Its processor reads messages, media and templates.
    with served(AsyncEngine()) as one:
        yield one


def holds(server, path, body):
    """Send `body`, and check the status. `server.call` also checks the schema."""
    status, _, answer = server.call(path, json.dumps(body).encode())
    assert status in (200, 400, 404, 409, 504), (status, answer)
    if status != 200:
        assert answer["error"]["message"] and "Traceback" not in answer["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_any_body(server, path):
    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(ROUTES[path])
    def found(body):
        holds(server, path, body)

    found()


@pytest.mark.soak
@pytest.mark.parametrize("path", ROUTES)
def test_any_body_for_long(server, path):
    @settings(max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(ROUTES[path])
    def found(body):
        holds(server, path, body)

    found()
