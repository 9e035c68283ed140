"""Defines the names that the calls in pipeline_calls.py use: pictures, prompts, tools, datasets and
streamers.
"""

import base64
import io
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

SAID = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


class Recorder:
    """A streamer that records its calls."""

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
    """Pictures and a video clip, with files in `folder`."""

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


def prompts(media):
    """Return chats, texts and template variables."""
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
    """Return the names that have the same values in transformers' calls and in mmengine's calls."""
    from torch.utils.data import Dataset, IterableDataset

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
    """Return what a streamer received, and the call's result."""
    streamer, out = kind() if kind is Recorder else kind(tokenizer, **options), io.StringIO()
    how = {"streamer": streamer, "max_new_tokens": 12}
    with redirect_stdout(out):
        result = pipe(prompt, stop_sequence=stop_sequence, generate_kwargs=how)
    if kind is Recorder:
        return [streamer.seen, result]
    return [list(streamer) if kind is transformers.TextIteratorStreamer else out.getvalue(), result]
