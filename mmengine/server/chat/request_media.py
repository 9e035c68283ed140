"""Reads the media that a call needs before its submission: uploaded images, and an image for which the call
requests boxes. The engine fetches all other media.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from mmengine.serve.prompt.fetched_media import with_fetched_media
from mmengine.server.chat.answer_boxes import refuse_unread
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.chat.uploaded_images import UploadedImages
from mmengine.server.http.body_reader import ParserThreads


class RequestMedia:
    """Reads media into prompts. `parsers`: the threads that read the sizes of images."""

    def __init__(self, uploads: UploadedImages, parsers: ParserThreads):
        self.uploads, self._parsers = uploads, parsers

    async def fill(
        self, parsed_request: ParsedRequest, add: Callable[[int], None] = lambda count: None
    ) -> ParsedRequest:
        """Return the request with the media's bytes in the prompts, and with the plan for the requested boxes
        in the envelope.

        `add` is called with the number of uploaded or fetched bytes, and may raise ApiError. Raises ApiError.
        For an image by URL, also raises the errors from `with_fetched_media`.
        """
        await self.uploads.fill(parsed_request, add)
        planner = parsed_request.box_planner
        if planner is None:
            return parsed_request
        (prompt,) = parsed_request.prompts
        async with with_fetched_media(prompt) as fetched:
            image = await asyncio.to_thread(planner.image, fetched)  # Slow for a long conversation.
            num_bytes = len(image.source) if isinstance(image.source, bytes) else 0
            if fetched is not prompt:
                add(num_bytes)
            plan = await self._parsers.run(num_bytes, partial(planner.plan, fetched, image))
        if plan is None:
            refuse_unread()
        parsed_request.prompts[:] = [fetched]
        envelope = msgspec.structs.replace(parsed_request.envelope, boxes=plan)
        return msgspec.structs.replace(parsed_request, envelope=envelope, box_planner=None)
