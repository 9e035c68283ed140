"""Tests that shared code names no model family. Code for a family belongs in its plugin."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "mmengine"
SHARED = ("gpu", "models", "native", "processing")
FAMILIES = re.compile(
    r"deepseek|florence|gemma|glm|granite|idefics|internlm|internvl|kimi|llama|llava|minicpm|mistral|molmo"
    r"|moondream|paligemma|phi-?\d|pixtral|qwen|smollm|smolvlm",
    re.IGNORECASE,
)
# Allowed names that contain a family's name: a rotary scaling type, and a program.
OTHERS = re.compile(r"\bllama3\b|llama\.cpp", re.IGNORECASE)


def named(text):
    return [line for line in text.splitlines() if FAMILIES.search(OTHERS.sub("", line))]


@pytest.mark.parametrize("folder", SHARED)
def test_shared_code_names_no_family(folder):
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    assert paths, "no such folder"
    found = {path.relative_to(ROOT): named(f"{path.name}\n{path.read_text()}") for path in paths}
    assert not {path: lines for path, lines in found.items() if lines}


def test_family_names_are_found_in_any_spelling():
    lines = ["QWEN = 2", "# as Qwen2VLImageProcessor", "from mmengine_qwen3_vl import plugin", "LlamaDecoder"]
    assert named("\n".join(["a = 1", *lines, "kind == 'llama3'", ""])) == lines
