"""Records the logs in tests/vllm/recordings with vLLM's scheduler. Requires `make vllm`.

    build/vllm/bin/python -m tests.vllm.make_recordings priority drafts asynchronous asynchronous_drafts
    build/vllm/bin/python -m tests.vllm.make_recordings block_groups

The log `asynchronous_block_groups` requires vLLM 0.33. Two logs need other commands. `python -m
tests.vllm.live_run mmengine_vllm.RecordingScheduler` records `images`. The log `rejected_tokens` is the
workload "grammars, EAGLE drafts" in `tests.vllm.conformance`, with seed 0, vLLM 0.33 and PYTHONHASHSEED=1.
"""

import os
import sys
from pathlib import Path

from mmengine.events.retention import pack
from mmengine_vllm import RecordingScheduler
from tests.vllm.model_free import drive

FOLDER = Path(__file__).parent / "recordings"
STEPS = 90
RUNS = {
    "priority": {"scheduling_policy": "priority"},
    "drafts": {"drafts": 3},
    "asynchronous": {"overlaps": True},
    "asynchronous_drafts": {"overlaps": True, "drafts": 3},
    "block_groups": {"window": (12, 0, 33), "num_blocks": 58, "drafts": 2, "max_num_batched_tokens": 32},
    "asynchronous_block_groups": {"window": (0, 20, 64, 0), "num_blocks": 100, "overlaps": True},
}
# Seeds with rare cases. "asynchronous_drafts": a preempted request reuses a block that ends in accepted
# drafts. "block_groups": a prompt needs more blocks than a sliding window has.
SEEDS = {"asynchronous_drafts": 110, "block_groups": 15}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        os.environ["MMENGINE_LOG"] = str(FOLDER / name)
        print(name, drive(RecordingScheduler, SEEDS.get(name, 11), steps=STEPS, **RUNS[name]))
        for path in (FOLDER / name).glob("*.mmlog"):
            pack(path)
        (FOLDER / name / "lock").unlink()
