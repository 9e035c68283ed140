"""Decodes data: URLs and base64 by the rules of the WHATWG standards URL, Fetch and Infra.

By these rules, padding may be missing, line breaks and surrounding spaces are ignored, the data may be
percent-encoded, and a fragment (`#…`) ends the data. Text is decoded in pieces, because decoding holds the
GIL. Decoding a whole image at once would block all other threads for tens of milliseconds.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator
from urllib.parse import unquote_to_bytes

PIECE = 2**15  # Maximum number of characters that are decoded in a call.
MAX_HEAD = 256  # Maximum number of characters before the comma of a data: URL.
_AROUND = "".join(map(chr, range(0x21)))  # Control characters and spaces, which are stripped.
_WITHIN = dict.fromkeys(map(ord, "\t\n\r"))


def is_data_url(text: str) -> bool:
    """Return whether browsers would read `text` as a data: URL."""
    return text[:MAX_HEAD].lstrip(_AROUND).translate(_WITHIN)[:5].lower() == "data:"


def decode_data_url(url: str) -> bytes:
    """Return the bytes in a data: URL. Raises ValueError with the reason."""
    url = url.strip(_AROUND)
    if (fragment := url.find("#")) >= 0:
        url = url[:fragment]
    comma = url.find(",", 0, MAX_HEAD)
    if comma < 0:
        raise ValueError("is a data: URL without data; it should begin like data:image/png;base64,")
    kind, _, last = url[:comma].translate(_WITHIN).rpartition(";")
    is_base64 = bool(kind) and last.strip().lower() == "base64"
    if "%" in url[comma:] or not is_base64:
        raw = _unquoted(url, comma + 1)
        return decode_base64(piece.decode("latin-1") for piece in raw) if is_base64 else b"".join(raw)
    return decode_base64(_pieces(url, comma + 1))


def decode_base64(pieces: str | Iterable[str]) -> bytes:
    """Return the bytes of base64 text, by Infra's "forgiving-base64 decode". Raises ValueError."""
    try:
        return b"".join(_decoded(_pieces(pieces, 0) if isinstance(pieces, str) else pieces))
    except ValueError:  # Also raised for text that is not ASCII.
        raise ValueError("is not valid base64") from None


def _pieces(text: str, begin: int) -> Iterator[str]:
    for start in range(begin, len(text), PIECE):
        yield text[start : start + PIECE]


def _unquoted(text: str, begin: int) -> Iterator[bytes]:
    """Yield the percent-decoded text in pieces, without splitting an escape."""
    rest = ""
    for each in _pieces(text, begin):
        piece = rest + each.translate(_WITHIN)
        cut = piece.rfind("%", len(piece) - 2)
        rest = piece[cut:] if cut >= 0 else ""
        yield unquote_to_bytes(piece[:cut] if cut >= 0 else piece)
    yield unquote_to_bytes(rest)


def _decoded(pieces: Iterable[str]) -> Iterator[bytes]:
    rest = ""
    for each in pieces:
        piece = rest + "".join(each.split())
        # Keep at least 4 characters for the end of the text, which may have padding.
        end = max(0, len(piece) // 4 - 1) * 4
        if "=" in piece[:end]:
            raise ValueError("characters follow the padding")
        yield binascii.a2b_base64(piece[:end], strict_mode=True)
        rest = piece[end:]
    if len(rest) % 4 == 0:
        rest = rest.removesuffix("=").removesuffix("=")
    if "=" in rest:
        raise ValueError("the padding has the wrong length")
    yield base64.b64decode(rest + "=" * (-len(rest) % 4), validate=True)
