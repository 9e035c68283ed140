"""Where a head's settings stand in its config.json, for each of the families that are written in the wild.

Two shapes of file: one flat object (EAGLE, SpecForge, SGLang, AngelSlim, NVIDIA's ModelOpt with an
`eagle_config` inside), and that of speculators, whose layer is described in `transformer_layer_config`.
"""

from dataclasses import dataclass
from typing import Any

from mmengine.checkpoint.fields import Fields
from mmengine.errors import shown

# The last of each are what EAGLE's own files say: the name of the layer's architecture alone. That a folder
# with such a name is a head at all, its tensors show.
LLAMA_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "LlamaForCausalLM",
)
QWEN3_ARCHITECTURES = ("Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM")  # each head of q and k has a norm
KNOWN = (*LLAMA_ARCHITECTURES, *QWEN3_ARCHITECTURES)
SPECULATORS = "speculators"

# ModelOpt's switches for networks that are something else; the value of an EAGLE-3 head.
_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True, slots=True)
class Family:
    """`layer`: sizes of the decoder layer. `nested`: `eagle_config`, empty where there is none. A setting
    of the head stands in `root`, or else there."""

    name: str
    root: Fields
    layer: Fields
    nested: Fields
    qk_norm: bool
    norm_before_residual: bool  # where the file does not say it

    def value(self, name: str) -> Any:
        """Of a setting of the head; None where it is missing or null."""
        value = self.root.values.get(name)
        return self.nested.values.get(name) if value is None else value

    def flag(self, name: str) -> bool | None:
        """None where the file does not say it. ModelError."""
        for fields in (self.root, self.nested):
            if fields.values.get(name) is not None:
                return fields.flag(name, False)
        return None


def recognise(root: Fields) -> Family:
    """The family that the object of config.json belongs to. ModelError for any other, which is named."""
    if root.values.get("quantization_config") is not None:
        root.fail("quantization_config: quantized heads are not supported; use the bfloat16 version")
    kind = root.values.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            root.fail(f"speculators_model_type is {shown(kind)}; only 'eagle3' is served")
        layer = root.child("transformer_layer_config")
        qwen3 = layer.values.get("model_type") == "qwen3"
        # Where old files leave it out, the engine that they were served by takes it as set.
        return Family(SPECULATORS, root, layer, root.child("eagle_config", optional=True), qwen3, True)
    architecture = _architecture(root)
    nested = root.child("eagle_config", optional=True)
    for name, fixed in _FIXED.items():
        value = nested.values.get(name)
        if value is not None and value != fixed:
            nested.fail(f"{nested.prefix}{name} is {shown(value)}; only {fixed!r} is an EAGLE-3 head")
    return Family(architecture, root, root, nested, architecture in QWEN3_ARCHITECTURES, False)


def _architecture(root: Fields) -> str:
    names = root.values.get("architectures")
    known = [name for name in names if name in KNOWN] if isinstance(names, list) else []
    if not known:
        root.fail(
            f"architectures is {shown(names)}, which is no EAGLE-3 head; known are {', '.join(KNOWN)}, and "
            "files of speculators with speculators_model_type 'eagle3'"
        )
    return known[0]
