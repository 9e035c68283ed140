"""transformers' pipeline and ours on the embedded checkpoint, and what pipeline_calls.py calls by name.

    echo '["pipe(chat)"]' | python -m tests.serve.pipeline_sides

compares what both give for each call of a list: ["agrees", the end of theirs, the end of ours] by call.
"""

import base64
import io
import json
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
TORCHVISION = ROOT / "build" / "torchvision"


def transformers_can_run():
    """Whether transformers' processor of videos can be loaded: its own pipeline needs it for a text too."""
    return (TORCHVISION / "torchvision").is_dir()


def load_transformers():
    """Its module. torchvision's wheel looks for CUDA; with two operators declared it can be imported."""
    if "torchvision" not in sys.modules:
        sys.path.append(str(TORCHVISION))
        global _operators
        _operators = torch.library.Library("torchvision", "DEF")
        _operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import transformers
    from transformers import image_processing_backends, video_processing_utils, video_utils
    from transformers.image_utils import load_image

    # That wheel cannot decode: files of pictures go through Pillow, as by transformers' own `load_image`, and
    # clips through PyAV, which it has a decoder for.
    def as_tensor(image) -> torch.Tensor:
        return torch.from_numpy(np.array(load_image(image))).permute(2, 0, 1)

    image_processing_backends.load_image_as_tensor = as_tensor
    video_processing_utils.is_torchcodec_usable = lambda **_: True
    video_processing_utils.load_video = lambda video, **options: video_utils.load_video(
        video, **{**options, "backend": "pyav"}
    )
    transformers.logging.set_verbosity_error()
    return transformers


SAID = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
LENGTHS = {"max_new_tokens", "max_length", "generation_config"}


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


def get_weather(city: str) -> str:
    """
    The weather of a city.

    Args:
        city: its name
    """
    return city


TOOL_TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{% endif -%}{%- if documents %}{{ documents | tojson }}{% endif -%}"
    "{%- if enable_thinking %}think {% endif -%}{{ colour }}{%- if add_vision_id %}picture {% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content[0].text }}<|im_end|>\n"
    "{% endfor -%}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)


def text_part(text):
    return {"type": "text", "text": text}


def assistant(*parts):
    return {"role": "assistant", "content": list(parts)}


def user(*parts):
    return {"role": "user", "content": list(parts)}


