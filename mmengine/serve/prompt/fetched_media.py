"""Fetches media from the URLs in prompts, without blocking the event loop's thread pool."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.prompt_media import PromptMedia, names_urls


@asynccontextmanager
async def with_fetched_media(
    prompt: Prompt, is_over: Callable[[], bool] = lambda: False
) -> AsyncIterator[Prompt]:
    """Yield the prompt with media as bytes instead of URLs.

    The bytes count against the limit for fetched media until the `async with` block ends. Downloads do not
    use the event loop's thread pool, because a few unresponsive hosts would occupy the whole pool. `is_over`:
    returns whether the caller has cancelled the request. Raises the errors that PromptMedia raises.
    """
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
