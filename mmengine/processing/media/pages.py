"""Encodes PDF pages as PNG, and small copies of images as JPEG.

The code runs in a decoder process (`processing/workers`), which limits the damage that a hostile document can
do. Only PDF needs pypdfium2.
"""

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from mmengine.errors import InvalidMedia
from mmengine.models.media_decoding import DecodedMedia, EncodedMedia, MediaDecoder
from mmengine.processing.media.images import load_rgb
from mmengine.processing.media.sources import Access

if TYPE_CHECKING:  # An optional dependency; loaded when a document is opened.
    from pypdfium2 import PdfDocument, PdfPage

COUNT, PAGE, COPY = "count", "page", "copy"  # The supported modalities.
POINTS_PER_INCH = 72
MAX_PAGE_PIXELS = 2**23  # A page that would have more pixels is drawn smaller.
_WRONG_PASSWORD = 4  # PDFium's FPDF_ERR_PASSWORD.


def decoder(settings: bytes) -> MediaDecoder:
    """Return the function that a worker calls for an item.

    COUNT returns a document's number of pages, as the first value of `grid`. PAGE returns a page as a PNG.
    The options `page` (the first page is 0) and `dpi` select the page and the resolution. COPY returns an
    image as a JPEG whose sides have at most `side` pixels. The encoded picture is in `patches`, and its
    height and width are in `grid`.
    """
    return _decode


def _decode(media: EncodedMedia) -> DecodedMedia:
    if media.modality == COPY:
        return _copy(media)
    document = _opened(media)
    try:
        if media.modality == COUNT:
            return DecodedMedia(np.zeros((1, 1), np.uint8), (len(document), 0, 0))
        return _encoded(_drawn(document, media), "PNG", compress_level=1)
    finally:
        document.close()


def _opened(media: EncodedMedia) -> "PdfDocument":
    from pypdfium2 import PdfDocument, PdfiumError  # Lazy: images do not need it

    assert isinstance(media.data, Path)
    unreadable = InvalidMedia(f"{media.where} is not a readable PDF document")
    try:
        document = PdfDocument(media.data)
    except PdfiumError as error:
        if error.err_code == _WRONG_PASSWORD:
            raise InvalidMedia(
                f"{media.where} is encrypted and needs a password; save it without one"
            ) from None
        raise unreadable from None
    if len(document) < 1:
        document.close()
        raise unreadable
    return document


def _drawn(document: "PdfDocument", media: EncodedMedia) -> Image.Image:
    from pypdfium2 import PdfiumError  # Lazy, as in `_opened`

    number, dpi = int(media.options["page"]), float(media.options["dpi"])
    try:
        document.init_forms()  # Without forms, the values of filled fields are not drawn.
        page = document[number]
        bitmap = page.render(scale=_scale(page, dpi))
        return bitmap.to_pil().convert("RGB")
    except (PdfiumError, ValueError):
        raise InvalidMedia(f"{media.where}, page {number + 1} is damaged and cannot be drawn") from None


def _scale(page: "PdfPage", dpi: float) -> float:
    """Return the factor from points to pixels, within MAX_PAGE_PIXELS. Raises ValueError for a page without
    an area.
    """
    width, height = page.get_size()
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise ValueError
    scale = min(dpi / POINTS_PER_INCH, math.sqrt(MAX_PAGE_PIXELS / (width * height)))
    # A narrow page, such as 1 point by 1,000,000, needs this second limit, because its short side is rounded
    # up to a pixel.
    return min(scale, MAX_PAGE_PIXELS / max(width, height))


def _copy(media: EncodedMedia) -> DecodedMedia:
    assert not isinstance(media.data, tuple)
    image = load_rgb(media.data, Access(), media.where)
    side = int(media.options["side"])
    image.thumbnail((side, side))
    return _encoded(image, "JPEG", quality=80)


def _encoded(image: Image.Image, form: str, **options: int) -> DecodedMedia:
    file = io.BytesIO()
    image.save(file, form, **options)
    return DecodedMedia(np.frombuffer(file.getvalue(), np.uint8)[None], (1, image.height, image.width))
