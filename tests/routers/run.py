"""Test Dynamo's router with our KV events: all questions about an image go to the replica that has its
prefix.

    make store      # installs Dynamo in build/store and runs this module

Two replicas run the included model. For each replica, a process publishes the KV events from its log. The
router's index counts how many of a question's blocks each replica holds. Before a replica's first events, the
router knows only the replica's load.
"""

import itertools
import json
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from mmengine import Engine, EngineConfig
from mmengine.serve.prompt.prompt import Prompt
from tests.pictures import data_url, looking

SELECTOR = Path("build/store/bin/python")
BLOCK, MODEL, NUM_IMAGES, NUM_QUESTIONS = 16, "mmengine-shapes", 4, 16
REPLICAS, SIZE = (1, 2), (448, 448)
PATIENCE_S = 30
SUBSCRIBED_S = 2  # seconds to wait, because a new subscriber may miss the first events


class Selector:
    """Dynamo's selection service, in its own process."""

    def __init__(self, process: subprocess.Popen):
        self._process = process

    def ask(self, method: str, argument: dict):
        self._process.stdin.write(json.dumps([method, argument]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["ok"]


class Replica:
    def __init__(self, number: int, folder: Path, stack: ExitStack):
        self.number, log = number, folder / f"replica-{number}"
        config = EngineConfig(block_size=BLOCK, num_blocks=512, max_model_len=1024)
        self.engine = stack.enter_context(Engine(config=config, log=log))
        self.port = 25_500 + 10 * number
        verb = [sys.executable, "-m", "mmengine.cli.main", "log", "kv-events", str(log)]
        ends = ["--publish", f"tcp://127.0.0.1:{self.port}", "--replay", f"tcp://127.0.0.1:{self.port + 1}"]
        stack.enter_context(running([*verb, *ends]))

    def join(self, selector: Selector) -> None:
        wait_for(self.port)
        selector.ask(
            "upsert_worker",
            {
                "worker_id": self.number,
                "model_name": MODEL,
                "endpoint": f"http://127.0.0.1:{8000 + self.number}",
                "block_size": BLOCK,
                "max_num_batched_tokens": 1024,
                "total_kv_blocks": 511,
                "kv_events_endpoints": [f"tcp://127.0.0.1:{self.port}"],
                "replay_endpoint": f"tcp://127.0.0.1:{self.port + 1}",
            },
        )


@contextmanager
def running(command: list[str], **options):
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def question(number: int, image: int) -> Prompt:
    text = f"Question {number}: how many of them are red, and where does the {number}th one stand?"
    return Prompt([looking(text, data_url(image, size=SIZE))])


def asked(prepared) -> dict:
    """Return a question in the router's format: its tokens, and the image in each block."""
    tokens = np.asarray(prepared.prompt_token_ids)
    infos: list[dict | None] = [None] * (len(tokens) // BLOCK)
    for item in (media.item for media in prepared.media):
        name = int(item.mm_hash.hex()[:16], 16)
        for start, length in item.runs:
            for block in range(start // BLOCK, min(len(infos), (start + length - 1) // BLOCK + 1)):
                infos[block] = {"mm_objects": [{"mm_hash": name, "offsets": []}]}
    return {"model_name": MODEL, "token_ids": tokens.tolist(), "block_mm_infos": infos}


def main() -> None:
    if not SELECTOR.exists():
        print("Dynamo's router is not available, so its use of KV events is not tested")
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        selector = Selector(
            stack.enter_context(running([str(SELECTOR), "tests/routers/selector.py"], **pipes))
        )
        replicas = {number: Replica(number, Path(folder), stack) for number in REPLICAS}
        for replica in replicas.values():
            replica.join(selector)
        time.sleep(SUBSCRIBED_S)
        show(selector, replicas)


def show(selector: Selector, replicas: dict[int, Replica]) -> None:
    """Ask all questions, and print the replicas that the router chooses.

    The router chooses at random among idle replicas. So that the images spread over all replicas, the first
    question about each image keeps its reservation until all first questions are answered.
    """
    landed: dict[int, list[int]] = {image: [] for image in range(NUM_IMAGES)}

    def ask(number: int, image: int) -> None:
        prompt = question(number, image)
        prepared = prompt.prepare(replicas[1].engine.processor)
        given = asked(prepared)
        chosen = selector.ask("select_and_reserve", {**given, "selection_id": f"{image}-{number}"})
        worker = chosen["worker_id"]
        landed[image].append(worker)
        replicas[worker].engine.generate([prompt], max_tokens=4)
        if number == 0:
            count, tokens = known(selector, given, worker), len(prepared.prompt_token_ids)
            print(f"image {image}: {tokens} tokens, first on replica {worker}; {count} blocks are known")

    for image in landed:
        ask(0, image)
    for image in landed:
        selector.ask("free_reservation", f"{image}-0")
    for image, number in itertools.product(landed, range(1, NUM_QUESTIONS)):
        ask(number, image)
        selector.ask("free_reservation", f"{image}-{number}")
    for image, workers in landed.items():
        print(f"image {image}: {NUM_QUESTIONS} questions on replicas {sorted(set(workers))}")
    assert all(len(set(workers)) == 1 for workers in landed.values())
    assert len({workers[0] for workers in landed.values()}) == len(replicas), "images spread over replicas"


def wait_for(port: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def known(selector: Selector, question: dict, worker: int) -> int:
    """Wait until the router's index has blocks of the question for this replica, and return the number of
    blocks.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        scores = selector.ask("overlap_scores", question)
        (found,) = (each["device_blocks"] for each in scores["workers"] if each["worker_id"] == worker)
        if found:
            return found
        if time.monotonic() > until:
            raise RuntimeError(f"the index does not know what replica {worker} computed: {scores}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
