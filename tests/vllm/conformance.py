"""Records random workloads with vLLM's scheduler, and derives each log's decisions with mmengine's rules and
with the installed vLLM's scheduler.

    build/vllm/bin/python -m tests.vllm.conformance [--seeds 4] [--steps 80]

Prints a table with a row for each setting, then each difference. The exit code is 1 if there is a difference.
The rules do not cover hash_block_size, so only vLLM derives the decisions in logs with this setting.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.version import __version__

from mmengine.replay import verify
from mmengine_vllm.hooks import RecordsCalls
from tests.vllm.model_free import drive, with_encoder

SETTINGS = {
    "plain": {},
    "priority": {"scheduling_policy": "priority"},
    "no prefix cache": {"enable_prefix_caching": False},
    "threshold 24": {"long_prefill_token_threshold": 24},
    "n-gram drafts": {"drafts": 3},
    "n-gram drafts, priority": {"drafts": 3, "scheduling_policy": "priority"},
    "EAGLE drafts": {"drafts": 3, "method": "eagle3"},
    "EAGLE drafts, priority": {"drafts": 3, "method": "eagle3", "scheduling_policy": "priority"},
    "grammars": {"grammars": True},
    "grammars, n-gram drafts": {"grammars": True, "drafts": 3},
    "grammars, EAGLE drafts": {"grammars": True, "drafts": 3, "method": "eagle3"},
    "LoRA": {"loras": 2},
    "LoRA, priority": {"loras": 2, "scheduling_policy": "priority"},
    "LoRA, n-gram drafts": {"loras": 2, "drafts": 3},
    "images": {"images": True},
    "images, priority": {"images": True, "scheduling_policy": "priority"},
    "images, threshold 40": {"images": True, "long_prefill_token_threshold": 40},
    "images, n-gram drafts": {"images": True, "drafts": 3},
    "images, EAGLE drafts": {"images": True, "drafts": 3, "method": "eagle3"},
    "images, LoRA": {"images": True, "loras": 2},
    "images, grammars": {"images": True, "grammars": True},
    "async": {"overlaps": True},
    "async, priority": {"overlaps": True, "scheduling_policy": "priority"},
    "async, n-gram drafts": {"overlaps": True, "drafts": 3},
    "async, EAGLE drafts": {"overlaps": True, "drafts": 3, "method": "eagle3"},
    "async, images": {"overlaps": True, "images": True},
    "async, grammars": {"overlaps": True, "grammars": True},
    "async, LoRA": {"overlaps": True, "loras": 2},
    "hybrid groups": {"window": 64, "num_blocks": 60},
    "hybrid groups, no cache": {"window": (64, 0), "num_blocks": 60, "enable_prefix_caching": False},
    "hybrid groups, priority": {"window": 33, "num_blocks": 48, "scheduling_policy": "priority"},
    "hybrid groups, drafts": {"window": 64, "num_blocks": 60, "drafts": 3},
    "hybrid groups, images": {"window": (64, 0), "num_blocks": 60, "images": True},
    "hybrid groups, three windows": {"window": (40, 100, 0, 0, 24), "num_blocks": 140, "drafts": 3},
    "hybrid groups, hashes of 8": {"window": 64, "num_blocks": 60, "hash_block_size": 8},
    "async, hybrid groups": {"window": 64, "num_blocks": 60, "overlaps": True},
    "async, hybrid groups, drafts": {"window": (20, 0, 64), "num_blocks": 90, "overlaps": True, "drafts": 3},
}
ENCODER = 64  # Both the encoder's budget per step and the encoder cache's size, in embeddings.
COLUMNS = ("setting", "workloads", "calls", "requests", "preempted", "rules", "vllm")
FORMAT = "{:<28}{:>10}{:>8}{:>10}{:>11}{:>7}{:>6}"


def recorder_class(*, overlaps, images):
    """Return vLLM's scheduler class with the recorder, and with an encoder if there are images."""
    base = AsyncScheduler if overlaps else Scheduler
    if images:
        base = with_encoder(base, ENCODER, ENCODER)
    return type("Recorded", (RecordsCalls, base), {"host_version": __version__})


def workload(folder, seed, steps, settings):
    """Record a workload. Returns the rules' report (None for hash_block_size), vLLM's report, and the number
    of preemptions.
    """
    os.environ["MMENGINE_LOG"] = str(folder)
    cls = recorder_class(overlaps=settings.get("overlaps", False), images=settings.get("images", False))
    _, preempted = drive(cls, seed, steps=steps, **settings)
    return None if "hash_block_size" in settings else verify(folder), verify(folder, own="vllm"), preempted


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=4, help="workloads for each setting")
    parser.add_argument("--steps", type=int, default=80, help="steps of a workload in which requests arrive")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    args = parser.parse_args()
    differences, totals = [], [0] * 6
    print(f"vllm {__version__}: scheduling calls of recorded workloads, derived by the rules and by vLLM")
    print(FORMAT.format(*COLUMNS), flush=True)
    for name in args.settings:
        settings = SETTINGS[name]
        counts = [args.seeds, 0, 0, 0, 0, 0]
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                *reports, preempted = workload(Path(folder) / "log", seed, args.steps, settings)
            counts[1] += reports[1].calls
            counts[2] += reports[1].requests
            counts[3] += preempted
            for place, report in enumerate(reports, 4):
                if report is None:
                    continue
                counts[place] += report.ok and report.rederived
                if not report.ok or not report.rederived:
                    differences.append(f"{name}, seed {seed}, {report.decider}: {_cause(report)}")
        shown = counts[:4] + ["-"] + counts[5:] if "hash_block_size" in settings else counts
        print(FORMAT.format(name, *shown), flush=True)
        totals = [sum(pair) for pair in zip(totals, counts, strict=True)]
    print(FORMAT.format("all", *totals))
    for line in differences:
        print(line)
    sys.exit(bool(differences))


def _cause(report):
    found = report.divergence
    if found is None:
        return report.caveat
    where = f"step {found.step}, {found.field}: logged {found.logged!r}, derived {found.derived!r}"
    return f"{where}; {found.rule}" if found.rule else where


if __name__ == "__main__":
    main()
