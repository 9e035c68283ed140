"""Records the golden log `killed`, which ends with a kill while 50 requests are live. `answers.json` in its
folder has the answers of an undisturbed run.

    python -m tests.golden.make_killed
"""

import json
import random
import shutil

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from mmengine.events.snapshots import SnapshotFolder
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.workloads import small_request
from tests.golden.make_golden import HERE

FINGERPRINTS = {"weights": "0" * 64, "processor": "1" * 64, "dtype": "float32"}
NUM_LIVE = 50
SETTINGS = {
    "max_num_seqs": 24,
    "token_budget": 256,
    "max_model_len": 128,
    "block_size": 8,
    "num_blocks": 200,
    "encoder_budget": 32,
    "encoder_cache_size": 64,
    "policy": "priority",
    "max_in_flight": 2,
    "checkpoint_interval": 16,
}


def config() -> EngineConfig:
    return EngineConfig(**SETTINGS)


def main() -> None:
    folder, rng = HERE / "killed", random.Random(7)
    shutil.rmtree(folder, ignore_errors=True)
    live = folder.with_name("killed.live")
    sink = LogWriter(live, wall_ns=lambda: 0, segment_bytes=60_000)
    executor = SimulatedExecutor(config(), eos_in=200)
    core = EngineCore(
        config(), executor, sink=sink, fingerprints=FINGERPRINTS, snapshots=SnapshotFolder(live, 80_000)
    )
    ends: dict[str, list] = {}
    tokens: dict[str, list[int]] = {}
    request, number, is_dead = None, 0, False
    while not is_dead or core.has_work:
        while not is_dead and len(core.state.requests) + len(core.inbox.queued) < NUM_LIVE:
            request = small_request(rng, f"r{number}", core.config, grammars=0.3, like=request)
            core.submit(request)
            if request.grammar is not None:
                core.inbox.put(ev.GrammarReady(request.request_id))
            tokens[request.request_id], number = [], number + 1
        for output in core.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = [output.finish_reason, output.detail]
                if int(output.request_id[1:]) % 5:
                    core.delivered(output.request_id)
                elif not is_dead:
                    ends[output.request_id].append("not delivered")
        if number > 100 and not is_dead and len(core.state.requests) == NUM_LIVE and core.state.flights:
            is_dead = True
            left = list(core.state.requests)
            shutil.copytree(live, folder, ignore=shutil.ignore_patterns("lock", "reserve"))
    core.close()
    shutil.rmtree(live)
    left += [one for one, end in ends.items() if end[2:]]
    told = {"answers": {one: [tokens[one], *ends[one][:2]] for one in left}}
    (folder / "answers.json").write_text(json.dumps(told, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
