"""Tests that each body field reaches the engine. Also tests API keys, unsupported routes and late bodies."""

import socket

import pytest

from mmengine.request import SamplingParams
from mmengine.server.app.app import App
from mmengine.server.chat.field_tables import CHAT
from mmengine.server.http.errors import ApiError
from mmengine.version import __version__
from tests.serve.serve_fakes import builder
from tests.server.running import AsyncEngine, served

SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "n": 2,
    "seed": 9,
    "min_tokens": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "ignore_eos": True,
    "stop": ["x", "y"],
    "stop_token_ids": [3],
    "logit_bias": {"5": 2.0},
}
OPTIONS = {"priority": 3, "cache_salt": "mine", "deadline_s": 30.0, "request_id": "r"}
ELSEWHERE = {  # Fields that other files test.
    "test_server_streams.py": {"stream", "stream_options"},
    "test_server_prompts.py": {"messages", "mm_processor_kwargs", "chat_template_kwargs"}
    | {"add_generation_prompt", "continue_final_message"},
    "test_server_errors.py": {"model", "structured_outputs", "top_logprobs"},
    "test_server_tools.py": {"tools", "tool_choice", "parallel_tool_calls", "include_reasoning"}
    | {"thinking_token_budget", "thinking_budget", "reasoning_effort"},
    "test_server_openai.py": {"logprobs", "response_format", "max_tokens"},
    "test_server_repetition.py": {"repetition_detection"},
}


@pytest.fixture(scope="module")
def server():
    with served() as one:
        yield one


def test_each_supported_field_reaches_the_engine(server, monkeypatch):
    taken = {field.name for field in CHAT if field.how in ("taken", "translated")}
    own = SAMPLING.keys() | OPTIONS.keys() | {"max_completion_tokens"}
    assert taken == own.union(*ELSEWHERE.values())
    asked, stream = [], server.engine.stream

    def noted(prompt, sampling, **options):
        asked.append((sampling, options))
        return stream(prompt, sampling, **options)

    monkeypatch.setattr(server.engine, "stream", noted)
    assert server.chat(**SAMPLING, **OPTIONS, max_completion_tokens=11)[0] == 200
    ((sampling, options),) = asked
    wanted = {**SAMPLING, "stop": ("x", "y"), "stop_token_ids": (3,), "logit_bias": {5: 2.0}}
    assert sampling == SamplingParams(max_tokens=11, **wanted)
    assert {name: options[name] for name in OPTIONS} == OPTIONS


def test_without_a_budget_an_answer_is_as_long_as_the_context_leaves():
    engine = AsyncEngine(builder=builder(max_model_len=64))
    with served(engine) as one:
        answer = one.chat("a" * 40)[2]
        assert answer["usage"]["total_tokens"] == 64 and answer["choices"][0]["finish_reason"] == "length"


def test_service_routes_and_unsupported_routes(server):
    assert server.call("/version")[2] == {"version": __version__}
    for path, word in (
        ("/v1/moderations", "not supported"),
        ("/v1/audio/speech", "audio"),
        ("/v1/nowhere", "does not exist"),
    ):
        status, _, body = server.call(path, {})
        assert status == 404 and word in body["error"]["message"]
    status, headers, _ = server.call("/v1/models", headers={"origin": "https://a.org"}, method="OPTIONS")
    assert status == 405 and not [name for name in headers if name.startswith("access-control")]


def test_a_body_that_does_not_arrive_is_408():
    with served(body_timeout_s=0.1) as one:
        with socket.create_connection(("127.0.0.1", one.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")
            # `read` returns because the server closes the connection.
            answer = connection.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 408 ") and b"within 0.1 seconds (body_timeout_s)" in answer
        assert one.app.admission.bodies.num_bytes == 0


def test_keys_come_in_two_headers_and_metrics_are_open_to_this_machine(tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    with served(key_file=tmp_path / "keys") as one:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"authorization": "bearer  secret"}, 200),
            ({"x-api-key": "secret2"}, 401),
            ({"authorization": "Basic secret"}, 401),
            ({"authorization": "Bearer", "x-api-key": ""}, 401),
        ):
            assert one.call("/v1/models", headers=headers)[0] == status, headers
        assert one.call("/metrics")[0] == 200
        far = {"path": "/metrics", "headers": [], "client": ("192.0.2.1", 1)}
        with pytest.raises(ApiError, match="API key is missing"):
            one.app._check_key(far)
    with served(key_file=tmp_path / "keys", open_metrics=True) as one:
        App._check_key(one.app, far)
