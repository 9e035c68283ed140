"""Tests a LoRA adapter on a hybrid model with gated attention and delta nets. Tokens equal transformers'
tokens with merged weights. Cached states are used only for requests with the same adapter.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from mmengine.config import EngineConfig
from mmengine.replay import verify
from mmengine.serve.engine.engine import Engine
from tests.qwen3_5.tiny import make_text

NUM_NEW, RANK, ALPHA = 12, 6, 9
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
MODULES += ("gate_proj", "up_proj", "down_proj")
PROMPTS = ("Hello there", "Two cats sat on a mat. " * 3, "Two cats sat on a mat. " * 3 + "And then?", "Hello")
SETTINGS = {
    "at once": {"enable_prefix_caching": False},
    "in chunks": {"enable_prefix_caching": False, "token_budget": 12, "max_num_seqs": 5},
    "from kept states": {"snapshot_every": 8},
}


def write_adapter(model, folder):
    """Make a random adapter, write it to `folder` in PEFT's format, and merge it into the weights of
    `model`.
    """
    random, stored = torch.Generator().manual_seed(5), {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in MODULES:
                out, width = module.weight.shape
                a = torch.randn(RANK, width, generator=random) / width**0.5
                b = 0.7 * torch.randn(out, RANK, generator=random) / RANK**0.5
                for part, value in (("A", a), ("B", b)):
                    stored[f"base_model.model.{name}.lora_{part}.weight"] = value
                module.weight.add_(ALPHA / RANK * b @ a)
    assert len(stored) == 2 * (3 * 3 + 4 + 4 * 3)
    save_file(stored, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def greedy(model, ids):
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a model's folder, an adapter's folder, and each prompt's tokens without the adapter ("") and
    with the adapter.
    """
    folder, adapter = tmp_path_factory.mktemp("hybrid"), tmp_path_factory.mktemp("adapter")
    model = make_text(folder)
    with engine_of(folder) as engine:
        prepared = [
            engine.processor.prepare([{"role": "user", "content": prompt}]).prompt_token_ids
            for prompt in PROMPTS
        ]
    ids = [torch.from_numpy(each).long()[None] for each in prepared]
    wanted = {"": [greedy(model, each) for each in ids]}
    write_adapter(model, adapter)
    wanted["adapted"] = [greedy(model, each) for each in ids]
    assert all(one != other for one, other in zip(*wanted.values(), strict=True))
    return folder, adapter, wanted


def engine_of(folder, adapters=None, log=None, **settings):
    sizes = {"num_blocks": 257, "block_size": 4, "max_model_len": 256, "spec": "none", "num_threads": 1}
    config = EngineConfig.from_dict(sizes | {"lora_bytes": 2**20} | settings)
    return Engine(folder, device="cpu", dtype="float32", config=config, log=log, loras=adapters)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_equal_the_merged_weights(made, tmp_path, name):
    folder, adapter, wanted = made
    with engine_of(folder, {"adapted": adapter}, tmp_path / "log", **SETTINGS[name]) as engine:
        for _ in range(2):
            asked, found = {}, {}
            for place, prompt in enumerate(PROMPTS):
                for which in wanted:
                    more = {"adapter": which} if which else {}
                    answer = engine.submit(prompt, max_tokens=NUM_NEW, ignore_eos=True, stream=False, **more)
                    asked[answer] = which, place
            while engine.has_work:
                found |= {out.request_id: out.completion for out in engine.step() if out.completion}
            for answer, (which, place) in asked.items():
                assert found[answer].choices[0].token_ids == wanted[which][place], (which, place)
        assert (engine.stats().num_cached_tokens > 0) is (name == "from kept states")
    report = verify(tmp_path / "log", invariants=True)
    assert report.ok and report.rederived and not report.unfinished
