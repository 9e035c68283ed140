"""What all models share names no family of models: what is one family's stands in its plugin."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "mmengine"
FLOOR = ("gpu", "models", "native", "processing")
FAMILIES = re.compile(
    r"deepseek|florence|gemma|glm|granite|idefics|internlm|internvl|kimi|llama|llava|minicpm|mistral|molmo"
    r"|moondream|paligemma|phi-?\d|pixtral|qwen|smollm|smolvlm",
    re.IGNORECASE,
)
OTHERS = re.compile(r"\bllama3\b|llama\.cpp", re.IGNORECASE)  # a kind of rotary scaling, and a program


def named(text):
    return [line for line in text.splitlines() if FAMILIES.search(OTHERS.sub("", line))]


@pytest.mark.parametrize("folder", FLOOR)
def test_the_floor_names_no_family(folder):
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    assert paths, "no such folder"
    found = {path.relative_to(ROOT): named(f"{path.name}\n{path.read_text()}") for path in paths}
    assert not {path: lines for path, lines in found.items() if lines}


def test_a_name_is_found_however_it_is_written():
    lines = ["QWEN = 2", "# as Qwen2VLImageProcessor", "from mmengine_qwen3_vl import plugin", "LlamaDecoder"]
    assert named("\n".join(["a = 1", *lines, "kind == 'llama3'", ""])) == lines
