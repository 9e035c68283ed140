"""Tests how a model's name is resolved to a folder, and how the plugin for a folder is found."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from mmengine import registry as registries
from mmengine.errors import ModelError
from mmengine.models import loader, registry
from tests.any_model.catalogue import write as write_hosted
from tests.gguf.writing import model, vocabulary, weights, write


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package with entry points and modules during the test. All other
    entry points are hidden.
    """
    site = tmp_path / "site"
    ours = [str(site)]

    def entry_points(**select):
        found = importlib.metadata.distributions(path=ours)
        points = importlib.metadata.EntryPoints(point for dist in found for point in dist.entry_points)
        return points.select(**select)

    def do(entries, **modules):
        info = site / "fake-1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1\n")
        (info / "entry_points.txt").write_text(entries)
        for name, code in modules.items():
            (site / f"{name}.py").write_text(code)
        registry.load_plugins.cache_clear()

    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(registries, "entry_points", entry_points)
    monkeypatch.setattr(loader, "entry_points", entry_points)
    before = set(sys.modules)
    yield do
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]
    registry.load_plugins.cache_clear()


def model_folder(path, config):
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


QWEN = "[mmengine.models]\nqwen3_vl = mmengine_qwen3_vl:plugin\n"
FAKE = "class P:\n    architectures = ('FakeModel',)\nplugin = P()\n"


def test_the_plugin_is_chosen_by_architecture(install, tmp_path):
    install(QWEN + "fake = fake_one:plugin\n", fake_one=FAKE)
    qwen = model_folder(tmp_path / "qwen", {"architectures": ["Qwen3VLForConditionalGeneration"]})
    fake = model_folder(tmp_path / "fake", {"architectures": ["Unknown", "FakeModel"]})
    from mmengine_qwen3_vl import plugin

    assert registry.plugin_for(qwen) is plugin
    assert registry.plugin_for(fake).architectures == ("FakeModel",)


@pytest.mark.parametrize(
    "config, words",
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "is a LlamaForCausalLM; mmengine serves Qwen3VLForConditionalGeneration",
        ),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": [3]}, "names no architecture"),
        ({"architectures": "Qwen3VLForConditionalGeneration"}, "names no architecture"),
        ({}, "names no architecture"),
        ("{", "not valid JSON"),
        ("3", "must hold a JSON object"),
        ("[" * 10**5, "not valid JSON"),
    ],
)
def test_folders_that_no_plugin_serves(install, tmp_path, config, words):
    install(QWEN)
    with pytest.raises(ModelError, match=words):
        registry.plugin_for(model_folder(tmp_path / "model", config), "native")


def test_the_fallback_serves_what_no_plugin_describes(install, tmp_path):
    install(QWEN)
    qwen = model_folder(tmp_path / "qwen", {"architectures": ["Qwen3VLForConditionalGeneration"]})
    llama = model_folder(tmp_path / "llama", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    from mmengine_qwen3_vl import plugin
    from mmengine_transformers import plugin as fallback

    assert registry.plugin_for(qwen) is registry.plugin_for(qwen, "native") is plugin
    assert registry.plugin_for(llama) is registry.plugin_for(llama, "transformers") is fallback


def test_the_fallback_serves_a_config_that_the_plugin_refuses(install, tmp_path):
    """The Llama plugin serves Mistral without sliding windows. If the fallback also refuses a config, the
    plugin is chosen, because its error names the field.
    """
    install("[mmengine.models]\nllama = mmengine_llama:plugin\n")
    write_hosted("mistral", tmp_path)
    from mmengine_llama import plugin
    from mmengine_transformers import plugin as fallback

    chosen = registry.choose_plugin(tmp_path)
    assert chosen.plugin is fallback and "sliding_window 12 needs" in chosen.refusal
    assert registry.plugin_for(tmp_path, "native") is plugin
    config = json.loads((tmp_path / "config.json").read_text())
    model_folder(tmp_path / "broken", config | {"num_key_value_heads": 3})
    assert registry.choose_plugin(tmp_path / "broken") == (plugin, "")


def test_folders_that_are_no_models(install, tmp_path):
    install(QWEN)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no config.json"):
        registry.plugin_for(tmp_path / "empty")
    with pytest.raises(ModelError, match="no model folder"):
        registry.plugin_for(tmp_path / "gone")


def small_gguf(path, architecture="llama"):
    path.write_bytes(write(model(architecture) + vocabulary(), weights()).data)
    return path


def test_a_gguf_file_is_a_folder_of_its_architecture(install, tmp_path):
    install(
        "[mmengine.models]\nllama = fake_one:plugin\n", fake_one=FAKE.replace("FakeModel", "LlamaForCausalLM")
    )
    path = small_gguf(tmp_path / "model.gguf")
    assert registry.plugin_for(path).architectures == ("LlamaForCausalLM",)
    with pytest.raises(ModelError, match="is a Qwen3ForCausalLM; mmengine serves LlamaForCausalLM"):
        registry.plugin_for(small_gguf(tmp_path / "qwen.gguf", "qwen3"), "native")
    with pytest.raises(ModelError, match="general.architecture is 'gemma2'"):
        registry.plugin_for(small_gguf(tmp_path / "gemma.gguf", "gemma2"))
    with pytest.raises(ModelError, match="no config.json; give one of its GGUF files, such as gemma.gguf"):
        registry.plugin_for(tmp_path)
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="model.gguf: the file is not GGUF, or is cut short"):
        registry.plugin_for(path)


