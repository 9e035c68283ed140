"""Runs the tests in PluginContract for the fallback plugin mmengine_transformers."""

from typing import ClassVar

import pytest
import torch

from mmengine.config import EngineConfig
from mmengine.errors import MMEngineError
from mmengine.models.registry import choose_plugin, load_plugins
from mmengine.replay import verify
from mmengine.serve.engine.engine import Engine
from mmengine.testing.contract import CHATS, NEAR_STEPS, NUM_NEW, SETTINGS, PluginContract
from mmengine_transformers import plugin
from tests.any_model.catalogue import IMAGE, VIDEO, write
from tests.any_model.exceptions import ATOMIC, NEAR, NO_BFLOAT16, ONE_IMAGE, OWN_PROMPT, WHOLE_PROMPT
from tests.any_model.item_tensors import check_tensors
from tests.any_model.killed import tokens_after_a_kill
from tests.any_model.media_files import with_files
from tests.any_model.video_checks import VideoChecks
from tests.pictures import asked, noise

FIRST, SECOND, THIRD = noise(0, (60, 90)), noise(1, (90, 58)), noise(2, (48, 63))
IMAGE_CHATS = (
    asked("What is the time?"),
    asked(FIRST, "What is in it?"),
    asked(FIRST, "And how many are there, and of which colour?"),
    asked("Between ", SECOND, " and ", THIRD, ", which one?"),
)
ONE_IMAGE_CHATS = (*IMAGE_CHATS[:3], asked("Look: ", SECOND, "which one?"))
ANY_ORDER = (
    asked(THIRD, "Then ", SECOND),
    asked(SECOND, THIRD, "Which is first?"),
    asked("Are these equal? ", SECOND, SECOND),
)
ONE_IMAGE_ANY_ORDER = (asked(THIRD, "Which?"), asked("Which? ", THIRD))
NUM_SHORT = 6  # Answer length in this class's own tests.
KILLED_AT = 6  # Number of steps that the executor runs before the process is killed.
# Input fields with each token's type (text or image). These models require the fields for texts, too.
KINDS = {
    "ernie4_5_vl_moe": ("moe_mm_token_type_ids", "mm_token_type_ids"),
    "gemma3": ("token_type_ids",),
    "paligemma": ("token_type_ids",),
}


