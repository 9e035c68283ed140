"""Runs the plugin contract's tests for the Qwen3.5 family: dense and mixture-of-experts models, with and
without images.
"""

from mmengine.testing.contract import PluginContract
from mmengine_qwen3_5 import plugin
from tests.models import test_contract_qwen3_vl
from tests.qwen3_5.tiny import make_text, make_whole

# Logits within this many bfloat16 steps are near ties. The contract's default is 8. For a row's first token,
# each head of a delta net outputs (q'k) beta v, and the norm then keeps only the sign of q'k. If q'k is near
# 0, bfloat16 rounding can flip the sign. On this model, transformers in bfloat16 differs by 80 bfloat16 steps
# from transformers in float32.
NEAR_STEPS = 32


class TestQwen35Text(PluginContract):
    plugin = plugin
    near_steps = NEAR_STEPS
    refused = {
        "hidden_act": "relu",
        "rope_parameters.rope_type": "yarn",
        "rope_parameters.partial_rotary_factor": 0.01,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention", "full_attention"],
        "attention_bias": True,
        "linear_num_key_heads": 3,
    }

    mixture, sizes = False, {}

    def make_checkpoint(self, folder):
        return make_text(folder, mixture=self.mixture, **self.sizes)


class TestQwen35(test_contract_qwen3_vl.TestQwen3VL):
    plugin = plugin
    near_steps = NEAR_STEPS
    refused = {
        "text_config.hidden_act": "relu",
        "text_config.rope_parameters.rope_type": "yarn",
        "vision_config.hidden_act": "quick_gelu",
        "vision_config.deepstack_visual_indexes": [0],
    }

    mixture = False

    def make_checkpoint(self, folder):
        return make_whole(folder, mixture=self.mixture, **self.sizes)


class TestQwen35MoeText(TestQwen35Text):
    test_the_processor_starts_without_torch = None  # The dense model's test covers the same processor.
    mixture = True
    refused = {"num_experts_per_tok": 9, "shared_expert_intermediate_size": 0, "norm_topk_prob": False}


class TestQwen35Moe(TestQwen35):
    test_the_processor_starts_without_torch = None
    mixture = True
    refused = {"text_config.n_group": 4, "text_config.moe_intermediate_size": None}