def test_plugins_that_cannot_be_used(install, tmp_path):
    folder = model_folder(tmp_path / "model", {"architectures": ["FakeModel"]})
    install("")
    with pytest.raises(ModelError, match="no model plugin is installed"):
        registry.plugin_for(folder)
    install("[mmengine.models]\nbad = fake_bad:plugin\n", fake_bad="raise RuntimeError('boom')")
    with pytest.raises(
        ModelError, match=r"bad \(fake_bad:plugin\) does not load: boom; update or uninstall fake 1$"
    ):
        registry.plugin_for(folder)
    install("[mmengine.models]\nbad = fake_none:plugin\n", fake_none="plugin = 3")
    with pytest.raises(ModelError, match="the entry point fake_none:plugin is no ModelPlugin"):
        registry.plugin_for(folder)
    install("[mmengine.models]\none = fake_one:plugin\ntwo = fake_two:plugin\n", fake_one=FAKE, fake_two=FAKE)
    with pytest.raises(ModelError, match="one .* and two .* both claim FakeModel"):
        registry.plugin_for(folder)


def test_nothing_named_means_the_embedded_checkpoint(install, tmp_path):
    folder = model_folder(tmp_path / "model", {})
    entry = "[mmengine.checkpoints]\ndefault = fake_path:path\n"
    install(entry, fake_path=f"def path():\n    return {str(folder)!r}\n")
    assert loader.resolve_folder(None) == folder
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="is missing from"):
        loader.resolve_folder(None)
    install("")
    with pytest.raises(ModelError, match="the included checkpoint is not installed"):
        loader.resolve_folder(None)


def test_the_embedded_checkpoint_of_the_repository(install):
    install("[mmengine.checkpoints]\ndefault = mmengine_shapes:checkpoint_path\n")
    folder = loader.resolve_folder(None)
    assert json.loads((folder / "config.json").read_text())["architectures"]


def test_a_folder_is_used_as_it_is(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "model", {})
    monkeypatch.chdir(tmp_path)
    assert loader.resolve_folder("model") == loader.resolve_folder(folder) == folder


@pytest.mark.parametrize(
    "name, words",
    [
        ("", "empty"),
        ("/no/such/folder", "no model folder"),
        ("./nothing", "no model folder"),
        ("a/b/c", "no model folder"),
        ("../../no-such", "no model folder"),
        (Path("org/model"), "no model folder"),
        ("\x00", "(not a valid path|no model folder)"),
        ("x" * 10**5, "(not a valid path|no model folder)"),
        ("~nobody-of-this-name/model", "not a valid path"),
        ("https://example.org/model", "no model folder"),
        ("models/none.gguf", "there is no file models/none.gguf; give a GGUF file"),
    ],
)
def test_invalid_model_names_are_refused(monkeypatch, name, words):
    monkeypatch.setattr(loader, "fetch_model", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match=words) as error:
        loader.resolve_folder(name)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["~nobody-of-this-name/mine", "\x00", "x" * 10**5])
def test_names_that_can_be_no_adapter(monkeypatch, name):
    monkeypatch.setattr(loader, "fetch_adapter", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="(not a valid path|no adapter folder)") as error:
        loader.resolve_adapter(name)
    assert len(str(error.value)) < 500


def test_a_gguf_path_is_used_as_it_is(tmp_path, monkeypatch):
    """A link to a GGUF file is not resolved, because a hub's cache links to files without a suffix."""
    small_gguf(tmp_path / "blob")
    path = tmp_path / "model.gguf"
    path.symlink_to(tmp_path / "blob")
    monkeypatch.chdir(tmp_path)
    assert loader.resolve_folder("model.gguf") == loader.resolve_folder(path) == path


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file"):
        loader.resolve_folder(tmp_path / "model.safetensors")
