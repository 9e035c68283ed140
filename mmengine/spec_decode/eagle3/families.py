"""Finds an EAGLE-3 draft head's settings in config.json. There are two layouts.

EAGLE, SpecForge, SGLang, AngelSlim and NVIDIA's ModelOpt write a flat object; ModelOpt adds an inner
`eagle_config`. The library speculators describes the decoder layer in `transformer_layer_config`.
"""

from dataclasses import dataclass
from typing import Any

from mmengine.checkpoint.fields import Fields
from mmengine.errors import shown

# The last name in each tuple is an ordinary model's architecture. EAGLE's own draft heads have this name too,
# so only the tensors show that a folder contains a draft head.
LLAMA_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "LlamaForCausalLM",
)
QWEN3_ARCHITECTURES = ("Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM")  # these have norms for q and k
KNOWN = (*LLAMA_ARCHITECTURES, *QWEN3_ARCHITECTURES)
SPECULATORS = "speculators"

# ModelOpt's settings for the network's structure, with the values that an EAGLE-3 head must have.
_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A draft head's family, and the objects in config.json with the settings.

    `layer` has the decoder layer's sizes. `nested` is `eagle_config`, or empty. Head settings are looked up
    in `root` first and then in `nested`.
    """

    name: str
    root: Fields
    layer: Fields
    nested: Fields
    qk_norm: bool
    norm_before_residual: bool  # the default if config.json does not have the setting

    def value(self, name: str) -> Any:
        """Return a head setting, or None if it is missing or null."""
        value = self.root.values.get(name)
        return self.nested.values.get(name) if value is None else value

    def flag(self, name: str) -> bool | None:
        """Return a boolean head setting, or None if it is missing or null. Raises ModelError."""
        for fields in (self.root, self.nested):
            if fields.values.get(name) is not None:
                return fields.flag(name, False)
        return None


def recognise(root: Fields) -> Family:
    """Return the family to which config.json belongs.

    If no family has the file's architecture, raises a ModelError that names the architecture.
    """
    if root.values.get("quantization_config") is not None:
        root.fail("quantization_config: quantized heads are not supported; use the bfloat16 version")
    kind = root.values.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            root.fail(f"speculators_model_type is {shown(kind)}; only 'eagle3' is supported")
        layer = root.child("transformer_layer_config")
        qwen3 = layer.values.get("model_type") == "qwen3"
        # Old files lack norm_before_residual, and were written for an engine that assumes True.
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
            f"architectures is {shown(names)}, which is not an EAGLE-3 head; supported are "
            f"{', '.join(KNOWN)}, and files of speculators with speculators_model_type 'eagle3'"
        )
    return known[0]
