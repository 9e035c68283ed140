"""Run sentence-transformers for `embedding_parity`: `python parity_side.py FOLDER PICTURE...`.

The results for the models in FOLDER go to stdout as a JSON object. All other output goes to stderr.
"""

import json
import os
import sys
from pathlib import Path

from benchmarks.pooling.embeddings_side import REPRESENT
from tests.serve.pipeline_sides import load_transformers

LOADED = {"device": "cpu", "local_files_only": True, "model_kwargs": {"dtype": "float32"}}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, *pictures = map(Path, sys.argv[1:])
    expected = json.loads((folder / "expected.json").read_text())
    load_transformers()
    import sentence_transformers
    from sentence_transformers import CrossEncoder, SentenceTransformer

    from benchmarks.pooling.parity import mixed_inputs

    embedder = SentenceTransformer(str(folder / "embedder"), **LOADED)
    mixed = SentenceTransformer(str(folder / "image_embedder"), **LOADED)
    reranker = CrossEncoder(str(folder / "reranker"), **LOADED)
    pairs = [(expected["query"], document) for document in expected["documents"]]
    found = {
        "version": sentence_transformers.__version__,
        "texts": embedder.encode(expected["texts"], prompt_name="document").tolist(),
        "queries": embedder.encode(expected["texts"], prompt_name="query").tolist(),
        "images": [mixed.encode([each], prompt=REPRESENT)[0].tolist() for each in mixed_inputs(pictures)],
        "scores": reranker.predict(pairs).tolist(),
    }
    print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
