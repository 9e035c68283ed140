"""Tests random scenarios with all features: each request gets the tokens of an undisturbed run, and `verify`
accepts the log. A failing seed's scenario file is in the test's temporary folder.
"""

import json
import random

import pytest
from simulated import run, whole_output, write_scenario

from mmengine.events.log import LogWriter
from mmengine.replay import verify

SIZES = {"cat": 6, "dog": 11, "owl": 20}
RANGES = [[2000, 2100], [5000, 5200], [9000, 9010]]
SEEDS = range(24)


def random_request(rng, number):
    name = f"q{number}"
    prompt, images = [["gen", rng.choice("PQR"), rng.choice([8, 16, 24, 30]), 0]], []
    start = prompt[0][2]
    for _ in range(rng.choice([0, 0, 1, 2])):
        item = rng.choice(sorted(SIZES))
        images.append([start, SIZES[item], item])
        text = rng.randint(1, 9)
        prompt += [["img", SIZES[item]], ["gen", name, text, start]]
        start += SIZES[item] + text
    raw = {"id": name, "prompt": prompt, "images": images, "max_tokens": rng.randint(1, 30)}
    raw |= {"arrival_step": rng.randint(0, 20), "priority": rng.randint(0, 3)}
    if rng.random() < 0.2:
        raw |= {"stop_token": 900, "stop_at": rng.randint(0, 12)}
    elif rng.random() < 0.3:
        raw["grammar"] = {"ranges": RANGES}
        if rng.random() < 0.3:
            raw["inject_bad_at"] = rng.randint(0, 12)
    return raw


def random_events(rng, requests):
    events = []
    for raw in requests:
        arrival, name = raw["arrival_step"], raw["id"]
        if raw.get("grammar"):
            op = "grammar_ready" if rng.random() < 0.8 else "grammar_error"
            events.append({"step": arrival + rng.randint(0, 6), "op": op, "id": name})
        if rng.random() < 0.2:
            late = {"when": "before_update"} if rng.random() < 0.5 else {}
            events.append({"step": arrival + rng.randint(0, 20), "op": "abort", "id": name, **late})
    if rng.random() < 0.5:
        events.append(
            {"step": rng.randint(0, 40), "op": "reset_prefix_cache", "reset_running": rng.random() < 0.5}
        )
    return events


def random_config(rng):
    config = {
        "policy": rng.choice(["fcfs", "priority"]),
        "max_num_seqs": rng.randint(1, 6),
        "max_num_batched_tokens": rng.choice([24, 48, 100]),
        "max_model_len": 110,
        "block_size": rng.choice([4, 8]),
        "enable_prefix_caching": rng.random() < 0.8,
        "encoder_compute_budget": rng.choice([20, 40]),
        "encoder_cache_size": rng.choice([20, 31, 64]),
        "max_tokens_per_mm_item": 20,
        "disable_chunked_mm_input": rng.random() < 0.3,
        "reserve_full_prompt": rng.random() < 0.5,
    }
    config["num_blocks"] = rng.choice([1, 2, 4]) * 120 // config["block_size"]
    if not config["disable_chunked_mm_input"]:
        config["long_prefill_token_threshold"] = rng.choice([0, 0, 10])
    if rng.random() < 0.5:
        config |= {"num_spec_tokens": rng.randint(1, 3), "spec_method": rng.choice(["ngram", "eagle3"])}
    return config


@pytest.mark.parametrize("compat", ["", "vllm"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_scenarios(seed, compat, tmp_path):
    rng = random.Random(seed)
    requests = [random_request(rng, number) for number in range(14)]
    path = write_scenario(
        tmp_path, requests, config=random_config(rng), events=random_events(rng, requests), max_steps=3000
    )
    report, records, settings = run(path, compat=compat, log=LogWriter(tmp_path / "log"))
    gone = {e["id"] for e in json.loads(path.read_text())["events"] if e["op"] in ("abort", "grammar_error")}
    assert not report.num_refused and not set(report.unfinished) - gone
    for raw in requests:
        name = raw["id"]
        tokens = [token for record in records for token in record.get("out", {}).get(name, [])]
        reasons = [record["finish"][name] for record in records if name in record.get("finish", {})]
        expected, reason = whole_output(raw, settings.config.max_model_len)
        if name in gone:
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, reasons) == (expected, [reason])
    verified = verify(tmp_path / "log")
    assert verified.ok and not verified.unfinished
