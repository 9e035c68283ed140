"""Video tests for every model that runs on transformers' modules. VideoChecks is a base class of
HostedContract.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from mmengine.errors import InvalidRequest
from mmengine.replay import verify
from mmengine.request import MAX_LOGPROBS
from mmengine.testing.contract import check_log_probabilities
from tests.any_model.exceptions import BY_PARTS, NO_VIDEO, NOT_MIXED, ONE_IMAGE, ONE_VIDEO, WHOLE_PROMPT
from tests.any_model.item_tensors import check_tensors
from tests.any_model.killed import tokens_after_a_kill
from tests.any_model.media_files import video_url, with_files
from tests.pictures import noise

FPS = 1.25
NUM_SHORT = 8  # Answer length.
KILLED_AT = 6  # Number of steps before the process is killed.
PICTURE, OTHER = noise(0, (60, 90)), noise(2, (48, 63))
WAYS = ("beside others", "from the cache", "in chunks", "preempted", "drafted")


def clip(seed, num_frames, size):
    """Return frames with random pixels, uint8 [t, h, w, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (num_frames, *size, 3), np.uint8)


FIRST, SECOND = clip(3, 4, (60, 90)), clip(4, 4, (60, 90))
SECOND[1] = SECOND[0]  # VideoLLaMA 3 drops the embeddings of unchanged patches.
ODD = clip(5, 3, (64, 48))
LONG, LONG_FPS = clip(6, 20, (32, 48)), 4.0


def told(*parts):
    """Return a conversation with one user message. A part is a text, an image, or a clip. All frames in a
    clip are used.
    """
    return [{"role": "user", "content": [_part(part) for part in parts]}]


def _part(part):
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, np.ndarray):
        return {"type": "video", "video": part, "do_sample_frames": False, "sample_fps": FPS}
    return {"type": "image", "image": part}


VIDEO_CHATS = (
    told(FIRST, "What happens?"),
    told(FIRST, "And how long does it take?"),
    told("Look: ", ODD, "what changes?"),
    told(PICTURE, "is one; ", FIRST, "another; then ", SECOND, "and ", OTHER, ", which one?"),
)
ONE_IMAGE_CHATS = (*VIDEO_CHATS[:3], told(SECOND, "or ", PICTURE, "or ", FIRST, "?"))
ALONE_CHATS = (*VIDEO_CHATS[:3], told(SECOND, "or ", FIRST, "?"), told(PICTURE, "or ", OTHER, "?"))

ONE_VIDEO_CHATS = (*VIDEO_CHATS[:3], ALONE_CHATS[-1])


