"""Reads the SigLIP tower of a projector file. SmolVLM2 and Gemma 3 have such towers."""

from dataclasses import dataclass
from typing import ClassVar

from mmengine.checkpoint.gguf.projector import MAX_SIZE, Json, Projector

EPS = 1e-6  # transformers' default epsilon.


@dataclass(frozen=True, slots=True)
class SiglipProjector(Projector):
    """A projector whose tower is a SigLIP encoder."""

    parts: ClassVar[dict[str, str]] = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.out_proj",
        "ln1": "layer_norm1",
        "ln2": "layer_norm2",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }

    def image_size(self) -> int:
        """Return the side of the square images that the tower takes, in pixels."""
        return self.fields().integer("image_size", 1, 4096)

    def eps(self) -> float:
        """Return the epsilon for the tower's norms."""
        return self.fields().number("attention.layer_norm_epsilon", EPS)

    def tower_config(self) -> Json:
        """Return the fields that all SigLIP towers have in transformers' config. Raises ModelError."""
        fields = self.fields()
        hidden = fields.integer("embedding_length", 1, MAX_SIZE)
        return {
            "num_hidden_layers": fields.integer("block_count", 1, 1024),
            "hidden_size": hidden,
            "intermediate_size": self.intermediate_size(hidden),
            "num_attention_heads": fields.integer("attention.head_count", 1, 1024),
            "image_size": self.image_size(),
            "patch_size": fields.integer("patch_size", 1, 256),
            "layer_norm_eps": self.eps(),
            "hidden_act": "gelu_pytorch_tanh",
        }
