"""Tests `mmengine bench serve` with a server whose step time is known."""

import json
import math

import pytest

from mmengine.errors import ConfigError
from mmengine.server.bench.load import Load, bodies
from mmengine.server.bench.streamed_call import Call, Target
from mmengine.server.bench.summary import Limits, summary_of
from tests.cli.cli_process import call_cli
from tests.pictures import scene
from tests.server.running import SlowEcho, served

PAUSE_MS = 20


class Steady(SlowEcho):
    """An executor whose steps take 20 ms."""

    pause_s = PAUSE_MS / 1e3


def call(sent, *at, error=""):
    return Call(sent, at[-1] if at else sent, list(at), 10, len(at), error)


def test_the_summary_matches_the_calls():
    calls = [call(0, 0.1, 0.2, 0.3), call(1, 1.5, 1.6), call(2, error="status 429"), call(2, 2.1)]
    found = summary_of(calls, 2.0, Limits(ttft_ms=200, tpot_ms=150))
    assert (found.num_calls, found.num_failed, found.errors) == (4, 1, {"status 429": 1})
    assert (found.calls_rate, found.output_rate, found.prompt_tokens) == (1.5, 3.0, 30)
    assert (found.goodput, found.good_share) == (1.0, 0.5), "the second is late, the third was refused"
    assert found.ttft_ms["p50"] == pytest.approx(100) and found.tpot_ms["mean"] == pytest.approx(100)
    assert found.itl_ms["p99"] == pytest.approx(100) and found.e2e_ms["mean"] == pytest.approx(1000 / 3)
    assert summary_of(calls, 2.0, Limits()).goodput is None


def test_prompts_differ_and_loads_are_limited(tmp_path):
    (tmp_path / "a.png").write_bytes(scene(1))
    load = Load(20, math.inf, 4, 30, 8, images=(tmp_path / "a.png",))
    texts = [json.loads(each)["messages"][0]["content"][1]["text"] for each in bodies(load)]
    assert len({text.split()[0] for text in texts}) == 20 and {len(text.split()) for text in texts} == {30}
    assert bodies(load) == bodies(load)
    with pytest.raises(ConfigError, match="num_requests"):
        Load(10**9, 1, 1, 1, 1).check()
    with pytest.raises(ConfigError, match="--url"):
        Target.of("localhost:8000", "")
    assert Target.of("https://a/v1/", "").path == "/v1/chat/completions"


def test_a_server_is_measured(tmp_path):
    with served(executor_class=Steady) as one:
        given = ("--requests", "6", "--concurrency", "3", "--max-tokens", "5", "--prompt-words", "4")
        limits = ("--ttft-ms", "5000", "--tpot-ms", "1")
        files = ("-o", str(tmp_path / "a.md"), "--json", str(tmp_path / "a.json"))
        picture = ("--picture", str(tmp_path / "a.png"))
        url = ("--url", f"http://127.0.0.1:{one.port}/v1")
        ran = call_cli("bench", "serve", *url, *given, *limits, *files, *picture)
        assert ran.returncode == 0, ran.stderr
        found = json.loads((tmp_path / "a.json").read_text())
        assert (found["num_calls"], found["num_failed"], found["output_tokens"]) == (6, 0, 30)
        assert found["tpot_ms"]["p50"] >= PAUSE_MS and found["ttft_ms"]["p50"] >= PAUSE_MS
        assert found["goodput"] == 0.0, "a token takes longer than a millisecond"
        assert "time to first token" in (tmp_path / "a.md").read_text() and "goodput" in ran.stdout
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    ran = call_cli("bench", "serve", *url, *given)
    assert ran.returncode == 2 and "no call was answered" in ran.stderr