class VideoChecks:
    """Compares prompts, logprobs and tokens for videos with transformers."""

    def test_video_prompts_are_transformers(self, made, processor):
        """Compare token ids, and the tensors of a single video."""
        for chat, inputs in self._videos(made):
            prepared = processor.prepare(chat)
            assert prepared.prompt_token_ids.tolist() == inputs["input_ids"][0].tolist()
            if len(prepared.media) == 1:
                check_tensors(prepared.media[0].patches, inputs)

    def test_frames_of_files_are_chosen_as_transformers_does(self, made, processor):
        """Compare token ids and tensors for a video file with sampled frames."""
        if self.kind in NO_VIDEO:
            pytest.skip("videos are refused")
        theirs = transformers.AutoProcessor.from_pretrained(made.folder)
        options = {} if theirs.video_processor.do_sample_frames else {"fps": 2.0}
        whole = [{"role": "user", "content": [{"type": "video", "video": LONG}]}]
        text = theirs.apply_chat_template(whole, add_generation_prompt=True, tokenize=False)
        metadata = {"total_num_frames": len(LONG), "fps": LONG_FPS, "duration": len(LONG) / LONG_FPS}
        wanted = theirs(
            text=text,
            videos=[LONG],
            video_metadata=[metadata],
            do_sample_frames=True,
            return_metadata=True,
            **options,
            add_special_tokens=False,
            return_tensors="pt",
        )
        part = {"type": "video", "video": video_url(LONG, LONG_FPS), **options}
        prepared = processor.prepare([{"role": "user", "content": [part]}])
        assert prepared.prompt_token_ids.tolist() == wanted["input_ids"][0].tolist()
        check_tensors(prepared.media[0].patches, wanted)

    @pytest.mark.parametrize("name", ["beside others", "in chunks"])
    def test_video_log_probabilities_are_transformers(self, made, name):
        pairs = list(self._videos(made))
        if self.kind in BY_PARTS:
            pairs.append((VIDEO_CHATS[-1], video_inputs(made.folder, VIDEO_CHATS[-1])))
        with self._engine(made, self.settings(name)) as engine:
            answers = engine.generate([chat for chat, _ in pairs], max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
        for answer, (chat, given) in zip(answers, pairs, strict=True):
            is_mixed = self.kind in BY_PARTS and chat is VIDEO_CHATS[-1]
            with torch.inference_mode():
                logits = mixed_logits(made.reference, given) if is_mixed else made.reference(**given).logits
            check_log_probabilities(answer, logits[0].float())

    def test_more_media_than_the_processor_takes_are_refused(self, made, processor):
        if self.kind not in ONE_VIDEO:
            pytest.skip("any number of media")
        for parts, text in (((FIRST, "or ", ODD), "2 videos"), ((FIRST, "or ", PICTURE), "1 images")):
            with pytest.raises(InvalidRequest, match=text):
                processor.prepare(told(*parts))

    @pytest.mark.parametrize("name", WAYS)
    def test_video_tokens_are_transformers(self, made, tmp_path, name):
        """Compare each prompt's greedy tokens at least twice, and verify the log."""
        chats, filmed = self._filmed(made)
        self._check_tokens(filmed, chats, name, tmp_path / "log", num_spare=1)

    def test_a_killed_process_continues_with_videos(self, made, tmp_path):
        """Kill the process during prompts with video files, and verify the continued log."""
        chats, filmed = self._filmed(made)
        log = tmp_path / "log"

        def make_engine(resume):
            way = "from the cache" if self.kind in WHOLE_PROMPT else "in chunks"
            settings = {**self.settings(way), "snapshot_bytes": 4096}
            return self._engine(made, settings, log, resume=resume)

        files = [with_files(chat, FPS) for chat in chats]
        assert tokens_after_a_kill(make_engine, files, NUM_SHORT, KILLED_AT) == filmed.tokens
        report = verify(log)
        assert report.ok and report.rederived and not report.unfinished

    def test_videos_are_decoded_in_processes(self, made):
        """Compare tokens for video files that a decoding process reads."""
        chats, filmed = self._filmed(made)
        files = [with_files(chat, FPS) for chat in chats]
        assert self._tokens_by_processes(made, files, NUM_SHORT) == filmed.tokens

    def _videos(self, made):
        """Return pairs of a chat and transformers' inputs. For a model without videos, check the error and
        skip.
        """
        if self.kind in NO_VIDEO:
            refused = pytest.raises(InvalidRequest, match="cannot encode one video alone")
            with self._engine(made, {}) as engine, refused:
                engine.generate([VIDEO_CHATS[0]], max_tokens=1)
            pytest.skip("videos are refused")
        if "_pairs" not in vars(type(self)):
            chats = ONE_IMAGE_CHATS if self.kind in ONE_IMAGE else VIDEO_CHATS
            chats = ALONE_CHATS if self.kind in NOT_MIXED else chats
            chats = ONE_VIDEO_CHATS if self.kind in ONE_VIDEO else chats
            type(self)._pairs = [(chat, video_inputs(made.folder, chat)) for chat in chats]
        return type(self)._pairs

    def _filmed(self, made):
        """Return the chats, and a copy of `made` with transformers' inputs and greedy tokens."""
        chats, inputs = zip(*self._videos(made), strict=True)
        if "_with_videos" not in vars(type(self)):
            tokens = [self._generate(made, given, NUM_SHORT) for given in inputs]
            type(self)._with_videos = replace(made, inputs=inputs, tokens=tokens)
        return list(chats), type(self)._with_videos


def mixed_logits(reference, inputs):
    """Return the logits [1, n, vocab] for a prompt with images and videos. The model's own forward fails for
    a prompt with both, so this function calls the model's submodules.
    """
    core, kinds = reference.model, inputs["mm_token_type_ids"]
    embeds = core.get_input_embeddings()(inputs["input_ids"])
    grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw")}
    images = core.get_image_features(inputs["pixel_values"], grids["image_grid_thw"])
    videos = core.get_video_features(inputs["pixel_values_videos"], grids["video_grid_thw"])
    for number, found in enumerate((images, videos), 1):
        embeds[kinds == number] = torch.cat(found.pooler_output)
    positions, _ = core.get_rope_index(inputs["input_ids"], mm_token_type_ids=kinds, **grids)
    out = core.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False)
    return reference.lm_head(out.last_hidden_state)


def video_inputs(folder, chat):
    """Return transformers' inputs for a chat with videos."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    images = [part["image"] for part in chat[0]["content"] if "image" in part]
    videos = [part["video"] for part in chat[0]["content"] if "video" in part]
    given = {"images": images} if images else {}
    if videos:
        given |= {"videos": videos, "do_sample_frames": False, "return_metadata": True}
        given["video_metadata"] = [
            {"total_num_frames": len(each), "fps": FPS, "frames_indices": list(range(len(each)))}
            for each in videos
        ]
    found = processor(
        text=text,
        add_special_tokens=False,
        return_tensors="pt",
        **given,
    )
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
