"""Embed with a single library, for the benchmark `embeddings`: `python embeddings_side.py SIDE FOLDER
THREADS`.

The process reads lines of JSON from stdin, each {"inputs", "prompt", "out"}. An input is a text or {"image":
path}. For each line, the process writes the elapsed seconds and the CPU seconds to stdout, and the vectors to
the file `out`. All other output goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
REPRESENT = "Represent the user's input."  # the system message that mmengine adds by default
# An Embed function returns an array. Its return type is Any, because numpy must be imported after the thread
# variables are set.
Embed = Callable[[Sequence[str | dict[str, str]], str], Any]


def mmengine(folder: str) -> Embed:
    """Return a function that embeds with `Engine.embed` and default settings."""
    from mmengine import Engine
    from mmengine.config import EngineConfig

    engine = Engine(folder, dtype="bfloat16", config=EngineConfig(spec="none"))
    return lambda inputs, prompt: engine.embed(list(inputs), prompt_name=prompt or None)


def sentence_transformers(folder: str) -> Embed:
    """Return a function that embeds with `SentenceTransformer.encode` and its default batches of 32."""
    has_images = "vision_config" in json.loads(Path(folder, "config.json").read_text())
    if has_images:
        from tests.serve.pipeline_sides import load_transformers

        load_transformers()  # with torchvision, which transformers' image processor needs
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        folder, device="cpu", local_files_only=True, model_kwargs={"dtype": "bfloat16"}
    )
    words = {"prompt": REPRESENT} if has_images else {}
    return lambda inputs, prompt: model.encode(list(inputs), **({"prompt_name": prompt} if prompt else words))


def cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def main() -> None:
    side, folder, threads = sys.argv[1:]
    for variable in THREAD_VARIABLES:
        os.environ[variable] = threads
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import numpy as np
    import torch

    torch.set_num_threads(int(threads))
    embed = {"mmengine": mmengine, "sentence-transformers": sentence_transformers}[side](folder)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        asks = json.loads(line)
        wall, cpu = time.perf_counter(), cpu_s()
        vectors = embed(asks["inputs"], asks["prompt"])
        told = {"wall": time.perf_counter() - wall, "cpu": cpu_s() - cpu}
        np.save(asks["out"], np.asarray(vectors, np.float32))
        print(json.dumps(told), file=out, flush=True)


if __name__ == "__main__":
    main()
