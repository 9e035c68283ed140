"""Runs the plugin contract for SmolVLM2 with images."""

import torch
from tokenizers import Tokenizer

from mmengine.testing.contract import PluginContract
from mmengine_smolvlm import plugin
from tests.pictures import asked, noise
from tests.smolvlm.tiny import images_only, make_tiny, patches_of


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
        asked("What is the time?"),
        asked(noise(0, (30, 96)), "What is in it?"),
        asked(noise(0, (30, 96)), "And how many are there, and of which colour is each of them?"),
        asked("Between ", noise(1, (90, 28)), " and ", noise(2, (20, 63)), ", which one?"),
    )

    sizes = {}

    def make_checkpoint(self, folder):
        model = make_tiny(folder, **self.sizes)
        type(self).whole = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<global-img>")
        return model

    def inputs(self, folder, chat):
        how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        return dict(images_only(folder).apply_chat_template(chat, add_generation_prompt=True, **how))

    def patches(self, inputs):
        if "pixel_values" not in inputs:
            return []
        ids = inputs["input_ids"][0]
        # The tokens before each tile: <row_r_col_c> for a tile, and <global-img> for the whole image at the
        # end.
        marks = ids[(ids >= self.whole) & (ids <= self.whole + 36)]
        ends = (marks == self.whole).nonzero().flatten() + 1
        tiles = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long))
        return [patches_of(each) for each in inputs["pixel_values"][0].split(tiles.tolist())]
