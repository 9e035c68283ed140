"""Runs a process of a sharded batch, with a fake executor. Arguments: FOLDER SHARD COUNT PAUSE. PAUSE:
additional seconds per step.
"""

import sys
from functools import partial
from pathlib import Path

from mmengine.cli.batch import run_batch_file
from mmengine.cli.batch_shards import Shards
from mmengine.serve.batch.request_file import Shard
from mmengine.serve.engine.engine import Engine
from tests.serve.serve_fakes import EchoExecutor, builder


def run(folder: Path, own: Shard, pause_s: float = 0.0) -> int:
    import time

    class Slow(EchoExecutor):
        def collect(self):
            time.sleep(pause_s)
            return super().collect()

    build, requests = builder(executor_class=Slow), folder / "requests.jsonl"

    def engine(log, resume):
        return Engine(builder=build, log=log, resume=resume)

    def run_shard(answers, log, shard):
        return run_batch_file(requests, answers, log, partial(engine, log), None, shard)

    return Shards(requests, folder / "answers.jsonl", folder / "logs", own).run(run_shard)


if __name__ == "__main__":
    folder, index, count, pause_s = sys.argv[1:]
    sys.exit(run(Path(folder), Shard(int(index), int(count)), float(pause_s)))
