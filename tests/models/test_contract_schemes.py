"""Runs the plugin contract (the tests for every model plugin) with quantised weights. Tokens and
log-probabilities must equal transformers' results with the dequantised weights. Tests for prompts and configs
are left out, because other modules run them with the unquantised folders.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmengine.models.quantising import CODINGS, quantise
from mmengine.native import library
from mmengine.testing.contract import PluginContract
from tests.models import test_contract_llama as llama
from tests.models import test_contract_qwen3_5 as qwen3_5
from tests.models import test_contract_qwen3_vl as qwen3_vl
from tests.models import test_contract_smolvlm as smolvlm
from tests.models.fp8_folder import LAYERS, is_vision, to_fp8
from tests.models.int4_folder import to_int4
from tests.models.stacked_folder import alone, stacked


class Quantised(PluginContract):
    """The contract for a quantisation scheme. `held`: the expected `ModelSpec.weights_held` if the model is
    loaded in bfloat16.
    """

    held = ""
    test_it_is_found_by_its_architecture = test_prompts_are_transformers = None
    test_no_text_poses_as_structure = test_the_processor_starts_without_torch = None
    test_the_fingerprint_is_of_the_weights = test_a_wrong_tensor_is_refused_by_name = None
    test_what_a_config_cannot_be_is_refused_by_name = None

    def quantise(self, folder):
        raise NotImplementedError

    def make_checkpoint(self, folder):
        made, plain = super().make_checkpoint(folder), folder / "plain"
        shutil.copytree(folder, plain)
        meant = self.quantise(folder)
        weights = {name: value.contiguous() for name, value in meant.items()}
        save_file(weights, plain / "model.safetensors", {"format": "pt"})
        return type(made).from_pretrained(plain, dtype=torch.float32).eval()

    def reduced(self, made):
        return made.reference.from_pretrained(made.folder / "plain", dtype=torch.bfloat16)

    @pytest.mark.skipif(library.load() is None, reason="no kernels here")
    def test_codes_are_held(self, made):
        with self._engine(made, {}, dtype="bfloat16") as engine:
            assert engine.built.spec.weights_held == self.held


class Fp8(Quantised):
    held, sizes = "FP8", {}

    def quantise(self, folder):
        return to_fp8(folder)


class WholeNumbers(Quantised):
    """A scheme with integer codes. AMX kernels round the weights to bfloat16, so the reference is the
    bfloat16 model. Other kernels do not round, so the reference is the float32 model.
    """

    def reduced(self, made):
        return super().reduced(made) if library.describe().startswith("amx") else made.reference


class Int4(WholeNumbers):
    """The format compressed-tensors with groups of 32 values. The matrices' sizes are multiples of 32."""

    held = "int4"
    sizes = {"hidden_size": 64, "intermediate_size": 96}

    def quantise(self, folder):
        return to_int4(folder, "compressed-tensors", 32)


class Int8(WholeNumbers):
    """Float weights that are quantised at loading. Only bfloat16 works, so float32 tests are left out."""

    held, sizes = "int8", {}
    test_log_probabilities_are_transformers = test_tokens_are_transformers = None

    def quantise(self, folder):
        meant = load_file(folder / "model.safetensors")
        for name, weight in meant.items():
            part = name.removesuffix(".weight").rpartition(".")[2]
            if is_vision(name) or part not in (*LAYERS, "embed_tokens", "lm_head"):
                continue
            found = quantise(weight, CODINGS["int8"])
            scales = found.scales.repeat_interleave(CODINGS["int8"].group, 1)[:, : weight.shape[1]]
            meant[name] = found.values.float() * scales
        return meant

    def _engine(self, made, settings, log=None, dtype="float32"):
        return super()._engine(made, {**settings, "quantize": "int8"}, log, dtype)


class ExpertsAlone:
    """A mixin for families with experts. Quantised hub folders have a tensor for each expert. transformers'
    float folders have stacked experts.
    """

    def quantise(self, folder):
        path, count = folder / "model.safetensors", self.sizes["num_experts"]
        save_file(alone(load_file(path)), path, {"format": "pt"})
        return stacked(super().quantise(folder), count, turned=False)


SHARED = {"shared_expert_intermediate_size": 64}
# Base classes, and further sizes for Int4, so that matrix sizes are multiples of the group size.
FAMILIES = {
    "Qwen3VL": ((qwen3_vl.TestQwen3VL,), {}),
    "Qwen3VLMoe": ((ExpertsAlone, qwen3_vl.TestQwen3VLMoe), {}),
    "Llama": ((llama.TestLlama,), {}),
    "Qwen2": ((llama.TestQwen2,), {}),
    "Qwen3": ((llama.TestQwen3,), {}),
    "Qwen3Moe": ((llama.TestQwen3Moe,), {}),
    "Mistral": ((llama.TestMistral,), {}),
    "Qwen35": ((qwen3_5.TestQwen35,), {}),
    "Qwen35Text": ((qwen3_5.TestQwen35Text,), {}),
    "Qwen35Moe": ((qwen3_5.TestQwen35Moe,), SHARED),
    "Qwen35MoeText": ((qwen3_5.TestQwen35MoeText,), SHARED),
    "SmolVLM": ((smolvlm.TestSmolVLM,), {"num_attention_heads": 4}),
}
# In these tiny models, bfloat16 rounding can change a token's experts or the sign of a delta net's output.
# Integer codes then cannot be compared with transformers in bfloat16.
ROUGH = ("Qwen3VLMoe", "Qwen3Moe", "Qwen35", "Qwen35Text", "Qwen35Moe", "Qwen35MoeText")
# One family per kind of decoder. The others are soak tests.
SHORT = ("Qwen3VL", "Qwen3VLMoe", "Qwen3", "Qwen35Moe")


def classes():
    for family, ((*mixins, contract), more) in FAMILIES.items():
        for scheme in (Fp8, Int4, Int8):
            sizes = {**contract.sizes, **scheme.sizes, **(more if scheme.sizes else {})}
            named = {"__module__": __name__, "sizes": sizes}
            if issubclass(scheme, WholeNumbers) and family in ROUGH:
                named["test_bfloat16_chooses_what_is_likeliest_but_for_near_ties"] = None
            made = type(f"Test{family}{scheme.__name__}", (*mixins, scheme, contract), named)
            yield made if family in SHORT else pytest.mark.soak(made)


globals().update({each.__name__: each for each in classes()})
