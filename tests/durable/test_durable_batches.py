"""A server with a batch is killed with kill -9. After the restart the batch finishes. Each line has one
answer, equal to the answer of an undisturbed run.
"""

import json
import random
import subprocess
import sys
import time
from contextlib import contextmanager

import openai
import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.verify import verify
from tests.pictures import scene

START_S = 60
SETTINGS = ("--no-supervise", "--set", "max_num_seqs=4", "--set", "token_budget=64")
CHAT = "/v1/chat/completions"


class Process:
    """An `mmengine serve` process with a log."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self._err = folder / "err"
        command = (
            sys.executable,
            "-m",
            "mmengine.cli.main",
            "serve",
            "--port",
            "0",
            "--log",
            str(folder / "log"),
        )
        with self._err.open("w") as err:
            self.process = subprocess.Popen([*command, *SETTINGS], stderr=err)

    @property
    def client(self):
        end = time.monotonic() + START_S
        while " at http://" not in (said := self._err.read_text()):
            assert self.process.poll() is None and time.monotonic() < end, said
            time.sleep(0.02)
        return openai.OpenAI(
            base_url=said.rpartition(" at ")[2].split()[0].rstrip(","), api_key="none", max_retries=0
        )

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextmanager
def running(folder):
    one = Process(folder)
    try:
        yield one
    finally:
        one.kill()


def requests_of(num_lines, image_id):
    """Return batch lines: text or image, greedy or seeded, some with n, logprobs, stop strings or errors."""
    lines = []
    for number in range(num_lines):
        content = [{"type": "text", "text": f"What is shape {number}?"}]
        if number % 6 == 1:
            content.insert(0, {"type": "image_url", "image_url": {"url": image_id}})
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 20 + number % 9}
        body |= {"ignore_eos": True, "temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
        body |= [{}, {"n": 2}, {"logprobs": True}, {"stop": ["e"]}][number % 4]
        if number % 10 == 9:
            body = {"messages": "wrong"}
        lines.append({"custom_id": f"line {number}", "method": "POST", "url": CHAT, "body": body})
    return b"\n".join(json.dumps(each).encode() for each in lines)


def begun(client, num_lines):
    image = client.files.create(file=("scene.png", scene()), purpose="vision")
    file = client.files.create(file=("requests.jsonl", requests_of(num_lines, image.id)), purpose="batch")
    return again(client, file.id)


def again(client, file_id):
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="1h")


def ended(client, batch):
    end = time.monotonic() + START_S
    while (found := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


def answers(client, found):
    """Return custom_id -> answer from the output file and the error file, without values that depend on the
    run. Each line must occur once.
    """
    assert found.status == "completed"
    lines = []
    for name in (found.output_file_id, found.error_file_id):
        data = client.files.content(name).read()
        # The last bits of a logprob depend on the other rows in the step.
        lines += [json.loads(line, parse_float=lambda text: 0.0) for line in data.splitlines()]
    out = {}
    for line in lines:
        response = line["response"]
        body = {name: value for name, value in response["body"].items() if name not in ("id", "created")}
        if "usage" in body:  # the counts of cached and drafted tokens vary
            del body["usage"]["prompt_tokens_details"], body["usage"]["completion_tokens_details"]
        assert line["custom_id"] not in out
        out[line["custom_id"]] = response["status_code"], body
    return out


def killed(folder, chosen, kills, num_lines, in_recovery=False):
    """Kill the server several times during a batch, and compare the answers with an undisturbed run. Returns
    the number of unanswered lines at each kill, as the client saw them.
    """
    unanswered = []
    with running(folder) as one:
        client = one.client
        first = ended(client, begun(client, num_lines))
        undisturbed = answers(client, first)
        assert len(undisturbed) == num_lines
        batch = again(client, first.input_file_id)
        time.sleep(0.05 + chosen.random() * 0.2)
        counts = client.batches.retrieve(batch.id).request_counts
        one.kill()
        unanswered.append(num_lines - counts.completed - counts.failed)
    for _ in range(kills - 1):
        with running(folder) as one:
            if in_recovery and chosen.random() < 0.5:
                time.sleep(chosen.random() * 3)
                continue
            counts = one.client.batches.retrieve(batch.id).request_counts
            time.sleep(chosen.random() * 0.3)
            unanswered.append(num_lines - counts.completed - counts.failed)
    with running(folder) as one:
        client = one.client
        assert answers(client, ended(client, batch)) == undisturbed
    report = verify(folder / "log")
    assert report.ok, report
    return unanswered


def test_killed_in_the_middle_it_is_finished(tmp_path):
    (unanswered,) = killed(tmp_path, random.Random(3), 1, 24)
    assert unanswered > 5
    queued = [record.event for record in LogReader(tmp_path / "log") if isinstance(record.event, ev.Queued)]
    rows = [each.request_id for each in queued if each.request_id.startswith("batch_")]
    assert len(rows) == len(set(rows))  # logged batch lines were resumed, not submitted again


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_killed_again_and_again_it_is_finished(tmp_path, seed, capsys):
    unanswered = killed(tmp_path, random.Random(seed), 6, 150, in_recovery=seed % 2 == 1)
    with capsys.disabled():
        print(f"without an answer at each kill: {unanswered} of 150 lines")
    assert unanswered[0] > 50