class Media:
    """Pictures and a clip, made once; files in `folder`."""

    def __init__(self, folder):
        import random

        import av
        from PIL import Image

        from mmengine_shapes.scenes import random_clip, random_scene

        self.picture = random_scene(random.Random(3)).draw()
        self.second_picture = random_scene(random.Random(4)).draw()
        frames = [frame.resize((128, 128)) for frame in random_clip(random.Random(5)).frames()]
        self.frames = [frames[k * len(frames) // 16] for k in range(16)]
        self.frame_array = np.stack([np.asarray(frame) for frame in self.frames])
        self.clip = str(folder / "clip.mp4")
        with av.open(self.clip, "w") as file:
            stream = file.add_stream("mpeg4", rate=8)
            stream.width, stream.height, stream.pix_fmt = 128, 128, "yuv420p"
            for frame in self.frames:
                file.mux(stream.encode(av.VideoFrame.from_image(frame)))
            file.mux(stream.encode())
        self.path, self.turned_path = str(folder / "picture.png"), str(folder / "turned.jpg")
        self.picture.save(self.path)
        exif = Image.Exif()
        exif[0x0112] = 6
        half = self.picture.resize((128, 64))
        half.save(self.turned_path, exif=exif)
        self.turned = Image.open(self.turned_path)
        self.turned.load()
        self.base64 = base64.b64encode(Path(self.path).read_bytes()).decode()
        self.data_url = "data:image/png;base64," + self.base64
        self.array = np.asarray(self.picture)
        self.tensor = torch.from_numpy(self.array.copy()).permute(2, 0, 1)
        self.grey = self.picture.convert("L")
        self.palette = self.picture.convert("P")
        self.transparent = self.picture.copy()
        self.transparent.putalpha(self.picture.convert("L"))
        self.deep_grey = Image.fromarray(np.asarray(self.grey).astype(np.uint16) * 257)


class Sides:
    """Both pipelines. `evaluate` gives what a call gives, as plain data, or the error that it raises."""

    def __init__(self, folder):
        import mmengine_shapes
        from mmengine.config import EngineConfig
        from mmengine.serve.engine import Engine

        self._transformers = load_transformers()
        self._model = str(mmengine_shapes.checkpoint_path())
        self._media = Media(folder)
        config = EngineConfig(max_num_seqs=8, max_model_len=2048)
        self.engine = Engine(self._model, config=config, device="cpu", dtype="float32")
        self._their_model = None

    def close(self):
        self.engine.close()

    def make(self, ours, **options):
        if ours:
            from mmengine.serve.pipeline import Pipeline

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
        """(outcome, theirs, ours): "agrees", "differs", "refused" (here alone), "more" (theirs raises)."""
        theirs, ours = self._tried(code, False), self._tried(code, True)
        if isinstance(ours, Exception):
            return ("agrees" if isinstance(theirs, Exception) else "refused"), theirs, ours
        if isinstance(theirs, Exception):
            return "more", theirs, ours
        return ("agrees" if theirs == ours else "differs"), theirs, ours

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

    def _names(self, ours):
        """What calls name: pipelines, prompts, and transformers' own classes."""
        pipe, theirs = self.make(ours), self.make(False)
        media, transformers, tokenizer = self._media, self._transformers, theirs.tokenizer
        config, hello = transformers.GenerationConfig, prompts(media)["hello"]

        def generate(**options):
            length = {} if LENGTHS & options.keys() else {"max_new_tokens": 16}
            return pipe(hello, generate_kwargs={**length, **options})

        return {
            **vars(media),
            **prompts(media),
            **unchanging(),
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
            "model_config": theirs.model.config,
            "star_id": tokenizer.encode("star")[0],
            "pink_id": tokenizer.encode(" pink")[0],
            "words": tokenizer.encode,
        }


def prompts(media):
    """Chats, texts, and what a chat template may read beside them."""
    hello, prompt = [user(text_part("Hello"))], SAID.format(f"{PLACEHOLDER}What is in it?")
    pictures = media.picture, media.second_picture
    return {
        "chat": [user(text_part("What is it?"))],
        "hello": hello,
        "plain": [user(text_part("Is it red?"))],
        "second": [user(text_part("Name a colour."))],
        "asked": asked,
        "seen": asked({"type": "image", "image": media.picture}),
        "filmed": asked({"type": "video", "video": media.clip}),
        "two_images": [user(*({"type": "image", "image": one} for one in pictures), text_part("Both?"))],
        "system": [{"role": "system", "content": [text_part("Be brief.")]}, *hello],
        "dialogue": [*hello, assistant(text_part("Hi.")), user(text_part("What is it?"))],
        "prefill": [*hello, assistant(text_part("There is a"))],
        "said": SAID.format("What is it?"),
        "said_too": SAID.format("Is it red?"),
        "prompt": prompt,
        "prompt_of_two": f"{PLACEHOLDER}{PLACEHOLDER}Both?",
        "pairs": [{"images": one, "text": prompt} for one in pictures],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "get_weather": get_weather,
        "documents": [{"title": "a", "text": "b"}],
        "other_template": "{% for m in messages %}{{ m.content[0].text }}{% endfor %}",
        "tool_template": TOOL_TEMPLATE,
    }


def unchanging():
    """Names that no side changes."""
    from torch.utils.data import Dataset, IterableDataset
    from transformers.pipelines.image_text_to_text import ReturnType
    from transformers.pipelines.pt_utils import KeyDataset

    class Listed(Dataset):
        def __init__(self, items):
            self.items = items

        def __len__(self):
            return len(self.items)

        def __getitem__(self, index):
            return self.items[index]

    class Streaming(IterableDataset):
        def __init__(self, items):
            self.items = items

        def __iter__(self):
            return iter(self.items)

    return {
        "Recorder": Recorder,
        "ReturnType": ReturnType,
        "KeyDataset": KeyDataset,
        "listed": Listed,
        "streaming": Streaming,
        "generated": lambda items: (item for item in items),
        "iter_of": iter,
        "is_lazy": lambda result: not isinstance(result, list),
        "chosen": lambda ids, scores: scores,
        "never": lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool),
        "every_token": lambda batch, ids: list(range(1500)),
    }


def asked(part):
    return [user(part, text_part("What is in it?"))]


def streamed(transformers, tokenizer, pipe, kind, prompt, stop_sequence=None, **options):
    """What a streamer heard, and what came back."""
    streamer, out = kind() if kind is Recorder else kind(tokenizer, **options), io.StringIO()
    how = {"streamer": streamer, "max_new_tokens": 12}
    with redirect_stdout(out):
        result = pipe(prompt, stop_sequence=stop_sequence, generate_kwargs=how)
    if kind is Recorder:
        return [streamer.seen, result]
    return [list(streamer) if kind is transformers.TextIteratorStreamer else out.getvalue(), result]


def plain(value):
    """A result as data that can be compared."""
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
    return type(value).__name__  # a picture that came with the chat


def main():
    with tempfile.TemporaryDirectory() as folder:
        sides, out = Sides(Path(folder)), {}
        for code in json.load(sys.stdin):
            outcome, theirs, ours = sides.compare(code)
            out[code] = [outcome, str(theirs)[-500:], str(ours)[-500:]]
        sides.close()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
