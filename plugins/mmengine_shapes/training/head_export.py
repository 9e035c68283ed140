"""Writes a trained draft head as a hub folder, in the layout of EAGLE, SpecForge and SGLang, or in the layout
of speculators. Also reads the first layout.

python -m mmengine_shapes.training.head_export HEAD.pt FOLDER [--speculators FOLDER]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmengine_qwen3_vl.config import read_config
from mmengine_shapes import checkpoint_path
from mmengine_shapes.training.head_model import DraftHead, HeadShape
from mmengine_shapes.training.head_start import EMBEDDING
from mmengine_shapes.training.head_target import stored

STORED = torch.float16


def tensors_of(head: DraftHead, vocabulary: Tensor) -> dict[str, Tensor]:
    """Return the head's tensors by hub name. `d2t`, int64 [draft_vocab]: the offset from a draft id to the
    target's id. `t2d`, bool [vocab]: whether a target id has a draft id.
    """
    weights = {name: value.detach().to(STORED).contiguous() for name, value in head.state_dict().items()}
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[vocabulary] = True
    return {**weights, "d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": known}


def layer_config(head: DraftHead) -> dict[str, Any]:
    """Return the decoder layer's configuration in LlamaConfig's format."""
    config = head.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": head.shape.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": list(config.rope.sections or ()),
            "rope_type": "default",
        },
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def switches(head: DraftHead) -> dict[str, Any]:
    """Return the options that both layouts store in addition to `layer_config`. An auxiliary layer id i means
    the input of layer i.
    """
    return {
        "draft_vocab_size": head.shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(head.shape.levels),
        "fc_norm": head.shape.fc_norm,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": head.shape.norm_output,
        "target_hidden_size": head.config.hidden_size,
    }


def write_hub(head: DraftHead, vocabulary: Tensor, folder: Path) -> None:
    """Write the layout that EAGLE, SpecForge and SGLang read. The head uses the target's embedding, which is
    not stored.
    """
    config = {
        **layer_config(head),
        **switches(head),
        "architectures": ["LlamaForCausalLMEagle3"],
        "dtype": str(STORED).removeprefix("torch."),
        "target_model_type": "qwen3_vl",
    }
    _write(folder, config, tensors_of(head, vocabulary))


def write_speculators(head: DraftHead, vocabulary: Tensor, folder: Path, num_drafts: int = 4) -> None:
    """Write the layout of speculators, which includes the target's embedding."""
    tensors = {
        name.replace("midlayer.", "layers.0."): value for name, value in tensors_of(head, vocabulary).items()
    }
    tensors["embed_tokens.weight"] = head.embedding.to(torch.bfloat16)  # The target's dtype.
    config = {
        **switches(head),
        "architectures": ["Eagle3DraftModel"],
        "dtype": str(STORED).removeprefix("torch."),
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
            "verifier": {
                "architectures": ["Qwen3VLForConditionalGeneration"],
                "name_or_path": "mmengine_shapes/checkpoint",
            },
        },
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer_config(head),
    }
    _write(folder, config, tensors)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def read_hub(folder: Path, target: Path | None = None) -> tuple[DraftHead, Tensor]:
    """Return a head that `write_hub` wrote, in float32, and its draft vocabulary (int64 target ids).

    `target`: the checkpoint for which the head drafts (default: the included checkpoint).
    """
    target = target or checkpoint_path()
    config = json.loads((folder / "config.json").read_text())
    shape = HeadShape(
        tuple(config["eagle_aux_hidden_state_layer_ids"]),
        config["draft_vocab_size"],
        config["intermediate_size"],
        config["fc_norm"],
        config["norm_output"],
    )
    tensors = load_file(str(folder / "model.safetensors"))
    offsets = tensors.pop("d2t")
    del tensors["t2d"]
    head = DraftHead(read_config(target).text, shape, *stored(target, EMBEDDING))
    head.load_state_dict({name: value.float() for name, value in tensors.items()})
    return head.requires_grad_(False), offsets + torch.arange(len(offsets))


def main() -> None:
    """Export the weights of a training run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--speculators", type=Path, help="folder for the same head in the other layout")
    options = parser.parse_args()
    saved = torch.load(options.weights, weights_only=True)
    target = checkpoint_path()
    head = DraftHead(read_config(target).text, HeadShape(**saved["shape"]), *stored(target, EMBEDDING))
    head.load_state_dict(saved["head"])
    write_hub(head, saved["vocabulary"], options.folder)
    if options.speculators:
        write_speculators(head, saved["vocabulary"], options.speculators)


if __name__ == "__main__":
    main()
