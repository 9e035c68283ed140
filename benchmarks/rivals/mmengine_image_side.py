"""Runs mmengine for images_cpu.py: python mmengine_image_side.py MODEL PROJECTOR THREADS.

All settings except sizes and threads have their default values.
"""

import sys
import time

import numpy as np
import torch
from image_side import AFTER, BEFORE, MAX_TOKENS, Answer, serve_images
from PIL import Image

from mmengine import Engine, EngineConfig
from mmengine.checkpoint.gguf.pair import pair
from mmengine.serve.prompt.prompt import Prompt

BLOCKS = 4 * MAX_TOKENS // 16  # Four prompts of the maximum length.


class MMEngine:
    """Implements ImageSide (image_side.py) with mmengine."""

    def __init__(self, model: str, projector: str, threads: int) -> None:
        config = EngineConfig(max_model_len=MAX_TOKENS, num_blocks=BLOCKS, num_threads=threads)
        self._engine = Engine(pair(model, projector), device="cpu", config=config)
        model = self._engine.built.executor._runner._model
        compute = model.logits

        def noted(hidden: torch.Tensor) -> torch.Tensor:
            self._logits = compute(hidden)
            return self._logits

        self._logits, model.logits = torch.empty(0, 0), noted
        self._image_id = self._engine.processor.tokenizer.encode("<|image_pad|>", allow_special=True)[0]

    def ask(self, picture: np.ndarray, question: str, keeps: bool) -> Answer:
        start = time.perf_counter()
        text = BEFORE + "<|vision_start|><|image_pad|><|vision_end|>" + AFTER.format(question)
        prompt = Prompt(text=text, images=[Image.fromarray(picture)])
        self._engine.submit(prompt, max_tokens=1, temperature=0, ignore_eos=True)
        prepared = time.perf_counter() - start
        outputs = []
        while self._engine.has_work:
            outputs += self._engine.step()
        done = outputs[-1].completion
        is_image = done.prompt_token_ids == self._image_id
        text_ids = done.prompt_token_ids[~is_image].tolist()
        return Answer(int(done.token_ids[0]), text_ids, int(is_image.sum()), done.num_cached_tokens, prepared)

    def features(self) -> np.ndarray:
        store = self._engine.built.executor._runner._features
        *_, last = store._places
        return store.copy_of(last).float().numpy()

    def logits(self) -> np.ndarray:
        return self._logits[-1].float().numpy()


if __name__ == "__main__":
    model, projector, threads = sys.argv[1:]
    serve_images(MMEngine(model, projector, int(threads)))
