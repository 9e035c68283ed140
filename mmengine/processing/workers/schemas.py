"""Large schemas are worked out in processes of their own, by the machinery that decodes media.

The gate is Python: a schema of a megabyte takes it a second, in which every other thread of its process waits
for the interpreter again and again, the engine's and an event loop's among them. So a large schema goes to a
process as its text, and comes back as what the gate makes of it.
"""

import msgspec
import numpy as np

from mmengine.errors import ErrorCode, InvalidMedia, InvalidRequest
from mmengine.models.decoding import DecodedMedia, DecoderRecipe, EncodedMedia, MediaDecoder
from mmengine.processing.workers.decoders import Decoders
from mmengine.structured_output.json_schema.emission.bounds import Bounds
from mmengine.structured_output.json_schema.normalization import normalize_schema
from mmengine.structured_output.json_schema.vocabulary.notes import NormalizedSchema
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused

WHERE = "the schema"
_STRICT = "strict_keywords"


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """What the gate makes of a schema, or keyword, pointer and reason of its refusal."""

    gated: NormalizedSchema | None
    refused: tuple[str, str, str] = ("", "", "")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Answer).decode


class SchemaProcesses:
    """Works schemas out for several threads at once. `memory_bytes`, `limit_s`: of one schema."""

    def __init__(self, num_processes: int, memory_bytes: int, limit_s: float) -> None:
        recipe = DecoderRecipe(__name__, b"", "worked out")
        self._processes = Decoders(recipe, num_processes, memory_bytes, limit_s)

    def gated(self, schema: bytes, bounds: Bounds, schemas: bytes, strict_keywords: bool) -> NormalizedSchema:
        """What `gate` gives for a schema and the documents of its references, both JSON text. Raises what it
        raises; InvalidRequest too where it costs its process, QueueFull where none can be started."""
        options = {**msgspec.structs.asdict(bounds), _STRICT: strict_keywords}
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
    """What a process does with a schema: bytes of an _Answer, in place of pixels."""
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
