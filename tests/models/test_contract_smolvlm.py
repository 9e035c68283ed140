"""The contract of plugins, for SmolVLM2 with images."""

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from mmengine.models.contract import PluginContract
from mmengine_smolvlm import plugin
from tests.smolvlm.tiny import images_only, make_tiny, patches_of


def image(seed, size):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def chat(*parts):
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


class TestSmolVLM(PluginContract):
    plugin = plugin
    refused = {
        "scale_factor": 4,
        "text_config.hidden_act": "relu",
        "text_config.model_type": "mistral",
        "vision_config.hidden_act": "quick_gelu",
        "vision_config.patch_size": [5, 5],
    }
    chats = (
        chat("What is the time?"),
        chat(image(0, (30, 96)), "What is in it?"),
        chat(image(0, (30, 96)), "And how many are there, and of which colour is each of them?"),
        chat("Between ", image(1, (90, 28)), " and ", image(2, (20, 63)), ", which one?"),
    )

    def make_checkpoint(self, folder):
        model = make_tiny(folder)
        type(self).whole = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<global-img>")
        return model

    def inputs(self, folder, chat):
        asked = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        return dict(images_only(folder).apply_chat_template(chat, add_generation_prompt=True, **asked))

    def patches(self, inputs):
        if "pixel_values" not in inputs:
            return []
        ids = inputs["input_ids"][0]
        marks = ids[(ids >= self.whole) & (ids <= self.whole + 36)]  # the whole's, and of places
        ends = (marks == self.whole).nonzero().flatten() + 1
        tiles = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long))
        return [patches_of(each) for each in inputs["pixel_values"][0].split(tiles.tolist())]
