"""Write a log to debug: 1,000 requests, a KV pool that is often too small, and a planted bug.

python examples/debugging/night.py night.log
"""

import random
import sys
from pathlib import Path

import planted  # noqa: F401 - importing it plants the bug

from mmengine.config import EngineConfig
from mmengine.errors import MMEngineError
from mmengine.events.log import LogWriter
from mmengine.simulation import Driver, Settings, SimRequest, Workload
from mmengine.simulation.simulated_executor import CostModel
from mmengine.simulation.workload import generated_tokens, image_item

CONFIG = EngineConfig(
    max_num_seqs=16,
    token_budget=256,
    max_model_len=640,
    num_blocks=1 + 64,
    encoder_budget=256,
    encoder_cache_size=560,
    checkpoint_interval=64,
)


def request(rng: random.Random, number: int, arrival_ns: int) -> SimRequest:
    """Return a request with one of five system prompts, up to three images from a set of 200, and a
    question.
    """
    media, place = [], 48
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3])):
        name = f"image {rng.randrange(200)}"
        size = 32 + 16 * (sum(name.encode()) % 6)
        media.append(image_item(place, size, name))
        place += size + 8
    shared, length = f"system {rng.randrange(5)}", place + rng.randint(16, 120)

    def prompt():
        tokens = generated_tokens(f"question {number}", 0, length)
        tokens[:48] = generated_tokens(shared, 0, 48)
        return tokens

    return SimRequest(f"req-{number:04d}", length, prompt, rng.randint(2, 12), arrival_ns, tuple(media))


def main(folder: Path) -> None:
    rng, requests, now = random.Random(31857), [], 0
    for number in range(1000):
        now += int(rng.expovariate(1 / 10.7e6))
        requests.append(request(rng, number, now))
    work = Workload("night", requests, timed=True)
    log = LogWriter(folder)
    try:
        Driver(work, Settings(CONFIG, CostModel(step_ns=6_000_000)), log=log).run()
        print("the night went well")
    except MMEngineError as error:
        print(f"the engine stopped: {error}")
    finally:
        log.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
