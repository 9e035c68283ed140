"""What all models share names no family of models: what is one family's stands in its plugin."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOOR = ("mmengine/models", "mmengine/processing")  # folders
FAMILIES = re.compile("qwen", re.IGNORECASE)


def named(text):
    return [line for line in text.splitlines() if FAMILIES.search(line)]


@pytest.mark.parametrize("folder", FLOOR)
def test_the_floor_names_no_family(folder):
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    assert paths, "no such folder"
    found = {path.relative_to(ROOT): named(f"{path.name}\n{path.read_text()}") for path in paths}
    assert not {path: lines for path, lines in found.items() if lines}


def test_a_name_is_found_however_it_is_written():
    lines = ["QWEN = 2", "# as Qwen2VLImageProcessor", "from mmengine_qwen3_vl import plugin"]
    assert named("\n".join(["a = 1", *lines, ""])) == lines
