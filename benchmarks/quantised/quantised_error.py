"""Measure how quantised weights change a real model's next-token distribution, compared with float32.

    python -m benchmarks quantised_error    # into benchmarks/results/quantised_error.md, a minute or two

SmolLM2-135M-Instruct (build/smollm2, see tests/gguf/fetched.py) has Q4_1 weights. They are written to a
bfloat16 folder. From this folder, FP8 and int4 folders are made by rounding to nearest, without calibration.
The engine computes the same 1,024 tokens from a page in docs/ with each format. For each token, the format's
next-token distribution q is compared with the distribution p in float32. The results are the KLD (the mean of
sum p (log p - log q), in nats) and how often p and q have the same most likely token.
"""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from safetensors.torch import save_file

from benchmarks.common.report import Table, machine_lines, markdown, show
from benchmarks.quantised.folders import quantised
from mmengine import Engine, EngineConfig
from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.models.network import Network
from mmengine.models.reader import open_reader
from mmengine.serve.prompt.prompt import Prompt
from tests.gguf.fetched import SMOLLM2, fetched  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results" / "quantised_error.md"
TITLE = "Error of quantised weights in the next token"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http.md"
TOKENS = 1024
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Form:
    """A storage format for SmolLM2's weights. `folder` is a format's name in quantised/folders.py; None is
    the bfloat16 folder.
    """

    name: str
    bits: str  # bits per weight in a decoder matrix
    head: str
    folder: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


FORMS = (
    Form("bfloat16", "16", "bfloat16"),
    Form("int8, groups of 32 (`--quantize int8`)", "8.5", "int8", settings={"quantize": "int8"}),
    Form(
        "the same, `--activations int8`", "8.5", "int8", settings={"quantize": "int8", "activations": "int8"}
    ),
    Form("FP8, 16 x 128 (`--quantize fp8`)", "8.25", "FP8", settings={"quantize": "fp8"}),
    Form("FP8 folder, 1 x 128", "8.25", "bfloat16", "fp8 rows"),
    Form("FP8 folder, 128 x 128", "8.0", "bfloat16", "fp8"),
    Form("int4 folder, groups of 32", "4.5", "bfloat16", "int4 32"),
    Form("the same, `--activations int8`", "4.5", "bfloat16", "int4 32", {"activations": "int8"}),
    Form("int4 folder, groups of 64", "4.25", "bfloat16", "int4 64"),
)


def main(
    out: Annotated[Path, typer.Option(help="Markdown file for the table.")] = RESULTS,
) -> None:
    """Compare all formats with float32, on this machine."""
    with tempfile.TemporaryDirectory() as made:
        plain = write_folder(fetched(SMOLLM2), Path(made) / "plain", torch.bfloat16)
        token_ids = read_token_ids(plain)
        wanted, _ = log_probabilities(plain, token_ids, "float32")
        table = Table(TITLE, ("held", "bits a weight", "head", "KLD", "same top token", "in memory as"))
        for form in FORMS:
            folder = quantised(plain, Path(made) / form.folder, form.folder) if form.folder else plain
            found, held = log_probabilities(folder, token_ids, "bfloat16", **form.settings)
            table.rows.append(
                (form.name, form.bits, form.head, *difference(wanted, found), held or "bfloat16")
            )
    table.notes.append(
        f"SmolLM2-135M-Instruct from its Q4_1 file; {TOKENS:,} tokens of {PAGE.name}; beside the engine's "
        "float32. Here int4 is rounded to nearest, which is not fit for serving: calibrated folders lose "
        "much less."
    )
    lines = machine_lines(torch.get_num_threads())
    show([table], lines)
    out.write_text(markdown(TITLE, [table], lines), encoding="utf-8")


def write_folder(file: Path, folder: Path, dtype: torch.dtype) -> Path:
    """Write a GGUF file as a folder with weights in `dtype`, and return the folder."""
    model = GGUFModel(file)
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(json.dumps(model.file(name)))
    entries = model.tensors(lambda name: name)
    with open_reader(entries, torch.device("cpu"), dtype) as reader:
        weights = {name: reader.read(name) for name in entries if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def read_token_ids(folder: Path) -> list[int]:
    """Return the first TOKENS token ids of PAGE."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PAGE.read_text()).ids[:TOKENS]


def log_probabilities(
    model: Path, token_ids: list[int], dtype: str, **settings: Any
) -> tuple[torch.Tensor, str]:
    """Return next-token log-probabilities, float32 [tokens - 1, vocab], for all tokens except the last. Also
    return the name of the weights' format in memory.
    """
    config = EngineConfig(spec="none", max_model_len=TOKENS + 16, token_budget=2 * TOKENS, **settings)
    said, compute = [], Network.logits

    def logits(network: Network, hidden: torch.Tensor) -> torch.Tensor:
        said.append(compute(network, hidden).float().clone())
        return said[-1]

    with (
        mock.patch.object(Network, "logits", logits),
        Engine(model, device="cpu", dtype=dtype, config=config) as engine,
    ):
        said.clear()
        engine.generate([Prompt(token_ids=token_ids)], max_tokens=1, prompt_logprobs=0)
        found = torch.cat(said)
        assert len(found) == len(token_ids), (
            "logits must have a row for the sampled token and for each prompt token but the first"
        )
        return found[1:].log_softmax(1), engine.built.spec.weights_held


def difference(wanted: torch.Tensor, found: torch.Tensor) -> tuple[str, str]:
    """Return the KLD of `found` from `wanted`, and the share of positions with the same most likely token."""
    # Rounding can make the sum negative if the distributions are nearly equal.
    kld = max((wanted.exp() * (wanted - found)).sum(1).mean().item(), 0.0)
    same = (wanted.argmax(1) == found.argmax(1)).float().mean().item()
    return f"{kld:.5f}", f"{same:.1%}"


if __name__ == "__main__":
    typer.run(main)
