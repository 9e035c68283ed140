"""Helpers that run workloads, and a reference implementation of the fake model's rules."""

import json
import zlib
from pathlib import Path

from mmengine.replay.invariants import find_broken
from mmengine.simulation import Driver, read_settings
from mmengine.simulation.records import Recorder
from mmengine.simulation.workload_files import load_workload


class Checked(Recorder):
    """A recorder that also checks the state's invariants when a step is decided and when its tokens are
    applied.
    """

    def decided(self, state):
        assert find_broken(state) is None, find_broken(state)
        super().decided(state)

    def updated(self, state):
        assert find_broken(state) is None, find_broken(state)
        super().updated(state)


SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.json"))
SMALL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "block_size": 8,
    "num_blocks": 64,
    "encoder_compute_budget": 64,
    "encoder_cache_size": 64,
}


def run(path, *, config=None, compat="", log=None, queues=True, form="auto", limit=None):
    """Return a run's report, records and settings."""
    work = load_workload(path, form, limit)
    settings = read_settings({**work.settings, **(config or {})}, work, compat)
    records = []
    recorder = Checked(records.append, work.media_names, queues=queues)
    report = Driver(work, settings, recorder=recorder, log=log).run()
    return report, records, settings


def write_scenario(folder, requests, *, config=None, events=(), max_steps=500):
    path = folder / "scenario.json"
    content = {
        "config": {**SMALL, **(config or {})},
        "requests": requests,
        "events": list(events),
        "max_steps": max_steps,
    }
    path.write_text(json.dumps(content))
    return path


def request(name, length=6, *, at=0, out=3, images=(), **more):
    """Return a request in the scenario format with its own generated prompt."""
    return {
        "id": name,
        "prompt": [["gen", name, length, 0]],
        "max_tokens": out,
        "arrival_step": at,
        "images": list(images),
        **more,
    }


def prompt_length(raw):
    lengths = {
        "lit": lambda tokens: len(tokens),
        "gen": lambda key, count, start: count,
        "img": lambda count: count,
    }
    return sum(lengths[kind](*rest) for kind, *rest in raw["prompt"])


def token(raw, index):
    """Return the fake model's token for a raw request at an output index."""
    if raw.get("inject_bad_at") == index:
        return 7
    if raw.get("stop_at") == index:
        return raw["stop_token"]
    ranges = raw["grammar"]["ranges"] if raw.get("grammar") else [[1000, 31000]]
    low, high = ranges[index % len(ranges)]
    return low + zlib.crc32(f"{raw['id']}:{prompt_length(raw) + index}".encode()) % (high - low)


def whole_output(raw, max_model_len):
    """Return all tokens and the finish reason of a request that is not aborted."""
    most = min(raw["max_tokens"], max_model_len - prompt_length(raw))
    tokens = []
    while len(tokens) < most:
        tokens.append(token(raw, len(tokens)))
        if tokens[-1] == 7 and raw.get("grammar"):
            return tokens, "error"
        if tokens[-1] == raw.get("stop_token"):
            return tokens, "stop"
    return tokens, "length"
