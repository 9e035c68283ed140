"""Tests that a model which cannot be served is refused in one sentence, before weights are read."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mmengine.errors import ModelError
from mmengine_transformers import network, plugin
from mmengine_transformers.media.processors import open_processor
from mmengine_transformers.torchvision import import_reason
from tests.any_model.catalogue import write

BROKEN_TORCHVISION = """
import sys, pathlib
from mmengine.errors import ModelError
from mmengine_transformers import plugin
try:
    plugin.check(pathlib.Path(sys.argv[1]))
except ModelError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad") / "gemma3"
    write("gemma3", folder)
    (folder / "model.safetensors").unlink()  # All refusals come before weights are read.
    return folder


def edited(folder, name, **fields):
    path = folder / name
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **fields}))


def copy_of(made, tmp_path):
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def refusal(folder):
    with pytest.raises(ModelError) as caught:
        plugin.describe(folder)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500
    return text


def test_a_processor_with_code_in_the_folder_is_not_run(made, tmp_path):
    folder = copy_of(made, tmp_path)
    (folder / "code.py").write_text("raise SystemExit")
    for path in folder.glob("*processor_config.json"):
        edited(folder, path.name, auto_map={"AutoProcessor": "code.New"}, processor_class="NewProcessor")
    assert "names code in the folder (auto_map), which is never run" in refusal(folder)


def test_a_processor_that_needs_torchvision_names_torchvision(made, tmp_path):
    folder = copy_of(made, tmp_path)
    for path in folder.glob("*processor_config.json"):
        path.unlink()
    edited(folder, "config.json", architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl")
    found = {"processor_class": "Qwen2VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
    edited(folder, "preprocessor_config.json", **found)
    edited(folder, "config.json", image_token_id=4, text_config={}, vision_config={})
    text = refusal(folder)
    assert "needs torchvision, which is not installed; install the torchvision that belongs to torch" in text


def test_a_processor_that_is_missing_is_named(made, tmp_path):
    folder = copy_of(made, tmp_path)
    for path in folder.glob("*processor_config.json"):
        path.unlink()
    assert "has none of processor_config.json, preprocessor_config.json" in refusal(folder)


def test_a_processor_of_an_unknown_class_is_refused(made, tmp_path):
    folder = copy_of(made, tmp_path)
    for path in folder.glob("*processor_config.json"):
        edited(folder, path.name, processor_class="NewProcessor")
    assert "finds no processor for images, only a TokenizersBackend" in refusal(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image_seq_length": 10**9}, "image_seq_length is 1000000000; the limit is 65,536"),
        (
            {"image_processor": {"size": {"height": 10**6}}},
            "image_processor.size.height is 1000000; the limit",
        ),
    ],
)
def test_absurd_sizes_of_a_processor_are_refused(made, tmp_path, values, words):
    folder = copy_of(made, tmp_path)
    for path in folder.glob("*processor_config.json"):
        edited(folder, path.name, **values)
    assert words in refusal(folder)


def test_an_image_token_that_the_tokenizer_lacks_is_named(made, tmp_path):
    folder = copy_of(made, tmp_path)
    edited(folder, "config.json", image_token_id=300, image_token_index=300)
    assert "token 300, which stands for an image's embeddings" in refusal(folder)


@pytest.mark.soak  # Importing transformers again takes seconds.
def test_a_torchvision_that_does_not_fit_torch_is_named(made, tmp_path):
    """The error tells that torchvision does not fit torch. A fake package fails on import, as PyPI's
    torchvision does with a CPU build of torch.
    """
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    info = tmp_path / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    path = [str(tmp_path), *filter(None, sys.path)]
    command = f"import sys; sys.path[:0] = {path!r}{BROKEN_TORCHVISION}"
    done = subprocess.run(
        [sys.executable, "-c", command, made], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert "needs torchvision, and the installed one does not fit torch; install" in done.stdout


def test_a_missing_package_is_named():
    error = ImportError("SmolVLMProcessor requires the num2words library")
    assert "needs a package that is not installed: ImportError: SmolVLM" in import_reason("it", error)


def test_modules_that_fail_in_the_tests_at_load_are_refused_by_name(tmp_path, monkeypatch):
    write("olmo2", tmp_path)

    def fail(*_):
        raise AttributeError("'Linear' object has no attribute 'layers'")

    monkeypatch.setattr(network, "check_masks", fail)
    with pytest.raises(ModelError, match=r"Olmo2ForCausalLM .* fail in a test at load: .*'Linear' object"):
        plugin.load_model(tmp_path, device="cpu", dtype="float32")


def test_a_model_folder_needs_no_temporary_folder(tmp_path, monkeypatch):
    """The processor opens although the system's temporary folder is missing."""
    write("gemma3", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert type(open_processor(tmp_path)).__name__ == "Gemma3Processor"
