"""Compare vectors and scores with transformers and sentence-transformers, on tiny models in float32.

    python -m benchmarks embedding_parity      # needs the environment of `make clients`

A row of the table has the largest absolute difference between two results. sentence-transformers runs in its
own process and reads the same model folders.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common.report import Table, Target, machine_lines, markdown, show, target_table
from benchmarks.pooling.embeddings import ENVIRONMENT, ROOT, SIDE_VARIABLES
from benchmarks.pooling.embeddings_side import REPRESENT

RESULTS = ROOT / "benchmarks" / "results" / "embedding_parity.md"
CLOSE = 1e-5  # target
SIDE = Path(__file__).with_name("parity_side.py")
# The system message of the image reranker's prompts.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
RETRIEVE = "Given a search query, retrieve relevant candidates that answer the query."
YES, NO = 31, 42  # the image reranker's token ids
SENTENCE_TRANSFORMERS, TRANSFORMERS = "sentence-transformers", "transformers"


class Rows:
    """A table with a row for each comparison."""

    def __init__(self) -> None:
        self.table = Table(
            "Differences", ("model", "inputs", "compared with", "values", "largest difference")
        )
        self.largest = 0.0

    def add(self, model: str, inputs: str, reference: str, found: Any, wanted: Any) -> None:
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        if found.shape != wanted.shape:
            raise SystemExit(f"{model}, {inputs}: {found.shape} values instead of {wanted.shape}")
        difference = float(np.abs(found - wanted).max())
        self.largest = max(self.largest, difference)
        self.table.rows.append((model, inputs, reference, f"{found.size:,}", f"{difference:.1e}"))


def sentence_transformers(folder: Path, pictures: Sequence[Path]) -> dict[str, Any]:
    """Return sentence-transformers' results for the models in a folder, keyed by comparison."""
    command = [str(ENVIRONMENT), "-W", "ignore", str(SIDE), str(folder), *map(str, pictures)]
    environment = {**os.environ, **SIDE_VARIABLES}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def compare_texts(rows: Rows, folder: Path, theirs: dict[str, Any]) -> None:
    """Compare the text models: an embedding model and a reranker."""
    from mmengine import Engine
    from tests.clients.pooled_models import DOCUMENTS, OPTIONS, QUERY, TEXTS
    from tests.pooling.pooled_folders import embedding_folder, reranker_folder, text_logits, text_state, unit

    model = embedding_folder(folder / "embedder")
    with Engine(folder / "embedder", token_budget=64, **OPTIONS) as engine:
        tokenizer = engine.processor.tokenizer
        ids = [[*tokenizer.text_prefix, *tokenizer.encode(text), *tokenizer.text_suffix] for text in TEXTS]
        states = [text_state(model, each) for each in ids]
        name, inputs = "Qwen3 embedding", f"{len(TEXTS)} texts in steps of 64 tokens"
        vectors = engine.embed(TEXTS)
        wanted = [unit(state) for state in states]
        rows.add(name, inputs, TRANSFORMERS, vectors, wanted)
        rows.add(name, inputs, SENTENCE_TRANSFORMERS, vectors, theirs["texts"])
        rows.add(name, "again, from the prefix cache", TRANSFORMERS, engine.embed(TEXTS), wanted)
        queries = engine.embed(TEXTS, prompt_name="query")
        rows.add(name, "queries with an instruction", SENTENCE_TRANSFORMERS, queries, theirs["queries"])
        wanted = [unit(state, 16) for state in states]
        rows.add(name, "16 dimensions", TRANSFORMERS, engine.embed(TEXTS, dimensions=16), wanted)
        rows.add(name, "not normalised", TRANSFORMERS, engine.embed(TEXTS, normalize=False), states)
    model = reranker_folder(folder / "reranker")
    with Engine(folder / "reranker", **OPTIONS) as engine:
        from tests.pooling.test_embeddings_and_rerankers import prompt_of

        logits = [text_logits(model, prompt_of(engine, QUERY, document)) for document in DOCUMENTS]
        odds = engine.score(QUERY, DOCUMENTS, raw=True)
        name, inputs = "Qwen3 reranker", f"{len(DOCUMENTS)} documents"
        rows.add(name, f"{inputs}, log-odds", TRANSFORMERS, odds, [each[11] - each[7] for each in logits])
        scores = engine.score(QUERY, DOCUMENTS)
        rows.add(name, f"{inputs}, probabilities", SENTENCE_TRANSFORMERS, scores, theirs["scores"])


