"""Tests that the status, code and param of a refused call depend on the error's code and path, and not on its
text.

`bad_calls.json` contains the expected status, code and param for each call in CALLS.
"""

import json
from pathlib import Path

import pytest

from mmengine.config import EngineConfig
from mmengine.errors import MMEngineError
from mmengine.server.http.errors import ApiError
from tests.server.bad_calls import CALLS
from tests.server.running import AsyncEngine, served

RECORDED = Path(__file__).with_name("bad_calls.json")
# An error text with phrases that must not influence the status, code and param.
GARBAGE = "the prompt has 9 tokens: message 7, part 3; schema, the grammar, no session, a request with the id"


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(config=EngineConfig(max_model_len=2048)), unsupported="strict") as one:
        yield one


def answers_of(server):
    found = []
    for path, body in CALLS:
        status, _, answer = server.call(path, body)
        error = (answer.get("error") or {}) if isinstance(answer, dict) else {}
        found.append([status, error.get("code"), error.get("param")])
    return found


def differing(found):
    wanted = json.loads(RECORDED.read_text())
    assert len(wanted) == len(CALLS)
    return [(call, one, other) for call, one, other in zip(CALLS, wanted, found, strict=True) if one != other]


def test_refused_calls_have_the_recorded_status_code_and_param(server):
    assert not differing(answers_of(server))


def test_other_texts_of_errors_change_no_status_code_or_param(server, monkeypatch):
    init, api_init = MMEngineError.__init__, ApiError.__init__
    num_replaced = 0

    def garbled(self, text, **options):
        nonlocal num_replaced
        num_replaced += 1
        init(self, GARBAGE, **options)

    def api_garbled(self, code, text, *rest, **options):
        api_init(self, code, GARBAGE, *rest, **options)

    monkeypatch.setattr(MMEngineError, "__init__", garbled)
    monkeypatch.setattr(ApiError, "__init__", api_garbled)
    assert not differing(answers_of(server))
    assert num_replaced > 100
