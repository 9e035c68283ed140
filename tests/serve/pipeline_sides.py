"""Compares transformers' pipeline with ours on the included checkpoint.

    echo '["pipe(chat)"]' | python -m tests.serve.pipeline_sides

The command prints a JSON object that maps each call to [outcome, end of transformers' result, end of our
result, digest of transformers' result for pipeline_record.py].
"""

import hashlib
import importlib
import importlib.util
import io
import json
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from tests.serve.pipeline_names import Media, prompts, streamed, unchanging

ROOT = Path(__file__).resolve().parents[2]
TORCHVISION = ROOT / "build" / "torchvision"


def transformers_can_run():
    """Return whether transformers' pipeline can run. Even for texts, it needs torchvision."""
    return (TORCHVISION / "torchvision").is_dir()


def load_transformers():
    """Return the module transformers. Without CUDA, importing torchvision requires that two of its operators
    are declared.
    """
    if "torchvision" not in sys.modules:
        sys.path.append(str(TORCHVISION))
        global _operators
        _operators = torch.library.Library("torchvision", "DEF")
        _operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import transformers
    from transformers import image_processing_backends, video_processing_utils, video_utils
    from transformers.image_utils import load_image

    # torchvision's wheel cannot decode. Therefore, Pillow decodes picture files, and PyAV decodes clips.
    def as_tensor(image) -> torch.Tensor:
        return torch.from_numpy(np.array(load_image(image))).permute(2, 0, 1)

    image_processing_backends.load_image_as_tensor = as_tensor
    video_processing_utils.is_torchcodec_usable = lambda **_: True
    video_processing_utils.load_video = lambda video, **options: video_utils.load_video(
        video, **{**options, "backend": "pyav"}
    )
    transformers.logging.set_verbosity_error()
    return transformers


LENGTHS = {"max_new_tokens", "max_length", "generation_config"}
RAISES = "raises"


class Sides:
    """Runs calls on transformers' pipeline and on our pipeline.

    `evaluate` returns a call's result as plain data. With `ours_alone`, only our pipeline runs. This takes a
    tenth of the time.
    """

    def __init__(self, folder, ours_alone=False):
        import mmengine_shapes
        from mmengine.config import EngineConfig
        from mmengine.serve.engine.engine import Engine

        self._folder, self._ours_alone = str(folder), ours_alone
        self._transformers = (
            load_transformers() if not ours_alone else importlib.import_module("transformers")
        )
        self._model = str(mmengine_shapes.checkpoint_path())
        self._media = Media(folder)
        config = EngineConfig(max_num_seqs=8, max_model_len=2048)
        self.engine = Engine(self._model, config=config, device="cpu", dtype="float32")
        self._their_model = None

    def close(self):
        self.engine.close()

    def make(self, ours, **options):
        if ours:
            from mmengine.serve.pipeline.pipeline import Pipeline

            return Pipeline(model=self.engine, **options)
        if self._their_model is not None:
            options = {"processor": self._their_model.processor, **options}
        model = self._model if self._their_model is None else self._their_model.model
        made = self._transformers.pipeline(
            "image-text-to-text", model=model, device="cpu", dtype="float32", **options
        )
        self._their_model = self._their_model or made
        return made

    def evaluate(self, code, ours):
        names = self._names(ours)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            return plain(eval(code, names))

    def compare(self, code):
        """Return (outcome, theirs, ours), as in `outcome_of`."""
        theirs, ours = self._tried(code, False), self._tried(code, True)
        return outcome_of(theirs, ours), theirs, ours

    def kept(self, value):
        """Return a digest of a result, or RAISES for an error."""
        if isinstance(value, Exception):
            return RAISES
        text = json.dumps(value).replace(self._media.base64, "(picture)").replace(self._folder, "(folder)")
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def ours(self, code):
        """Return the digest of our pipeline's result, or RAISES."""
        return self.kept(self._tried(code, True))

    def _tried(self, code, ours):
        from mmengine.errors import MMEngineError

        try:
            return self.evaluate(code, ours)
        except MMEngineError as error:
            return error
        except Exception as error:
            if ours:
                raise
            return error

    @cached_property
    def _theirs(self):
        """Return transformers' tokenizer and transformers' config for the model."""
        if self._ours_alone:
            auto = self._transformers.AutoTokenizer, self._transformers.AutoConfig
            return tuple(kind.from_pretrained(self._model) for kind in auto)
        theirs = self.make(False)
        return theirs.tokenizer, theirs.model.config

    @cached_property
    def _of_pipelines(self):
        """Return classes from transformers.pipelines for use in calls.

        Importing transformers.pipelines takes a second. Therefore, `ours_alone` loads only KeyDataset, from
        its file.
        """
        if not self._ours_alone:
            from transformers.pipelines.image_text_to_text import ReturnType
            from transformers.pipelines.pt_utils import KeyDataset

            return {"ReturnType": ReturnType, "KeyDataset": KeyDataset}
        path = Path(self._transformers.__file__).parent / "pipelines" / "pt_utils.py"
        spec = importlib.util.spec_from_file_location("transformers.pipelines.pt_utils", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return {"KeyDataset": module.KeyDataset}

    def _names(self, ours):
        """Return the names for use in calls: pipelines, prompts, and transformers' classes."""
        pipe, (tokenizer, model_config) = self.make(ours), self._theirs
        media, transformers = self._media, self._transformers
        config, hello = transformers.GenerationConfig, prompts(media)["hello"]

        def generate(**options):
            length = {} if LENGTHS & options.keys() else {"max_new_tokens": 16}
            return pipe(hello, generate_kwargs={**length, **options})

        return {
            **vars(media),
            **prompts(media),
            **unchanging(),
            **self._of_pipelines,
            "pipe": pipe,
            "generate": generate,
            "tokens": lambda *given, **options: pipe(*given, return_tensors=True, **options),
            "configured": lambda **options: pipe(
                hello, generate_kwargs={"generation_config": config(**options)}
            ),
            "made": lambda **options: self.make(ours, **options),
            "streamed": lambda *given, **options: streamed(transformers, tokenizer, *given, **options),
            "TextStreamer": transformers.TextStreamer,
            "TextIteratorStreamer": transformers.TextIteratorStreamer,
            "GenerationConfig": config,
            "config_of_9": config(max_new_tokens=9),
            "watermark": transformers.WatermarkingConfig(),
            "tokenizer": tokenizer,
            "model_config": model_config,
            "star_id": tokenizer.encode("star")[0],
            "pink_id": tokenizer.encode(" pink")[0],
            "words": tokenizer.encode,
        }


def outcome_of(theirs, ours):
    """Return "agrees", "differs", "refused" (only our pipeline raises) or "more" (only transformers raises).
    The arguments are results or recorded digests.
    """
    raised = [isinstance(each, Exception) or each == RAISES for each in (theirs, ours)]
    if raised[1]:
        return "agrees" if raised[0] else "refused"
    if raised[0]:
        return "more"
    return "agrees" if theirs == ours else "differs"


def plain(value):
    """Return a result as comparable data."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if hasattr(value, "messages"):  # transformers' Chat
        return plain(value.messages)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (str, int, float)) or value is None:
        return value
    return type(value).__name__  # a picture in the chat


def main():
    with tempfile.TemporaryDirectory() as folder:
        sides, out = Sides(Path(folder)), {}
        for code in json.load(sys.stdin):
            outcome, theirs, ours = sides.compare(code)
            out[code] = [outcome, str(theirs)[-500:], str(ours)[-500:], sides.kept(theirs)]
        sides.close()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
