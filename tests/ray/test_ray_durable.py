"""Background responses and a batch on Ray Serve survive kills of their replica and of their ingress."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import httpx2 as httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make ray makes an environment with it")

from ray import serve  # noqa: E402

from mmengine.fleet.durable_requests import INGRESS, REQUESTS  # noqa: E402
from mmengine.replay.queries.fleet import logs_in, replica_paths  # noqa: E402
from mmengine_ray.deployments import application  # noqa: E402
from tests.ray.fleets import replicas, serving, settings_for  # noqa: E402

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
NUMBERS = range(8)
LIMIT_S = 180
CHAT = "/v1/chat/completions"


@pytest.fixture
def client():
    with serving() as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as found:
        yield found


def body_of(number):
    text = f"Question {number}: what is a triangle?"
    sampling = {"seed": number, "temperature": 1.1 if number % 2 else 0.0}
    if number % 4 == 3:
        sampling |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    return {"input": text, "background": True, "max_output_tokens": 48, **sampling}


def lines():
    for number in NUMBERS:
        content = f"Line {number}: what is a square?"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 32, "ignore_eos": True}
        body |= {"seed": number, "n": 1 + number % 2}
        yield json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body})


def begun(client):
    """Start background responses and a batch, and return their ids."""
    names = [client.post("/v1/responses", json=body_of(number)).json()["id"] for number in NUMBERS]
    files = {"file": ("lines.jsonl", "\n".join(lines()).encode())}
    file = client.post("/v1/files", files=files, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return names, client.post("/v1/batches", json=asked).json()["id"]


def until_over(client, path, over):
    """Request `path` until the object's status is in `over`, and return the object. A starting ingress does
    not answer, so failed requests are repeated.
    """
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            found = client.get(path)
        except httpx.HTTPError:
            found = None
        if found is not None and found.status_code < 500:
            assert found.status_code == 200, found.text
            if found.json()["status"] in over:
                return found.json()
        time.sleep(0.1)
    raise AssertionError(f"{path} does not end")


def answers(client, names, batch):
    """Return the texts of the responses `names` and of the batch, without ids, times and token counts."""
    said = []
    for name in names:
        found = until_over(client, f"/v1/responses/{name}", ("completed", "incomplete", "failed"))
        assert found["status"] != "failed", found
        parts = [part for item in found["output"] for part in item.get("content") or ()]
        said.append((found["status"], [(part["text"], part.get("logprobs")) for part in parts]))
    found = until_over(client, f"/v1/batches/{batch}", ("completed", "failed"))
    counts = found["request_counts"]
    assert (counts["completed"], counts["failed"]) == (len(NUMBERS), 0), found
    data = client.get(f"/v1/files/{found['output_file_id']}/content").text
    rows = [json.loads(line) for line in data.splitlines()]
    assert len(rows) == len(NUMBERS)
    told = {
        row["custom_id"]: [each["message"]["content"] for each in row["response"]["body"]["choices"]]
        for row in rows
    }
    return said, told


def ingress_pid():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::ServeReplica") and b"Ingress" in command:
            return int(folder.name)
    return None


def test_a_replica_and_an_ingress_are_killed(client, tmp_path):
    serve.run(application(settings_for(tmp_path, replicas=2)))
    asyncio.run(replicas(2))
    wanted = answers(client, *begun(client))

    asked = begun(client)
    time.sleep(0.4)
    os.kill(asyncio.run(replicas(1))[0].pid, signal.SIGKILL)
    assert answers(client, *asked) == wanted

    asyncio.run(replicas(2))
    asked = begun(client)
    time.sleep(0.4)
    before = ingress_pid()
    killed_at = time.monotonic()
    os.kill(before, signal.SIGKILL)
    assert answers(client, *asked) == wanted
    print(f"all answers {time.monotonic() - killed_at:.1f} s behind the ingress's death")
    assert ingress_pid() not in (None, before)

    end = time.monotonic() + 30
    while left := list((tmp_path / INGRESS / REQUESTS).glob("*.request")):
        assert time.monotonic() < end, left
        time.sleep(0.1)
    ways, broken = replica_paths(logs_in(tmp_path))
    moved = [way for way in ways.values() if len(way.hops) > 1]
    half = sum(way.hops[-1].num_given > 0 for way in moved)
    print(f"{len(moved)} of {len(ways)} answers went on elsewhere, {half} of them from the middle")
    assert half and not broken
