"""Ask two questions about a drawn image concurrently and print each answer as it grows.

Messages from untrusted users need a Prompt with media_options={"local_files": False}. Otherwise the engine
reads any file whose path a message contains.
"""

import asyncio
import random

from mmengine import AsyncEngine
from mmengine_shapes.scenes import random_scene


async def ask(engine: AsyncEngine, image: object, question: str) -> str:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    shown = ""
    async with engine.stream([{"role": "user", "content": parts}], max_tokens=160) as stream:
        async for output in stream:
            shown += output.text
            print(f"{question} {shown}")
    return shown


async def main() -> list[str]:
    image = random_scene(random.Random(1)).draw()
    async with AsyncEngine() as engine:
        questions = ("Describe the image.", "How many shapes are there?")
        return await asyncio.gather(*(ask(engine, image, question) for question in questions))


if __name__ == "__main__":
    asyncio.run(main())
