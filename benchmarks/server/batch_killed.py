"""Kill the workers of a Ray Data batch, and count the tokens that mmengine and plain map_batches compute
twice.

    build/ray/bin/python -m benchmarks batch_killed [--requests 1000] [--kill-s 10] [--out FILE]

Both sides answer the same requests with the included checkpoint, greedy decoding, two workers and batches of
64 requests. mmengine's side is mmengine_ray.batch.AnswerLines. The plain side is a class that calls
transformers' `generate`. For the first two minutes on each side, a random worker is killed every --kill-s
seconds. If kills continued until the end, the plain side might never finish: its workers store nothing.

Each step lasts at least STEP_S seconds, so that kills hit running batches. mmengine's computed tokens are
counted in the logs. On the plain side a logits processor writes a byte for each token. Needs the environment
from `make ray`.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

STEP_S = 0.03  # Minimum duration of a step on both sides.
MAX_TOKENS = 48
KILLED_S = 120  # Maximum duration of the phase in which workers are killed.
BATCH = 64


def requests(number: int) -> list[str]:
    chosen = random.Random(5)
    words = ["circle", "square", "triangle", "star", "red", "green", "blue", "large", "small", "left"]
    return [
        json.dumps(
            {
                "custom_id": f"r{n}",
                "messages": [{"role": "user", "content": " ".join(chosen.choices(words, k=12))}],
                "max_tokens": MAX_TOKENS,
                "min_tokens": MAX_TOKENS,
            }
        )
        for n in range(number)
    ]


def paced_build(*given: object, **options: object) -> object:
    from mmengine.build import build

    built = build(*given, **options)
    collect = built.executor.collect

    def collected() -> object:
        time.sleep(STEP_S)
        return collect()

    built.executor.collect = collected
    return built


class PlainWorker:
    """A Ray Data worker that calls transformers' `generate`. Each process appends a byte per computed token
    to its own file in the folder `counts`.
    """

    def __init__(self, counts: str):
        import torch
        from transformers import AutoModelForImageTextToText, AutoTokenizer, LogitsProcessor

        from mmengine.models.loader import resolve_folder

        folder = resolve_folder(None)
        torch.set_num_threads(1)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
        self._file = open(Path(counts, f"{os.getpid()}"), "ab", buffering=0)  # noqa: SIM115
        file = self._file

        class Counting(LogitsProcessor):
            def __call__(self, input_ids: object, scores: object) -> object:
                time.sleep(STEP_S)
                file.write(b"." * len(scores))
                return scores

        self._counting = Counting()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        lines = [json.loads(line) for line in batch["text"]]
        texts = [
            self._tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True, tokenize=False)
            for line in lines
        ]
        inputs = self._tokenizer(texts, return_tensors="pt", padding=True)
        found = self._model.generate(
            **inputs,
            do_sample=False,
            min_new_tokens=MAX_TOKENS,
            max_new_tokens=MAX_TOKENS,
            logits_processor=[self._counting],
        )[:, inputs["input_ids"].shape[1] :]
        answers = [
            json.dumps({"custom_id": line["custom_id"], "token_ids": ids})
            for line, ids in zip(lines, found.tolist(), strict=True)
        ]
        return {"text": np.array(answers, dtype=object)}


def workers(name: str) -> list[int]:
    """Return the ids of Ray's worker processes whose command line contains `name`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::") and name.encode() in command:
            found.append(int(folder.name))
    return found


class Killer:
    """A thread that kills a random worker every `every_s` seconds, for at most KILLED_S seconds."""

    def __init__(self, name: str, every_s: float):
        self.num_kills, self._name, self._every_s = 0, name, every_s
        self._over, self._chosen = threading.Event(), random.Random(1)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        until = time.monotonic() + KILLED_S
        while not self._over.wait(self._every_s) and time.monotonic() < until:
            found = workers(self._name)
            if found:
                os.kill(self._chosen.choice(sorted(found)), signal.SIGKILL)
                self.num_kills += 1

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def run(
    lines: list[str], worker: type, options: dict[str, object], every_s: float
) -> tuple[dict, float, int]:
    """Answer the lines while workers are killed. Return the token ids by request id, the duration in seconds,
    and the number of kills.
    """
    import pyarrow
    import ray

    begun = time.monotonic()
    parts = [lines[at : at + BATCH] for at in range(0, len(lines), BATCH)]
    # Each Arrow table becomes a block in Ray, so each batch is a table.
    data = ray.data.from_arrow([pyarrow.table({"text": part}) for part in parts])
    mapped = data.map_batches(
        worker,
        fn_constructor_kwargs=options,
        batch_size=BATCH,
        concurrency=2,
        num_cpus=0.5,
        zero_copy_batch=False,
    )
    killer = Killer("MapBatches", every_s)
    try:
        rows = mapped.take_all()
    finally:
        killer.end()
    answers = {each["custom_id"]: each["token_ids"] for each in (json.loads(row["text"]) for row in rows)}
    return answers, time.monotonic() - begun, killer.num_kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kill-s", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import ray

    from mmengine.replay.queries.fleet import logs_in, replica_paths
    from mmengine_ray.batch import AnswerLines

    ray.init(
        num_cpus=4,
        object_store_memory=150 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    lines = requests(given.requests)
    with tempfile.TemporaryDirectory() as folder:
        root, counts = Path(folder, "logs"), Path(folder, "counts")
        root.mkdir()
        counts.mkdir()
        engine = {"max_num_seqs": BATCH, "num_threads": 1}
        options = {
            "root": str(root),
            "engine": engine,
            "builder": "benchmarks.server.batch_killed:paced_build",
        }
        ours = run(lines, AnswerLines, options, given.kill_s)
        ways, broken = replica_paths(logs_in(root))
        assert not broken, broken
        ours_computed = sum(way.num_computed for way in ways.values())
        print(f"AnswerLines: {len(ours[0])} answers, {ours[2]} kills, {ours[1]:.0f} s", flush=True)
        plain = run(lines, PlainWorker, {"counts": str(counts)}, given.kill_s)
        plain_computed = sum(path.stat().st_size for path in counts.iterdir())
    same = sum(ours[0].get(name) == ids for name, ids in plain[0].items())
    wanted = given.requests * MAX_TOKENS
    rows = [
        "| | answers | kills | seconds | tokens computed | twice |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {len(found)} | {kills} | {seconds:.0f} | {computed:,} | "
            f"{computed - wanted:,} ({100 * (computed - wanted) / wanted:.1f} %) |"
            for name, (found, seconds, kills), computed in (
                ("mmengine_ray.batch.AnswerLines", ours, ours_computed),
                ("map_batches over transformers", plain, plain_computed),
            )
        ),
    ]
    text = "\n".join(
        [*rows, "", f"{same} of {len(plain[0])} answers are equal on both sides, token by token."]
    )
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    ray.shutdown()


if __name__ == "__main__":
    main()
