"""Tests Qwen3.5 models in GGUF files, dense and with experts. The tokens equal transformers' tokens for the
same file, and the tokens of the checkpoint folder that was converted. Some tests draft with the file's
multi-token-prediction head.
"""

import json

import numpy as np
import pytest
import torch

from mmengine.checkpoint.model_files import read_model_json
from mmengine.config import EngineConfig
from mmengine.errors import ModelError
from mmengine.native import library
from mmengine.serve.engine.engine import Engine
from mmengine_qwen3_5 import plugin
from tests.gguf.hybrid import write_hybrid
from tests.gguf.test_gguf_vision import CHATS, LIMITS
from tests.gguf.writing import ARRAY, BOOL, UINT32, Tensor
from tests.qwen3_5.mtp_heads import add_head
from tests.qwen3_5.tiny import make_text, make_whole

# With these sizes, rows are multiples of 256, the block size of K-quants.
SIZES = {
    "hidden_size": 256,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_attention_heads": 8,
    # The only layer order that transformers reads from a GGUF file.
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
DENSE = {"intermediate_size": 256}
MIXTURE = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
TEXTS = ("Hello there", "Two cats sat on a mat. " * 3, "Count: 1, 2, 3,")
NUM_NEW = 16


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "mixture"])
def made(request, tmp_path_factory):
    """Return the folder of a model with a multi-token-prediction head, and whether the model has experts."""
    folder = tmp_path_factory.mktemp("hybrid")
    more = MIXTURE if request.param else DENSE
    model = make_text(folder, mixture=request.param, **SIZES, **more)
    add_head(folder, model)
    return folder, request.param


def answers(model, asked=TEXTS, dtype="float32", **settings):
    """Return the answers' tokens, and the engine's statistics."""
    sizes = {"num_blocks": 257, "max_model_len": 256, "num_threads": 1, "spec": "none", "draft_policy": "all"}
    with Engine(model, device="cpu", dtype=dtype, config=EngineConfig.from_dict(sizes | settings)) as engine:
        found = engine.generate(list(asked), max_tokens=NUM_NEW, ignore_eos=True)
        return [each.token_ids for each in found], engine.stats()


def test_tokens_equal_the_folders(made, tmp_path):
    """The file and the folder give the same tokens, with and without drafts, and the same number of accepted
    drafts.
    """
    file = write_hybrid(made[0], tmp_path)
    wanted, _ = answers(made[0])
    assert len({token for tokens in wanted for token in tokens}) > NUM_NEW
    found, _ = answers(file)
    assert found == wanted
    counts = []
    for model in (made[0], file):
        found, stats = answers(model, spec="mtp", num_draft_tokens=3)
        assert found == wanted
        counts.append(stats.drafts[0])
    assert counts[0] == counts[1] and 0 < counts[0].accepted < counts[0].proposed


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K", "Q6_K"])
def test_tokens_are_transformers(made, tmp_path, kind):
    """With drafts, the tokens equal transformers' tokens for the same file."""
    import transformers

    file = write_hybrid(made[0], tmp_path, kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    ).eval()
    with Engine(file, device="cpu", dtype="float32", config=EngineConfig(spec="none")) as engine:
        prepared = [engine.processor.prepare([{"role": "user", "content": text}]) for text in TEXTS]
    wanted = []
    for each in prepared:
        ids = torch.from_numpy(each.prompt_token_ids.astype(np.int64))[None]
        with torch.inference_mode():
            out = model.generate(
                ids, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        wanted.append(out[0, ids.shape[1] :].tolist())
    found, stats = answers(file, spec="mtp", num_draft_tokens=3)
    assert found == wanted
    assert stats.drafts[0].accepted > 0


@pytest.mark.parametrize("mixture", [False, True])
def test_images_have_the_folders_answers(tmp_path, mixture):
    folder = tmp_path / "folder"
    folder.mkdir()
    add_head(folder, make_whole(folder, mixture=mixture))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"size": LIMITS}))
    file = write_hybrid(folder, tmp_path)
    config = read_model_json(file, "config.json")
    assert config["architectures"] == read_model_json(folder, "config.json")["architectures"]
    wanted, _ = answers(folder, CHATS, max_model_len=512)
    found, stats = answers(file, CHATS, max_model_len=512, spec="mtp", num_draft_tokens=3)
    assert found == wanted
    assert stats.drafts[0].accepted > 0


