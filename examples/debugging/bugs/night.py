"""Write the log of an engine with a bug from this folder. The engine runs 1,000 requests, some with shared
images, in a KV pool that is often too small.

python examples/debugging/bugs/night.py victim victim.log

The name `none` runs the same requests without a bug.
"""

import random
import sys
from importlib import import_module
from pathlib import Path

from mmengine.config import EngineConfig
from mmengine.events.log import LogWriter
from mmengine.simulation import Driver, Settings, SimRequest, Workload
from mmengine.simulation.simulated_executor import CostModel
from mmengine.simulation.workload import NEVER, generated_tokens, image_item

SETTINGS = {
    "max_num_seqs": 16,
    "token_budget": 128,
    "max_model_len": 640,
    "num_blocks": 1 + 64,
    "encoder_budget": 256,
    "encoder_cache_size": 512,
    "checkpoint_interval": 256,
}


def request(rng: random.Random, number: int, arrival_ns: int) -> SimRequest:
    """Return a request with a system prompt (from five) and up to two images (from 100). Every fourth request
    stops early.
    """
    media, place = [], 48
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        name = f"image {rng.randrange(100)}"
        size = 32 + 16 * (sum(name.encode()) % 6)
        media.append(image_item(place, size, name))
        place += size + 8
    shared, length = f"system {rng.randrange(5)}", place + rng.randint(16, 120)

    def prompt():
        tokens = generated_tokens(f"question {number}", 0, length)
        tokens[:48] = generated_tokens(shared, 0, 48)
        for item in media:
            (start, size), *_ = item.runs
            tokens[start : start + size] = 151655  # placeholders, the same for each image
        return tokens

    most = rng.randint(4, 64)
    stop = {"stop_token": 7, "stop_at": most // 2} if number % 4 == 0 else {"stop_at": NEVER}
    return SimRequest(f"req-{number:04d}", length, prompt, most, arrival_ns, tuple(media), **stop)


def main(name: str, folder: Path, num_requests: int = 1000) -> None:
    bug = None if name == "none" else import_module(name)  # plants the bug
    config = EngineConfig(**{**SETTINGS, **getattr(bug, "SETTINGS", {})})
    rng, requests, now = random.Random(31857), [], 0
    for number in range(num_requests):
        now += int(rng.expovariate(1 / 50e6))
        requests.append(request(rng, number, now))
    log = LogWriter(folder)
    try:
        Driver(
            Workload(name, requests, timed=True), Settings(config, CostModel(step_ns=6_000_000)), log=log
        ).run()
    except Exception as error:  # a bug may raise anything
        print(f"the engine stopped: {error}")
    finally:
        log.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
