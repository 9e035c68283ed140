"""Compares the answers of a Qwen2-VL or Qwen2.5-VL folder with those of its GGUF files, images included:

    python -m tests.gguf.qwen2_vl_answers FOLDER

Runs in a separate process, because transformers looks for torchvision only at import; table.py adds
build/torchvision to the path. FOLDER must be empty.
"""

import json
import sys
from pathlib import Path

from tests.any_model import table  # isort: skip - imported first, for torchvision
from mmengine import Engine
from tests.any_model.factories import write_factory
from tests.any_model.factories_grid import FACTORIES
from tests.gguf.hosted import write_qwen2_vl
from tests.pictures import asked, noise

CHATS = (
    asked("What is the time?"),
    asked(noise(0, (60, 90)), "What is in it?"),
    asked("Between ", noise(1, (90, 58)), " and ", noise(2, (48, 63)), ", which one?"),
)
LIMITS = {"shortest_edge": 3136, "longest_edge": 12845056}


def answers(model: Path) -> list[tuple[list[int], list]]:
    with Engine(model, device="cpu", dtype="float32", num_threads=1) as engine:
        found = engine.generate(list(CHATS), max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
        return [(each.token_ids, each.choices[0].logprobs) for each in found]


def main(kind: str, scratch: Path) -> None:
    folder = scratch / "folder"
    write_factory(FACTORIES[kind], folder)
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["image_processor"]["size"] = LIMITS
    path.write_text(json.dumps(settings))
    if kind == "qwen2_5_vl":  # GGUF files do not state the window, so the folder gets the default.
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["window_size"] = 112
        (folder / "config.json").write_text(json.dumps(config))
    expected = answers(folder)
    for swaps in (False, True):
        assert answers(write_qwen2_vl(folder, scratch, swaps=swaps)) == expected, swaps
    assert len({tuple(tokens) for tokens, _ in expected}) == len(CHATS)


if __name__ == "__main__":
    assert table.ROOT
    for name in ("qwen2_vl", "qwen2_5_vl"):
        (made := Path(sys.argv[1]) / name).mkdir()
        main(name, made)
