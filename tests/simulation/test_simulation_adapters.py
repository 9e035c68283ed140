"""Tests request files with adapters: the limit on loaded adapters, the replay, and adapters that change an
image's features.
"""

import json

import pytest
from simulated import SMALL, request, run, write_scenario

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import verify

NAMES = ("a", "b", "c", None)


def asked(folder, *, places, **more):
    """Return the tokens of sixteen requests. Each request uses one of three adapters, or none. At most
    `places` adapters are loaded at a time.
    """
    requests = []
    for number in range(16):
        own = {"adapter": {"name": NAMES[number % 4], "bytes": 60}} if NAMES[number % 4] else {}
        requests.append(request(f"q{number}", 9, at=number // 2, **own, prompt=[["gen", "p", 20]]))
    folder.mkdir()
    path = write_scenario(folder, requests, config={"max_loras": places, "lora_bytes": places * 70})
    report, records, _ = run(path, log=LogWriter(folder / "log"), **more)
    assert report.meter.longest_ttft() > 0
    tokens = {}
    for record in records:
        for name, new in record.get("out", {}).items():
            tokens.setdefault(name, []).extend(new)
    return tokens


@pytest.mark.parametrize("compat", ["", "vllm"])
def test_fewer_places_than_adapters_change_no_token_and_replay(tmp_path, compat):
    few, many = (asked(tmp_path / str(n), places=n, compat=compat) for n in (1, 3))
    assert few == many and len(few) == 16
    log = tmp_path / "1" / "log"
    assert verify(log).ok
    admitted = [record.event for record in LogReader(log)]
    assert any(isinstance(event, ev.AdmittedWithAdapter) and event.adapters_out for event in admitted)


def test_an_image_is_encoded_again_for_an_adapter_of_the_tower_alone(tmp_path):
    # Only an adapter for the vision tower (`visual`) changes an image's features.
    shared = {"prompt": [["img", 8], ["gen", "p", 4]], "images": [[0, 8, "cat"]], "at": 0}
    sees = {"name": "sees", "bytes": 90, "visual": True}
    adapters = (None, "text", sees, sees)
    lines = [request(f"q{n}", **shared, adapter=adapter) for n, adapter in enumerate(adapters)]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, records, _ = run(path, config=SMALL)
    encoded = [name for record in records for _, *names in record.get("enc", ()) for name in names]
    assert len(encoded) == 2