def compare_images(rows: Rows, folder: Path, pictures: Sequence[Path], theirs: dict[str, Any]) -> None:
    """Compare the image models: an embedding model and a reranker, with the included checkpoint's weights."""
    from mmengine import Engine
    from tests.clients.pooled_models import OPTIONS
    from tests.pooling.pooled_folders import media_folder, media_outputs, unit

    def user(*parts: dict[str, Any]) -> dict[str, Any]:
        return {"role": "user", "content": list(parts)}

    def image(path: Path) -> dict[str, Any]:
        return {"type": "image", "image": str(path)}

    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    inputs = mixed_inputs(pictures)
    with Engine(folder / "image_embedder", token_budget=48, **OPTIONS) as engine:
        vectors, states = engine.embed(inputs), []
        for each in inputs:
            given = {"text": each} if isinstance(each, str) else each
            parts = [image(Path(given["image"]))] if "image" in given else []
            parts += [text(given["text"])] if "text" in given else []
            system = {"role": "system", "content": [text(REPRESENT)]}
            states.append(media_outputs(engine.processor, [system, user(*parts)])[0])
        name, what = "Qwen3-VL embedding", f"{len(inputs)} images, images with a text, and texts"
        rows.add(name, what, TRANSFORMERS, vectors, [unit(state) for state in states])
        rows.add(name, what, SENTENCE_TRANSFORMERS, vectors, theirs["images"])
    tokens = {"true_token_id": YES, "false_token_id": NO}
    media_folder(folder / "image_reranker", "LogitScore", LogitScore=tokens)
    with Engine(folder / "image_reranker", **OPTIONS) as engine:
        found = engine.score("two circles", [{"image": str(path)} for path in pictures], raw=True)
        before, odds = f"<Instruct>: {RETRIEVE}<Query>:two circles\n<Document>:", []
        for path in pictures:
            messages = [{"role": "system", "content": JUDGE}, user(text(before), image(path))]
            logits = media_outputs(engine.processor, messages)[1]
            odds.append(logits[YES] - logits[NO])
        rows.add("Qwen3-VL reranker", f"{len(pictures)} images, log-odds", TRANSFORMERS, found, odds)


def mixed_inputs(pictures: Sequence[Path]) -> list[Any]:
    """Return three inputs for each picture: the picture alone, the picture with a text, and a text alone."""
    return [
        each
        for number, path in enumerate(map(str, pictures))
        for each in ({"image": path}, {"image": path, "text": f"{number} circles"}, f"a red square {number}")
    ]


def main(
    images: Annotated[int, typer.Option(min=1, help="Number of pictures.")] = 8,
    out: Annotated[Path, typer.Option(help="Markdown file for the table.")] = RESULTS,
) -> None:
    """Compare embeddings and scores with transformers and sentence-transformers."""
    from mmengine_shapes.scenes import random_scene
    from tests.clients.pooled_models import write_models

    if not ENVIRONMENT.exists():
        raise SystemExit("sentence-transformers is not installed: run `make clients` first")
    rows = Rows()
    with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
        folder = Path(temporary)
        write_models(folder)
        pictures = [folder / f"{seed}.png" for seed in range(images)]
        for seed, path in enumerate(pictures):
            random_scene(random.Random(seed)).draw().save(path)
        theirs = sentence_transformers(folder, pictures)
        compare_texts(rows, folder, theirs)
        compare_images(rows, folder, pictures, theirs)
    tables = [rows.table, target_table([Target("Largest difference", rows.largest, CLOSE, most=True)])]
    rows.table.notes.append(
        "The text models have tiny random weights. The image models have the included checkpoint's weights. "
        f"sentence-transformers {theirs['version']}."
    )
    lines = machine_lines(1)
    show(tables, lines)
    out.write_text(markdown("Embeddings and scores beside their references", tables, lines), encoding="utf-8")
    sys.exit(rows.largest > CLOSE)


if __name__ == "__main__":
    typer.run(main)
