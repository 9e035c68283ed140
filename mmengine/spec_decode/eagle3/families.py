"""Locate a draft head's settings in config.json, for each file family.

There are two file shapes: a flat object (EAGLE, SpecForge, SGLang, AngelSlim, and NVIDIA's ModelOpt with an
inner `eagle_config`), and speculators' shape, whose layer is described in `transformer_layer_config`.
"""

from dataclasses import dataclass
from typing import Any

from mmengine.checkpoint.fields import Fields
from mmengine.errors import shown

# The last name of each tuple occurs in EAGLE's own files: it is the architecture of an ordinary model. Only
# the tensors show that such a folder holds a draft head.
LLAMA_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "LlamaForCausalLM",
)
QWEN3_ARCHITECTURES = ("Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM")  # their q and k heads are normed
KNOWN = (*LLAMA_ARCHITECTURES, *QWEN3_ARCHITECTURES)
SPECULATORS = "speculators"

# ModelOpt's switches that select the network, with their values for an EAGLE-3 head.
_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A file family, and the config.json objects that hold the settings.

    `layer` holds the decoder layer's sizes. `nested` is `eagle_config`, empty if it is missing. A head
    setting is in `root`, or else in `nested`.
    """

    name: str
    root: Fields
    layer: Fields
    nested: Fields
    qk_norm: bool
    norm_before_residual: bool  # default if the file does not set it

    def value(self, name: str) -> Any:
        """Return a head setting; None if missing or null."""
        value = self.root.values.get(name)
        return self.nested.values.get(name) if value is None else value

    def flag(self, name: str) -> bool | None:
        """Return a boolean head setting, or None if the file does not set it. Raises ModelError."""
        for fields in (self.root, self.nested):
            if fields.values.get(name) is not None:
                return fields.flag(name, False)
        return None


def recognise(root: Fields) -> Family:
    """Return the family that config.json belongs to. Raises ModelError for any other architecture, which is
    named.
    """
    if root.values.get("quantization_config") is not None:
        root.fail("quantization_config: quantized heads are not supported; use the bfloat16 version")
    kind = root.values.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            root.fail(f"speculators_model_type is {shown(kind)}; only 'eagle3' is supported")
        layer = root.child("transformer_layer_config")
        qwen3 = layer.values.get("model_type") == "qwen3"
        # Without norm_before_residual, True is assumed, as in the engine for which old files were written.
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
