"""Tests that a batch survives kill -9 at random times. After a restart, each request has a single answer,
with the tokens from an undisturbed run.
"""

import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from mmengine.cli.batch import HAS_ERRORS
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.verify import verify
from tests.cli.cli_process import call_cli

COMMAND = (sys.executable, "-m", "mmengine.cli.main", "run", "--batch", "requests.jsonl")
# Few concurrent requests and small steps make the run long enough for several kills.
SETTINGS = ("--set", "max_num_seqs=3", "--set", "token_budget=64", "--set", "snapshot_bytes=4000")
DRAFTED = ("--set", "spec=eagle3", "--set", "draft_policy=goodput")
START_S = 60
SHAPE = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "more": {"type": "boolean"}},
}
SCHEMA = {"type": "array", "minItems": 2, "maxItems": 3, "items": {**SHAPE, "required": ["shape", "more"]}}
FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def write_requests(folder, num_requests):
    """Write requests with various inputs and options, and invalid lines."""
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (64, 96, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    lines = []
    for number in range(num_requests):
        content = [{"type": "text", "text": f"What is shape {number}?"}]
        if number % 2 == 0:
            content.insert(0, {"type": "image", "image": f"{number % 3}.png"})
        line = {"custom_id": f"q{number}", "messages": [{"role": "user", "content": content}]}
        line |= {"max_tokens": 8 + number % 5, "ignore_eos": number % 3 == 0}
        if number % 3:
            line |= {"temperature": 0.9, "seed": number}
        line |= [{}, {"n": 2}, {"logprobs": 2}, {"stop": ["e"]}][number % 4]
        if number % 5 == 1:  # Grammar requests run with drafts.
            line |= {"response_format": FORM, "max_tokens": 40, "ignore_eos": False, "stop": None}
        lines.append(json.dumps(line))
    lines[3:3] = ["", '{"custom_id": "no messages"}', "not json"]
    (folder / "requests.jsonl").write_text("\n".join(lines))


def run(folder, *arguments):
    result = subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, timeout=START_S)
    assert result.returncode == HAS_ERRORS, result.stderr  # The invalid lines have errors.


def answers(path):
    """Return the answers by custom_id (by error if the id is null), without the fields that a crash may
    change.
    """
    found = {}
    for line in path.read_text().splitlines():
        answer = json.loads(line)
        name = answer["custom_id"] or answer["error"]
        assert name not in found, "a request has two answers"
        for figure in ("cached_tokens", "completion_tokens_details"):
            answer.get("usage", {}).pop(figure, None)
        for choice in answer.get("choices", [answer]):
            choice["logprobs"] = [
                [(token, pytest.approx(logprob, abs=1e-4)) for token, logprob in entries]
                for entries in choice.get("logprobs", [])
            ]
        found[name] = answer
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    write_requests(folder, 14)
    words = ("run", "--batch", "requests.jsonl", "--out", "answers.jsonl", *SETTINGS)
    assert call_cli(*words, cwd=folder).returncode == HAS_ERRORS
    return folder, answers(folder / "answers.jsonl")


def log_size(log):
    return sum(path.stat().st_size for path in log.glob("*.mmlog")) if log.exists() else 0


def kill_at_random(command, folder, log, rng):
    """Start the command, and wait until the log grows. Kill the process a random time later, and return the
    exit code.
    """
    before, deadline = log_size(log), time.monotonic() + START_S
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    while process.poll() is None and log_size(log) == before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(rng.random() * rng.choice((0.005, 0.03, 0.15)))
    process.send_signal(signal.SIGKILL)
    return process.wait()


def check_killed(undisturbed, seed, kills, how=()):
    folder, expected = undisturbed
    rng = random.Random(seed)
    out, log = folder / f"{seed}.jsonl", folder / f"{seed}.log"
    arguments = ("--out", out.name, "--log", log.name, *SETTINGS, *how)
    killed = 0
    for _ in range(kills):
        killed += kill_at_random([*COMMAND, *arguments], folder, log, rng) == -signal.SIGKILL
        if rng.random() < 0.3 and out.exists():  # Simulates a line torn by a power cut.
            with out.open("r+b") as file:
                file.truncate(max(0, out.stat().st_size - rng.randrange(3)))
    run(folder, *arguments)
    assert killed
    assert answers(out) == expected
    report = verify(log)
    assert report.ok and report.rederived and not report.unfinished and report.torn is None
    events = [record.event for record in LogReader(log)]
    ended = [event.request_id for event in events if isinstance(event, ev.Finished)]
    queued = [event.request_id for event in events if isinstance(event, ev.Queued)]
    assert len(ended) == len(set(ended)) and set(ended) == set(queued), (
        "each request must finish exactly once"
    )
    delivered = {event.request_id for event in events if isinstance(event, ev.Delivered)}
    assert delivered <= set(ended)
    assert not list((log / "media").iterdir()), "images must be deleted with their requests"


@pytest.mark.parametrize(
    "seed, kills, how", [pytest.param(1, 4, (), marks=pytest.mark.soak), (2, 3, DRAFTED)]
)
def test_a_batch_survives_kills(undisturbed, seed, kills, how):
    """Kills at random times do not change the answers, with and without a draft head."""
    check_killed(undisturbed, seed, kills, how)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_batch_survives_many_kills(undisturbed, seed):
    check_killed(undisturbed, seed, 10, DRAFTED if seed % 2 else ())
