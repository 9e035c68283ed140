"""Tests that `repetition_detection` ends answers in all three APIs of the server."""

import httpx2 as httpx
import pytest

from mmengine import AsyncEngine
from tests.server.own_answers import check_own
from tests.server.running import served

pytest.importorskip("mmengine_shapes")

DETECTION = {"max_pattern_size": 4, "min_count": 3}
SAYS = [{"role": "user", "content": "Say it."}]


@pytest.fixture(scope="module")
def ask():
    """Return a function that sends a body to a path and returns the JSON of the response."""
    engine = AsyncEngine()
    letter = engine.processor.tokenizer.encode("a")
    with served(engine, names=("shapes",)) as server:
        address = f"http://127.0.0.1:{server.port}"

        def send(path, **body):
            body |= {"model": "shapes", "logit_bias": {str(token): 90 for token in letter}}
            answer = httpx.post(address + path, json=body, timeout=60)
            check_own(path, "POST", answer.status_code, answer.headers, answer.json())
            return answer.json()

        yield send


def test_every_api_says_that_the_answer_repeats(ask):
    chat = ask("/v1/chat/completions", messages=SAYS, max_tokens=40, repetition_detection=DETECTION)
    (choice,) = chat["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert choice["message"]["content"] == "aaa" and chat["usage"]["completion_tokens"] == 3
    response = ask("/v1/responses", input="Say it.", max_output_tokens=40, repetition_detection=DETECTION)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "repetition"})
    message = ask("/v1/messages", messages=SAYS, max_tokens=40, repetition_detection=DETECTION)
    assert (message["stop_reason"], message["content"][0]["text"]) == ("max_tokens", "aaa")


def test_wrong_fields_are_named(ask):
    for detection, name in (
        ({"max_pattern_size": 4, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 4, "min_count": 3, "often": 1}, "often"),
        ({"max_pattern_size": "4"}, "max_pattern_size"),
    ):
        error = ask("/v1/chat/completions", messages=SAYS, repetition_detection=detection)["error"]
        assert error["param"].startswith("repetition_detection") and name in error["message"] + error["param"]
