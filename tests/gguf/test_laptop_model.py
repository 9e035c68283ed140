"""Runs the commands of docs/how-to/laptop-model.md with the included checkpoint as GGUF files."""

import os
import random
import subprocess
import sys

import pytest
from PIL import Image

from mmengine import Engine
from mmengine_shapes import checkpoint_path
from mmengine_shapes.scenes import random_scene
from tests.cli.cli_process import call_cli
from tests.gguf.vision import write_pair
from tests.project.doc_blocks import blocks, commands
from tests.server.test_server_command import address_of

PAGE = "docs/how-to/laptop-model.md"
QUESTION = "What is in the picture?"


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Write the page's files and a picture to the working folder, and return the page's commands."""
    monkeypatch.chdir(tmp_path)
    found = [each for block in blocks(PAGE, "sh") for each in commands(block)]
    model, projector = write_pair(checkpoint_path(), tmp_path, "BF16", "F32")
    model.rename(found[-1].split()[-1])
    projector.rename("mmproj-F16.gguf")
    # 256 x 256 pixels are the maximum for the checkpoint's own processor, and the minimum for the GGUF files'
    # processor, which has Qwen3-VL's limits. So neither processor resizes the picture.
    scene().save("picture.png")
    return found


def scene() -> Image.Image:
    return random_scene(random.Random(3)).draw().resize((256, 256))


def test_three_commands_serve_a_vision_model(shown, tmp_path):
    assert [each.split()[0] for each in shown] == ["pip", "mmengine", "mmengine"]
    checked = call_cli(*shown[1].split()[1:])
    assert checked.returncode == 0 and "Qwen3VLForConditionalGeneration" in checked.stdout
    with open("err", "w") as err:
        words = [*shown[2].split()[1:], "--port", "0", "--dtype", "float32"]
        process = subprocess.Popen([sys.executable, "-m", "mmengine.cli.main", *words], stderr=err)
    try:
        address = address_of(process, tmp_path / "err")
        (block,) = blocks(PAGE, "python")
        code = block.text.replace("http://127.0.0.1:8000", address)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    finally:
        process.kill()
        process.wait()
    assert (
        "projector mmproj-F16.gguf with the pixel limits of Qwen3-VL's processor"
        in (tmp_path / "err").read_text()
    )
    with Engine(device="cpu", dtype="float32") as engine:
        content = [{"type": "image", "image": scene()}, {"type": "text", "text": QUESTION}]
        (wanted,) = engine.generate([[{"role": "user", "content": content}]], max_tokens=40, temperature=0)
    assert done.stdout == wanted.text + "\n" and wanted.text, done.stderr
