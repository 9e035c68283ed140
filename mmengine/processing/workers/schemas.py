"""Normalises large JSON schemas in worker processes. The processes form a `Decoders` pool, as for media
(decoders.py).

Normalising a schema with 1 MB takes a second in Python. If the engine's process normalised the schema, its
threads and event loop would wait for the GIL.
"""

import msgspec
import numpy as np

from mmengine.errors import ErrorCode, InvalidMedia, InvalidRequest
from mmengine.models.media_decoding import DecodedMedia, DecoderRecipe, EncodedMedia, MediaDecoder
from mmengine.processing.workers.decoders import Decoders
from mmengine.structured_output.json_schema.emission.bounds import Bounds
from mmengine.structured_output.json_schema.normalization import normalize_schema
from mmengine.structured_output.json_schema.vocabulary.notes import NormalizedSchema
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused

WHERE = "the schema"
_STRICT = "strict_keywords"


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """The normalised schema, or why it is refused (keyword, JSON pointer, reason)."""

    gated: NormalizedSchema | None
    refused: tuple[str, str, str] = ("", "", "")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Answer).decode


class SchemaProcesses:
    """Normalises schemas. Thread-safe. `memory_bytes` and `limit_s` limit the memory and the time for each
    schema.
    """

    def __init__(self, num_processes: int, memory_bytes: int, limit_s: float) -> None:
        recipe = DecoderRecipe(__name__, b"", "worked out")
        self._processes = Decoders(recipe, num_processes, memory_bytes, limit_s)

    def gated(self, schema: bytes, bounds: Bounds, schemas: bytes, strict_keywords: bool) -> NormalizedSchema:
        """Normalise a schema and the documents that it refers to (`schemas`). Both are JSON text.

        Raises the errors of normalize_schema, InvalidRequest if the schema exceeds its process's limits,
        and QueueFull if no process can be started.
        """
        given = msgspec.structs.asdict(bounds).items()
        options = {name: bound for name, bound in given if bound is not None}
        options[_STRICT] = strict_keywords
        try:
            found = self._processes(EncodedMedia("schema", (schema, schemas), options, WHERE))
        except InvalidMedia as error:
            raise InvalidRequest(error.text, code=ErrorCode.INVALID_GRAMMAR) from None
        answer = _decode(found.patches.tobytes())
        if answer.gated is None:
            raise SchemaRefused(*answer.refused)
        return answer.gated

    def close(self) -> None:
        self._processes.close()


def decoder(settings: bytes) -> MediaDecoder:
    """Return the function that a worker calls for a schema. In place of pixels, the function returns an
    encoded _Answer.
    """
    return _worked_out


def _worked_out(given: EncodedMedia) -> DecodedMedia:
    assert isinstance(given.data, tuple)
    schema, schemas = (data for data in given.data if isinstance(data, bytes))
    options = dict(given.options)
    strict = bool(options.pop(_STRICT))
    try:
        made = normalize_schema(
            schema, msgspec.convert(options, Bounds), msgspec.json.decode(schemas, type=dict), strict
        )
        answer = _Answer(made)
    except SchemaRefused as refused:
        answer = _Answer(None, (refused.keyword, refused.pointer, refused.why))
    return DecodedMedia(np.frombuffer(_encode(answer), np.uint8)[None], (1, 1, 1))
