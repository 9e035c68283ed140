"""Renders PDF pages as image files, in decoder processes with limits on memory and time."""

import os
import time
from pathlib import Path

from mmengine.config import EngineConfig
from mmengine.errors import InvalidMedia, MMEngineError
from mmengine.events.file_system import write_whole
from mmengine.models.media_decoding import DecoderRecipe, EncodedMedia
from mmengine.processing.media import pages
from mmengine.processing.workers.attempt import Attempt, AttemptOver
from mmengine.processing.workers.decoders import Decoders
from mmengine.serve.extraction.documents import Document
from mmengine.serve.prompt.media_memory import media_workers

# The time limit for a document is this many times the limit for a single item (prepare_timeout_s).
ITEMS_PER_DOCUMENT = 10
COPY_SIDE = 1024  # Maximum width and height of a small copy, in pixels.


class PagePainter:
    """Renders PDF pages, and makes small copies of pictures for the review page, in decoder processes.
    Thread-safe. At most `num_workers` pages and copies are made in parallel.
    """

    def __init__(self, config: EngineConfig, dpi: int, max_pages: int) -> None:
        self.num_workers = media_workers(config.media_workers)
        self._dpi, self._max_pages = dpi, max_pages
        self._limit_s = config.prepare_timeout_s
        recipe = DecoderRecipe(pages.__name__, b"", "drawn")
        self._decoders = Decoders(
            recipe, self.num_workers, config.media_process_bytes, config.prepare_timeout_s
        )

    def draw(self, document: Document, folder: Path) -> list[Path]:
        """Render a document's pages as files in `folder`, and return the files in order. Pages that are
        already in the folder are not rendered again. Raises InvalidMedia.
        """
        ends_at = time.monotonic() + self._limit_s * ITEMS_PER_DOCUMENT if self._limit_s else None
        attempt = Attempt(ends_at)
        try:
            with attempt.on_this_thread():
                return self._draw(document, folder)
        except AttemptOver:
            text = f"the document takes longer than {self._limit_s * ITEMS_PER_DOCUMENT} seconds to be drawn"
            raise InvalidMedia(f"{text} (prepare_timeout_s); split it") from None

    def _draw(self, document: Document, folder: Path) -> list[Path]:
        count = self._decoders(EncodedMedia(pages.COUNT, document.path, {}, "the document")).grid[0]
        if count > self._max_pages:
            raise InvalidMedia(
                f"the document has {count:,} pages; the limit is {self._max_pages:,} (--max-pages)"
            )
        folder.mkdir(exist_ok=True)
        files = [folder / f"{number:04}.png" for number in range(1, count + 1)]
        for number, file in enumerate(files):
            if not file.exists():
                options = {"page": number, "dpi": self._dpi}
                page = self._decoders(EncodedMedia(pages.PAGE, document.path, options, "the document"))
                write_whole(file, bytearray(page.patches))
        return files

    def copy(self, picture: Path) -> bytes | None:
        """Return a small JPEG of a picture, or None if the picture cannot be decoded."""
        try:
            media = EncodedMedia(pages.COPY, picture, {"side": COPY_SIDE}, os.fspath(picture))
            return self._decoders(media).patches.tobytes()
        except MMEngineError:
            return None

    def close(self) -> None:
        self._decoders.close()
