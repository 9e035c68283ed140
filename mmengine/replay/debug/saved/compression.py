"""Compresses parts of saved states, and unpacks them up to a maximum size."""

import zstandard

from mmengine.errors import CorruptLog

MAX_UNPACKED_BYTES = 2**30


def compress(content: bytes) -> bytes:
    return zstandard.compress(content, 1)


def compress_against(content: bytes, base: bytes) -> bytes:
    """Return `content`, compressed with `base` as the dictionary. `base`: similar content of about equal
    size.
    """
    window = max(20, min(27, (2 * len(content)).bit_length()))
    params = zstandard.ZstdCompressionParameters.from_level(3, window_log=window, enable_ldm=True)
    return zstandard.ZstdCompressor(dict_data=_dictionary(base), compression_params=params).compress(content)


def decompress(what: str, data: bytes, base: bytes = b"") -> bytes:
    """Return the content of `data`. `what`: the data's name in errors. `base`: as for `compress_against`, or
    b"". Raises CorruptLog for damaged bytes.
    """
    try:
        if not 0 <= zstandard.frame_content_size(data) <= MAX_UNPACKED_BYTES:
            raise zstandard.ZstdError("it claims an impossible size")
        return zstandard.ZstdDecompressor(_dictionary(base) if base else None).decompress(data)
    except zstandard.ZstdError as error:
        raise CorruptLog(f"{what} cannot be unpacked: {error}") from None


def _dictionary(content: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
