"""Helpers for tests with Ray Serve: HTTP clients, live replicas, and memory use."""

import asyncio
import base64
import io
import json
import os
import secrets
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import msgspec
import ray
from PIL import Image
from ray import serve

from mmengine.config import EngineConfig
from mmengine_ray.deployments import REPLICA, Facts
from mmengine_ray.settings import RaySettings

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 12}},
}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}, "on_truncation": "close"}
TOKENS = 32
ENGINE = EngineConfig(max_num_seqs=32, num_blocks=800, max_model_len=512, batch_invariant=True, num_threads=1)


def settings_for(folder: Path, **more) -> RaySettings:
    given = {
        "builder": "tests.ray.paced:build",
        "log": str(folder),
        "engine": ENGINE,
        "num_cpus": 0.1,
        "beat_s": 0.2,
        "silence_s": 5.0,
        "health_s": 0.5,
        "drain_s": 1.0,
        **more,
    }
    return RaySettings(**given)


@contextmanager
def serving():
    """Run Ray Serve on the loopback interface, and yield the port of its proxy."""
    port = free_port()
    ray.init(
        num_cpus=8,
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def picture(number):
    file = io.BytesIO()
    Image.new("RGB", (64, 64), ["red", "green", "blue", "grey"][number % 4]).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def body_of(number):
    """Return the request body for stream `number`. The number selects the options."""
    content = [{"type": "text", "text": f"Question {number}: what do you see?"}]
    if number % 3 == 0:
        content.insert(0, {"type": "image_url", "image_url": {"url": picture(number)}})
    asked = {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": TOKENS}
    asked |= {
        "seed": number,
        "temperature": 0.0 if number % 4 == 0 else 1.1,
        "n": 2 if number % 5 == 0 else 1,
    }
    if number % 6 == 1:
        asked["response_format"] = FORM
    elif number % 6 == 2:
        asked["frequency_penalty"] = 0.5
    elif number % 6 == 4:
        asked |= {"logprobs": True, "top_logprobs": 1}
    else:
        asked["ignore_eos"] = True
    return asked


async def told(client, port, number):
    """Send request `number`, and return the received deltas by choice index. Raises AssertionError for an
    invalid answer.
    """
    said = {}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with client.stream("POST", url, json=body_of(number)) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", lines[-1]
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            said.setdefault(choice["index"], []).append(
                (choice["delta"], choice["finish_reason"], choice.get("logprobs"))
            )
    return said


async def all_told(port, numbers, meanwhile=None):
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(timeout=180, limits=limits) as client:
        tasks = [asyncio.create_task(told(client, port, number)) for number in numbers]
        if meanwhile is not None:
            await meanwhile
        return await asyncio.gather(*tasks)


async def replicas(count, app="default", limit_s=120):
    """Wait until `count` replicas are live, and return their facts."""
    handle, found, end = serve.get_deployment_handle(REPLICA, app), {}, time.monotonic() + limit_s
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} replicas are there"
        try:
            data = await handle.options(session_id=secrets.token_hex(4)).facts.remote()
        except Exception:  # the replica died meanwhile
            continue
        facts = msgspec.json.decode(data, type=Facts)
        if Path(f"/proc/{facts.pid}").exists():
            found[facts.pid] = facts
        found = {pid: each for pid, each in found.items() if Path(f"/proc/{pid}").exists()}
    return list(found.values())


def memory_mb(pid=None):
    """Return (resident memory in MB, command) for each descendant process, largest first. `pid`: the ancestor
    (None: this process).
    """
    found, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(
                line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line
            )
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        parents[int(folder.name)] = int(status["PPid"])
        found[int(folder.name)] = (
            command or status["Name"],
            int(status.get("VmRSS", "0 kB").split()[0]) / 1024,
        )
    own = pid or os.getpid()

    def is_below(each):
        while each in parents and each > 1:
            each = parents[each]
            if each == own:
                return True
        return False

    return sorted(((mb, command) for each, (command, mb) in found.items() if is_below(each)), reverse=True)