def edited(made, tmp_path, **values):
    """Write the file with changed metadata, and return its path. `values`: key -> (type, value), or None to
    remove the key. Keys omit the architecture's prefix and have `__` for a dot.
    """
    name = "qwen35moe" if made[1] else "qwen35"
    changes = {f"{name}.{key.replace('__', '.')}": value for key, value in values.items()}

    def edit(metadata):
        kept = [each for each in metadata if each[0] not in changes]
        return kept + [(key, *value) for key, value in changes.items() if value is not None]

    return write_hybrid(made[0], tmp_path, edit_keys=edit)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"nextn_predict_layers": (UINT32, 5)}, "nextn_predict_layers is 5, but the file has 5 layers"),
        ({"nextn_predict_layers": (UINT32, 2**20)}, "nextn_predict_layers is 1048576; it must be an integer"),
        ({"ssm__inner_size": (UINT32, 255)}, "inner_size is 255, which 4 value heads do not share evenly"),
        ({"ssm__inner_size": None}, "ssm.inner_size is missing"),
        ({"ssm__state_size": (UINT32, 2**20)}, "ssm.state_size is 1048576; it must be an integer"),
        ({"rope__dimension_sections": None}, "dimension_sections is None; three numbers are required"),
        ({"rope__dimension_count": (UINT32, 64)}, "rope.dimension_count is 64; it must be an integer"),
        ({"attention__recurrent_layers": (ARRAY, (BOOL, [True]))}, "an array of 1; 4 truth values are"),
        ({"ssm__dt_rank": (UINT32, 1)}, "ssm.dt_rank is 1, which is not supported"),
    ],
)
def test_wrong_metadata_is_refused_by_its_key(made, tmp_path, values, words):
    with pytest.raises(ModelError, match=words):
        plugin.read_config(edited(made, tmp_path, **values))


def test_the_kind_of_a_layer_is_the_files(made, tmp_path):
    """The key recurrent_layers overrides full_attention_interval."""
    flags = (ARRAY, (BOOL, [True, False, True, True, False]))
    config = plugin.read_config(edited(made, tmp_path, attention__recurrent_layers=flags))
    assert config.text.delta.layers == {0, 2, 3} and config.text.delta.tiled
    config = plugin.read_config(edited(made, tmp_path, attention__recurrent_layers=None))
    assert config.text.delta.layers == {0, 1, 2}


def without_head_parts(found):
    return [each for each in found if not each.name.endswith("eh_proj.weight")]


def with_positive_decay(found):
    return [
        Tensor(each.name, each.type, each.shape, np.ones(each.shape, np.float32).tobytes())
        if each.name == "blk.1.ssm_a"
        else each
        for each in found
    ]


def with_own_embedding(found):
    (own,) = [each for each in found if each.name == "token_embd.weight"]
    return [*found, Tensor("blk.4.nextn.embed_tokens.weight", own.type, own.shape, own.data)]


@pytest.mark.parametrize(
    "change, load, words",
    [
        (without_head_parts, plugin.draft_head, "have no tensor mtp.fc.weight"),
        (with_own_embedding, plugin.draft_head, "blk.4.nextn.embed_tokens.weight does not belong"),
        (
            with_positive_decay,
            lambda file: plugin.load_model(file, device="cpu", dtype="float32"),
            "tensor blk.1.ssm_a holds a value that is not negative",
        ),
    ],
)
def test_damaged_tensors_are_refused_by_name(made, tmp_path, change, load, words):
    file = write_hybrid(made[0], tmp_path, edit_tensors=change)
    with pytest.raises(ModelError, match=words):
        load(file)


@pytest.mark.skipif(library.load() is None, reason="needs the compiled kernels")
def test_kernels_and_torch_agree_on_tiled_heads(made, tmp_path, monkeypatch):
    """GGUF files store linear attention's value heads in tiled order."""
    file = write_hybrid(made[0], tmp_path)
    found, _ = answers(file)
    monkeypatch.setattr(library, "load", lambda: None)
    assert answers(file)[0] == found
