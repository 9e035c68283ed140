"""The plugin contract for the fallback plugin, over the factories of this folder."""

from typing import ClassVar

import numpy as np
import torch

from mmengine.testing.contract import CHATS, PluginContract
from mmengine_transformers import plugin
from mmengine_transformers.media.packing import unpack
from tests.any_model.catalogue import IMAGE, write
from tests.pictures import asked, noise

FIRST, SECOND, THIRD = noise(0, (60, 90)), noise(1, (90, 58)), noise(2, (48, 63))
IMAGE_CHATS = (
    asked("What is the time?"),
    asked(FIRST, "What is in it?"),
    asked(FIRST, "And how many are there, and of which colour?"),
    asked("Between ", SECOND, " and ", THIRD, ", which one?"),
)
ONE_IMAGE_CHATS = (*IMAGE_CHATS[:3], asked("Look: ", SECOND, "which one?"))
# Processors that treat several images of a prompt otherwise than one.
ONE_IMAGE = frozenset({"llava_onevision"})
# The processor itself writes tokens around the prompt, which a chat template cannot.
OWN_PROMPT = frozenset({"paligemma"})


class HostedContract(PluginContract):
    """A subclass sets `kind`, a name of the catalogue."""

    plugin = plugin
    kind: ClassVar[str] = ""
    refused = {"architectures": [], "model_type": "of_nothing"}

    def __init_subclass__(cls) -> None:
        if cls.kind in IMAGE:
            cls.chats = ONE_IMAGE_CHATS if cls.kind in ONE_IMAGE else IMAGE_CHATS
            # Its processor is transformers', which imports torch.
            cls.test_the_processor_starts_without_torch = None

    def make_checkpoint(self, folder):
        return write(self.kind, folder)

    def inputs(self, folder, chat):
        if self.chats is CHATS:
            return super().inputs(folder, chat)
        import transformers

        processor = transformers.AutoProcessor.from_pretrained(folder)
        text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        images = [part["image"] for part in chat[0]["content"] if "image" in part]
        given = {"text": text, "add_special_tokens": False, "return_tensors": "pt"}
        if not images:
            found = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")
            return self._with_kinds(dict(found))
        found = dict(processor(images=images, **given))
        if self.kind in OWN_PROMPT:
            length = (found["input_ids"] == processor.image_token_id).sum() // len(images)
            text = text.replace(processor.image_token, processor.image_token * int(length))
            plain = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")
            found = self._with_kinds({**plain, "pixel_values": found["pixel_values"]})
        return {name: value.float() if value.is_floating_point() else value for name, value in found.items()}

    def _with_kinds(self, inputs):
        """Add the kinds of tokens, which some models require for texts too."""
        kinds = torch.zeros_like(inputs["input_ids"])
        names = {
            "ernie4_5_vl_moe": ("moe_mm_token_type_ids", "mm_token_type_ids"),
            "gemma3": ("token_type_ids",),
            "paligemma": ("token_type_ids",),
        }.get(self.kind, ())
        inputs.pop("token_type_ids", None)
        return {**inputs, **dict.fromkeys(names, kinds)}

    def test_prompts_are_transformers(self, made, processor):
        """Compare token ids, and of a single image its tensors."""
        for chat, inputs in zip(self.chats, made.inputs, strict=True):
            prepared = processor.prepare(chat)
            if self.kind not in OWN_PROMPT:
                assert prepared.prompt_token_ids.tolist() == inputs["input_ids"][0].tolist()
            if len(prepared.media) != 1:
                continue
            (item,) = unpack(prepared.media[0].patches)
            assert item.arrays.keys() <= inputs.keys()
            for entry in item.header.tensors:
                theirs = inputs[entry.name]
                if entry.dtype == "bfloat16":
                    theirs = theirs.bfloat16().view(torch.uint16)
                assert np.array_equal(item.arrays[entry.name], theirs.numpy()), entry.name


def contract_of(kind: str) -> type[HostedContract]:
    """Return the contract's class for a name of the catalogue."""
    title = "".join(word.title() for word in kind.split("_"))
    return type(f"Test{title}", (HostedContract,), {"kind": kind, "__module__": __name__})
