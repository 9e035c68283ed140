"""Runs the plugin contract for Qwen3-VL with images: dense and mixture of experts."""

import json
import shutil

import torch

from mmengine.testing.contract import PluginContract, make_lively
from mmengine_qwen3_vl import plugin
from mmengine_shapes import checkpoint_path
from tests.models.text_reference import EXPERTS
from tests.pictures import asked, noise
from tests.qwen3_vl.qwen3_vl_reference import TINY

WORDS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json")


class TestQwen3VL(PluginContract):
    plugin = plugin
    refused = {
        "text_config.hidden_act": "relu",
        "text_config.rope_parameters.rope_type": "yarn",
        "vision_config.hidden_act": "quick_gelu",
    }
    chats = (
        asked("What is the time?"),
        asked(noise(0, (64, 96)), "What is in it?"),
        asked(noise(0, (64, 96)), "And how many are there, and of which colour is each of them?"),
        asked("Between ", noise(1, (96, 64)), " and ", noise(2, (64, 64)), ", which one?"),
    )

    architecture, sizes = "Qwen3VL", {}

    def make_checkpoint(self, folder):
        import transformers

        for name in WORDS:
            shutil.copy(checkpoint_path() / name, folder)
        words = json.loads((checkpoint_path() / "config.json").read_text())
        text = TINY["text"] | self.sizes | {"vocab_size": words["text_config"]["vocab_size"]}
        vision = {"patch_size": words["vision_config"]["patch_size"], "out_hidden_size": text["hidden_size"]}
        config = getattr(transformers, f"{self.architecture}Config")(
            text_config=text,
            vision_config=TINY["vision"] | vision,
            **{name: words[name] for name in words if name.endswith("token_id")},
        )
        model = getattr(transformers, f"{self.architecture}ForConditionalGeneration")(config).eval()
        make_lively(model)
        model.save_pretrained(folder)
        return model

    def inputs(self, folder, chat):
        from transformers import AutoTokenizer

        from tests.processing.images_reference import images_only

        processor = images_only(folder, AutoTokenizer.from_pretrained(folder))
        asked = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        return dict(processor.apply_chat_template(chat, add_generation_prompt=True, **asked))

    def patches(self, inputs):
        if "pixel_values" not in inputs:
            return []
        pixels = ((inputs["pixel_values"] * 0.5 + 0.5) * 255).round().to(torch.uint8)
        return [each.numpy() for each in pixels.split(inputs["image_grid_thw"].prod(1).tolist())]


class TestQwen3VLMoe(TestQwen3VL):
    architecture, sizes = "Qwen3VLMoe", EXPERTS
    test_the_processor_starts_without_torch = None  # The dense model's test covers the same processor.
    refused = {"text_config.num_experts_per_tok": 9, "text_config.norm_topk_prob": False}
