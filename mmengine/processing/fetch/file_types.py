"""Recognises image and video files by their first bytes. A server's content type is not trusted."""

HEAD_BYTES = 189  # Number of bytes that suffice for all formats.
_FIRST = (
    *(b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM"),
    *(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),  # TIFF.
    b"\x1a\x45\xdf\xa3",  # Matroska, WebM.
    *(b"\x00\x00\x01\xba", b"\x00\x00\x01\xb3"),  # MPEG.
)
_RIFF = (b"WEBP", b"AVI ")
_TS_SYNC, _TS_PACKET = b"G", 188  # MPEG transport streams.
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip")  # MP4 and QuickTime.


def is_media(head: bytes) -> bool:
    """Return whether a file begins like a supported format. `head`: the file's first HEAD_BYTES bytes.
    Decoders later check the whole file.
    """
    if head.startswith(_FIRST) or head[4:8] in _BOXES:
        return True
    if head.startswith(b"RIFF"):
        return head[8:12] in _RIFF
    return head.startswith(_TS_SYNC) and head[_TS_PACKET : _TS_PACKET + 1] == _TS_SYNC
