"""Checks transformers' architectures that have no test factory (factories.py). Text models are built with
small sizes, and generate tokens. Models with media are only checked without weights, because running them
requires a processor.
"""

import tempfile
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmengine import Prompt
from mmengine.config import EngineConfig
from mmengine.errors import MMEngineError, ModelError, in_one_line
from mmengine.replay import verify
from mmengine.serve.engine.engine import Engine
from mmengine_transformers.network import record_layers
from mmengine_transformers.parts import parts_of
from mmengine_transformers.weights import build_empty
from tests.any_model.factories import BASE, VOCABULARY, Factory, Words, write_factory

NUM_NEW = 8
TEXTS = ("What is the time?", "Two cats sat on a mat, and one of them slept.", "1 + 2 = ?")
SETTINGS = {
    "num_blocks": 513,
    "max_model_len": 256,
    "num_threads": 1,
    "model_impl": "transformers",
    "block_size": 4,
    "token_budget": 8,
    "max_num_seqs": 4,
    "spec": "suffix",
    "draft_policy": "all",
}
_WIDTHS = {
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("shared_intermediate_size", "q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("v_head_dim", "head_dim", "global_head_dim", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(
        ("intermediate_size_mlp", "ffn_dim", "n_inner", "ffn_hidden_size", "mlp_hidden_size"), 96
    ),
    **dict.fromkeys(("n_embd", "word_embed_proj_dim", "d_model", "embedding_size"), 64),
    **dict.fromkeys(("n_positions", "max_seq_len"), 512),
}
_COUNTS = {
    **dict.fromkeys(("n_layer", "num_layers", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), 1),
    "zero_expert_num": 2,
    "num_kv_shared_layers": 2,
    "laurel_rank": 4,
    "sliding_window": 12,
    "attention_chunk_size": 12,
    "vocab_size_per_layer_input": VOCABULARY,
}
# Fields of published checkpoints that decide the verdict. The default config lacks these fields.
_LFM2 = {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}
_IMAGE_IDS = {"vocabulary_map": {"<image>": 9, "IMGIMGAZ": 10}}
_BLIP = {"image_token_index": 50265}
PUBLISHED: dict[str, dict[str, object]] = {
    "blip-2": _BLIP,
    "chameleon": _IMAGE_IDS,
    "emu3": _IMAGE_IDS,
    "instructblip": _BLIP,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm2_vl": {"text_config": {"model_type": "lfm2", **_LFM2}},
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Additional fields that are needed to build and run the small model.
SMALL: dict[str, dict[str, object]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "longcat_flash": {"head_dim": 8, "num_layers": 2},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
}
SIZES = MappingProxyType({**BASE, **_WIDTHS, **_COUNTS})


class NoSmallModel(Exception):
    """Raised if transformers cannot build or run a small model of this architecture."""


def typical_config(kind: str) -> PreTrainedConfig:
    """Return transformers' default config for a model type, with the fields in PUBLISHED."""
    return CONFIG_MAPPING[kind](**PUBLISHED.get(kind, {}))


def small_config(kind: str) -> PreTrainedConfig:
    """Return transformers' default config for a model type, with small sizes."""
    default = CONFIG_MAPPING[kind]().to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in default}
    for name in ("num_kv_shared_layers", "sliding_window", "attention_chunk_size"):
        if not default.get(name):
            sizes.pop(name, None)
    for name in ("moe_intermediate_size", "intermediate_size"):
        if isinstance(default.get(name), list):
            sizes[name] = [sizes[name]] * 4
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = 4
        sizes.pop("head_dim", None)
    sizes |= SMALL.get(kind, {})
    try:
        return CONFIG_MAPPING[kind](**sizes)
    except Exception:  # Some classes require as many KV heads as attention heads.
        return CONFIG_MAPPING[kind](**{**sizes, "num_key_value_heads": 4})


def run_shrunk(model_class: type[PreTrainedModel], kind: str) -> tuple[str, str]:
    """Run a small model, and return the verdict ("works", "refused" or "broken") and the reason.

    Raises NoSmallModel.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        try:
            model = write_factory(Factory(Words(), lambda _: model_class(small_config(kind))), folder)
            ids = [_ids(folder, text) for text in TEXTS]
            options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            wanted = [model.generate(each, **options)[0, each.shape[1] :].tolist() for each in ids]
        except Exception as error:  # Small sizes may break an assumption in the class.
            raise NoSmallModel(in_one_line(error, 160)) from error
        config = EngineConfig.from_dict(SETTINGS)
        log = Path(place) / "log"
        try:
            with Engine(folder, device="cpu", dtype="float32", config=config, log=log) as engine:
                prompts = [Prompt(token_ids=each[0].tolist()) for each in ids]
                answers = engine.generate(prompts, max_tokens=NUM_NEW, ignore_eos=True)
        except ModelError as error:
            return "refused", error.text.replace(str(folder), "the folder")[:300]
        except MMEngineError as error:
            return "broken", error.text.replace(str(folder), "the folder")[:300]
        if [answer.token_ids for answer in answers] != wanted:
            return "broken", "the tokens differ from transformers'"
        return ("works", "") if verify(log).ok else ("broken", "the log does not verify")


def check_empty(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Run the model's decoder on the meta device, and return the plugin's error text, or "" without an error.
    Also returns "" if the decoder needs tensor values. Raises NoSmallModel if the model cannot be built.
    """
    with torch.inference_mode():
        try:
            model = build_empty(model_class, config, torch.bfloat16)
        except ModelError as error:
            raise NoSmallModel(error.text[:160]) from error
        try:
            record_layers(parts_of(model), torch.device("meta"))
        except ModelError as error:
            return error.text[:300]
        except Exception:  # A mixture of experts needs tensor values.
            return ""
    return ""


def _ids(folder: Path, text: str) -> torch.Tensor:
    from transformers import AutoTokenizer

    return torch.tensor([AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)])
