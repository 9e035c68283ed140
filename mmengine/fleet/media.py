"""Media that prompts of a fleet name by URL: fetched here, so that whoever goes on has the same bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.prompt_media import PromptMedia, names_urls


@asynccontextmanager
async def fetched(prompt: Prompt, is_over: Callable[[], bool] = lambda: False) -> AsyncIterator[Prompt]:
    """The prompt with bytes in place of names; the door counts them until the block ends, however it does.
    No thread of the loop's waits meanwhile: a few silent hosts would have them all. `is_over`: whether nobody
    wants it any more. Raises what PromptMedia raises."""
    if not names_urls(prompt):
        yield prompt
        return
    loop, is_there, is_left = asyncio.get_running_loop(), asyncio.Event(), False

    def tell(_: PromptMedia) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(is_there.set)

    media = PromptMedia(prompt, tell, lambda: is_left or is_over())
    try:
        await is_there.wait()
        yield await asyncio.to_thread(media.prompt)
    finally:
        is_left = True
        media.release()
