"""Measure the cost of decoding images in another process, and the delay of a text prompt meanwhile.

    python -m benchmarks preparation

The first part compares two times, each the minimum of 15 runs in ms. In the first, a thread prepares one
JPEG. In the second, another process receives and returns data of the same sizes, without decoding. The second
part measures a text prompt's time to the first token, alone and while 64 large pictures are prepared (medians
of at most 15 runs).
"""

import argparse
import asyncio
import io
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from PIL import Image

from benchmarks.media import preparation_decoder
from mmengine.config import EngineConfig
from mmengine.models.media_decoding import DecoderRecipe, EncodedMedia
from mmengine.processing.workers.decoders import Decoders
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine_qwen3_vl.processing import load_processor
from mmengine_shapes import checkpoint_path

SIDES = (64, 512, 1024, 2016)
REPEATS = 15
NUM_PICTURES, PICTURE_SIDE = 64, 3000


def jpeg(side: int, seed: int = 0) -> bytes:
    small = np.random.default_rng(seed).integers(0, 255, (side // 8 + 1, side // 8 + 1, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def milliseconds(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return 1e3 * min(found)


def hand_over() -> None:
    processor = load_processor(checkpoint_path())
    processor.media_cache.max_bytes = 0
    print("side   JPEG KiB   pixels KiB   thread ms   hand-over ms   ratio")
    for side in SIDES:
        data = jpeg(side)
        part = {"type": "image", "image": data, "max_pixels": 2**24}
        messages = [{"role": "user", "content": [part]}]
        rows = processor.prepare(messages).media[0].patches
        thread = milliseconds(lambda messages=messages: processor.prepare(messages))
        recipe = DecoderRecipe(preparation_decoder.__name__, str(len(rows)).encode())
        decoders = Decoders(recipe, 1, 2**31, 60.0)
        item = EncodedMedia("image", data, {}, "image 0")
        there_and_back = milliseconds(lambda decoders=decoders, item=item: decoders(item))
        decoders.close()
        sizes = f"{side:4} {len(data) / 1024:10.0f} {rows.nbytes / 1024:12.0f}"
        print(f"{sizes} {thread:11.1f} {there_and_back:14.2f} {there_and_back / thread:7.2f}")


async def first_token(engine: AsyncEngine, number: int) -> float:
    begun = time.perf_counter()
    async with engine.stream(f"What is a triangle? {number}", max_tokens=2) as stream:
        async for _ in stream:
            return time.perf_counter() - begun
    raise AssertionError("the stream ended without a token")


async def texts_beside_pictures() -> None:
    pictures = [jpeg(PICTURE_SIDE, seed) for seed in range(8)]
    config = EngineConfig(media_cache_bytes=0, prepare_timeout_s=600)
    async with AsyncEngine(config=config) as engine:
        await first_token(engine, -1)
        alone = [await first_token(engine, k) for k in range(REPEATS)]
        content = [
            [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": one}, {"type": "text", "text": "What?"}],
                }
            ]
            for one in pictures
        ]
        begun = time.perf_counter()
        asked = [
            asyncio.create_task(engine.generate(content[k % len(content)], max_tokens=1))
            for k in range(NUM_PICTURES)
        ]
        await asyncio.sleep(0.05)
        beside = []
        while not all(task.done() for task in asked) and len(beside) < REPEATS:
            beside.append(await first_token(engine, 1000 + len(beside)))
        await asyncio.gather(*asked)
        took = time.perf_counter() - begun
    print(
        f"first token of a text: {1e3 * median(alone):.1f} ms alone; while {NUM_PICTURES} pictures of "
        f"{PICTURE_SIDE} x {PICTURE_SIDE} are prepared, which takes {took:.1f} s, "
        f"{1e3 * median(beside):.1f} ms (at most {1e3 * max(beside):.1f} ms)"
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    hand_over()
    asyncio.run(texts_beside_pictures())


if __name__ == "__main__":
    main()
