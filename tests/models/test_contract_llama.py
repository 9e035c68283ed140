"""Runs the plugin contract for Llama and similar architectures."""

from mmengine.testing.contract import PluginContract
from mmengine_llama import plugin
from tests.llama.tiny import make_tiny


class TestLlama(PluginContract):
    plugin = plugin
    refused = {
        "hidden_act": "relu",
        "rope_parameters.rope_type": "yarn",
        "layer_types": ["chunked_attention"],
    }
    architecture, sizes = "Llama", {}

    def make_checkpoint(self, folder):
        return make_tiny(folder, self.architecture, **self.sizes)


class TestQwen2(TestLlama):
    architecture = "Qwen2"
    refused = {"layer_types": ["sliding_attention"]}


class TestQwen3(TestLlama):
    architecture, sizes = "Qwen3", {"tie_word_embeddings": True}
    refused = {"attention_bias": "some"}


class TestQwen3Moe(TestLlama):
    architecture, sizes = "Qwen3Moe", {"norm_topk_prob": True}
    test_the_processor_starts_without_torch = None  # The dense model's test covers the same processor.
    refused = {"num_experts_per_tok": 9, "mlp_only_layers": [-1], "scoring_func": "sigmoid"}


class TestMistral(TestLlama):
    architecture = "Mistral"
    refused = {"sliding_window": 64}