class HostedContract(VideoChecks, PluginContract):
    """Base class for a model's tests. A subclass sets `kind`, a name in tests/any_model/catalogue.py."""

    plugin = plugin
    kind: ClassVar[str] = ""
    refused = {"architectures": [], "model_type": "of_nothing"}
    # Disabled, because transformers' processors import torch.
    test_the_processor_starts_without_torch = None

    def __init_subclass__(cls) -> None:
        if cls.kind not in VIDEO:
            for name in vars(VideoChecks):
                if name.startswith("test_"):
                    setattr(cls, name, None)
        cls.near_steps = NEAR.get(cls.kind, NEAR_STEPS)
        if cls.kind in IMAGE:
            cls.chats = ONE_IMAGE_CHATS if cls.kind in ONE_IMAGE else IMAGE_CHATS

    def settings(self, name):
        settings = super().settings(name)
        if name != "in chunks":
            return settings
        if self.kind in WHOLE_PROMPT:
            pytest.skip("a prompt is computed in one step")
        return settings | {"token_budget": ATOMIC.get(self.kind, SETTINGS["in chunks"]["token_budget"])}

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
        kinds = torch.zeros_like(inputs["input_ids"])
        inputs.pop("token_type_ids", None)
        return {**inputs, **dict.fromkeys(KINDS.get(self.kind, ()), kinds)}

    def test_it_is_found_by_its_architecture(self, made):
        """A model with a plugin of its own is found only if that plugin refuses the config."""
        is_described = type(made.reference).__name__ in load_plugins()
        chosen = choose_plugin(made.folder)
        assert (chosen.plugin is self.plugin) is (not is_described or chosen.refusal != "")

    def test_prompts_are_transformers(self, made, processor):
        """The processor has the catalogue's modalities, and prepares the same token ids as transformers. A
        single image also has equal tensors.
        """
        modalities = ["image"] * (self.kind in IMAGE) + ["video"] * (self.kind in VIDEO)
        assert sorted(processor.media.modalities if processor.media else ()) == modalities
        for chat, inputs in zip(self.chats, made.inputs, strict=True):
            prepared = processor.prepare(chat)
            if self.kind not in OWN_PROMPT:
                assert prepared.prompt_token_ids.tolist() == inputs["input_ids"][0].tolist()
            if len(prepared.media) == 1:
                check_tensors(prepared.media[0].patches, inputs)

    def test_bfloat16_chooses_what_is_likeliest_but_for_near_ties(self, made):
        if self.kind in NO_BFLOAT16:
            pytest.skip("transformers' forward over prompt and answer differs from decoding token by token")
        super().test_bfloat16_chooses_what_is_likeliest_but_for_near_ties(made)

    def test_a_killed_process_continues_with_the_same_tokens(self, made, tmp_path):
        """A killed process continues with the same tokens, and the log verifies."""
        settings = self.settings("from the cache" if self.kind in WHOLE_PROMPT else "in chunks")
        log = tmp_path / "log"

        def make_engine(resume):
            return self._engine(made, {**settings, "snapshot_bytes": 4096}, log, resume=resume)

        chats = [with_files(chat) for chat in self.chats]
        assert tokens_after_a_kill(make_engine, chats, NUM_NEW, KILLED_AT) == made.tokens
        report = verify(log)
        assert report.ok and report.rederived and not report.unfinished

    def test_images_are_decoded_in_processes(self, made):
        """The tokens stay the same if a separate process decodes the image files."""
        if self.kind not in IMAGE:
            pytest.skip("a text model")
        chats = [with_files(chat) for chat in self.chats]
        assert self._tokens_by_processes(made, chats, NUM_NEW) == made.tokens

    def _tokens_by_processes(self, made, chats, num_new):
        settings = {"media_decoding": "processes", "media_workers": 1}
        with self._engine(made, {**self.settings("beside others"), **settings}) as engine:
            assert engine.decoders is not None
            answers = engine.generate(chats, max_tokens=num_new, temperature=0, ignore_eos=True)
        return [answer.token_ids for answer in answers]

    def test_images_come_in_any_order(self, made, tmp_path):
        """Tokens are right for images at the start, at the end, next to each other, swapped and repeated."""
        if self.kind not in IMAGE:
            pytest.skip("a text model")
        chats = ONE_IMAGE_ANY_ORDER if self.kind in ONE_IMAGE else ANY_ORDER
        wanted = [self._generate(made, self.inputs(made.folder, chat)) for chat in chats]
        with self._engine(made, self.settings("from the cache"), tmp_path / "log") as engine:
            for order in (1, -1):
                given = chats[::order]
                answers = engine.generate(given, max_tokens=NUM_SHORT, ignore_eos=True)
                assert [answer.token_ids for answer in answers] == wanted[::order]
        assert verify(tmp_path / "log").ok

    def test_an_item_above_the_token_budget_is_refused(self, made):
        """A model that needs a whole image or prompt in a step refuses items above the token budget."""
        if self.kind not in WHOLE_PROMPT and self.kind not in ATOMIC:
            pytest.skip("an item may be split over steps")
        with self._engine(made, {"block_size": 4, "token_budget": 8, "max_num_seqs": 4}) as engine:
            with pytest.raises(MMEngineError, match="token_budget"):
                engine.generate([self.chats[-1]], max_tokens=1)
            if self.kind in ATOMIC:
                assert engine.generate([self.chats[0]], max_tokens=1)

    def _generate(self, made, inputs, num_new=NUM_SHORT):
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = made.reference.generate(**inputs, max_new_tokens=num_new, **options)
        return out[0, inputs["input_ids"].shape[1] :].tolist()

    def _engine(self, made, settings, log=None, dtype="float32", resume=None):
        sizes = {"num_blocks": 1025, "max_model_len": 1024, "spec": "none", "num_threads": 1}
        config = EngineConfig.from_dict({**sizes, "model_impl": "transformers", **settings})
        return Engine(made.folder, device="cpu", dtype=dtype, config=config, log=log, resume=resume)


def contract_of(kind: str, base: type[HostedContract] = HostedContract) -> type[HostedContract]:
    """Return the test class for a name in the catalogue."""
    title = "".join(word.title() for word in kind.split("_"))
    return type(f"Test{title}", (base,), {"kind": kind, "__module__": __name__})
