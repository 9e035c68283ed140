"""What all models stand on names none of them: a family's name and constants are its plugin's."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "mmengine"
FLOOR = ("checkpoint", "gpu", "models", "native", "processing")
FAMILY = re.compile(
    r"aya|cogvlm|deepseek|florence|gemma|glm|granite|idefics|internlm|internvl|kimi|llama|llava|minicpm|mistral"
    r"|molmo|moondream|ovis|paligemma|phi-?\d|pixtral|qwen|smollm|smolvlm",
    re.IGNORECASE,
)
# A kind of rotary scaling that many families take, and a program.
OTHERS = re.compile(r"\bllama3\b|llama\.cpp", re.IGNORECASE)


def named(text):
    return FAMILY.findall(OTHERS.sub("", text))


def test_nothing_on_the_floor_names_a_family():
    files = [
        file for room in FLOOR for file in (ROOT / room).rglob("*") if file.suffix in (".py", ".cpp", ".h")
    ]
    assert len(files) > 50
    found = {str(file.relative_to(ROOT)): names for file in files if (names := named(file.read_text()))}
    assert not found


def test_a_name_would_be_found():
    assert named("The decoder of Qwen3") and named("class LlamaDecoder") and not named('kind == "llama3"')
