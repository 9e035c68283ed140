"""Reads public request traces, which contain arrival times, lengths and shared prefixes, but no text.

Prompt tokens are generated. Blocks with equal ids in a Mooncake trace get equal tokens; all other tokens
differ between requests.
"""

import csv
import hashlib
import io
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from mmengine.errors import InvalidRequest
from mmengine.request import MediaItem
from mmengine.simulation.bounded_files import MAX_TOKENS, decode, lines
from mmengine.simulation.workload import IMAGE_TOKEN, TOKEN_HIGH, TOKEN_LOW, SimRequest, Workload

MOONCAKE_BLOCK = 512  # number of tokens for each hash id
MAX_IMAGES = 4096
_MIX = np.uint64(0x9E3779B97F4A7C15)
_OWN = 2**40  # smaller stream numbers are Mooncake hash ids; larger numbers belong to single requests


def stream_tokens(streams: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` tokens of each stream, as int32 [len(streams), count].

    A stream is a number (int64, 0 to 2^43), from which a hash generates tokens.
    """
    places = streams.astype(np.uint64)[:, None] * np.uint64(2**20) + np.arange(count, dtype=np.uint64)
    once = np.multiply(places, _MIX, dtype=np.uint64)
    twice = np.multiply(once ^ once >> np.uint64(29), _MIX, dtype=np.uint64)
    return (TOKEN_LOW + (twice >> np.uint64(33)) % np.uint64(TOKEN_HIGH - TOKEN_LOW)).astype(np.int32)


def _own_tokens(number: int, count: int) -> np.ndarray:
    """Return `count` tokens that differ from the tokens of all other requests. A stream has 2^20 tokens, so a
    long prompt uses several streams.
    """
    streams = _OWN + number * 16 + np.arange(-(-count // 2**20))
    return stream_tokens(streams, min(count, 2**20)).reshape(-1)[:count]


def read_azure(path: Path, limit: int | None) -> Workload:
    """Read an Azure LLM inference trace: a CSV table with TIMESTAMP, ContextTokens and GeneratedTokens."""
    names = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    rows = _csv_rows(path, names, limit)
    requests: list[SimRequest] = []
    first: datetime | None = None
    for number, (where, row) in enumerate(rows):
        when = _timestamp(row[0], where)
        first = first or when
        num_prompt, num_output = (_whole(text, where) for text in row[1:])
        delta = when - first
        arrival = ((delta.days * 86400 + delta.seconds) * 10**6 + delta.microseconds) * 1000
        requests.append(_plain(path, number, where, arrival, num_prompt, num_output))
    return _timed(path, requests)


def _plain(path: Path, number: int, where: str, arrival: int, num_prompt: int, num_output: int) -> SimRequest:
    return _sim_request(
        number, where, arrival, num_prompt, num_output, lambda: _own_tokens(number, num_prompt)
    )


def _csv_rows(path: Path, names: tuple[str, ...], limit: int | None) -> Iterator[tuple[str, list[str]]]:
    """Yield (file and line for messages, values in the columns `names`) for each row."""
    table = lines(path, None if limit is None else limit + 1)  # the header and `limit` rows
    head = next(table, None)
    columns = [] if head is None else next(csv.reader(io.StringIO(_text(head[1], str(path)))))
    missing = [name for name in names if name not in columns]
    if missing:
        raise InvalidRequest(
            f"{path} has no column {missing[0]}; its first line must name {', '.join(names)}"
        )
    places = [columns.index(name) for name in names]
    for number, line in table:
        where = f"{path}, line {number}"
        cells = next(csv.reader(io.StringIO(_text(line, where))))
        if len(cells) != len(columns):
            raise InvalidRequest(f"{where} has {len(cells)} columns, the first line has {len(columns)}")
        yield where, [cells[place] for place in places]


def _text(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where} is not text: {error}") from None


def _timestamp(text: str, where: str) -> datetime:
    try:
        when = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidRequest(f"{where}: {text[:40]!r} is not a time like 2023-11-16 18:17:03.97996") from None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def _whole(text: str, where: str) -> int:
    if not text.strip().isdecimal() or len(text) > 20:
        raise InvalidRequest(f"{where}: {text[:40]!r} is not a token count")
    return int(text)


class _Mooncake(msgspec.Struct):
    timestamp: int  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_mooncake(path: Path, limit: int | None) -> Workload:
    """Read a Mooncake trace. Each id in `hash_ids` stands for 512 prompt tokens. Equal ids have equal
    tokens.
    """
    decoder = msgspec.json.Decoder(_Mooncake)
    requests = []
    for number, (at, line) in enumerate(lines(path, limit)):
        where = f"{path}, line {at}"
        row = decode(line, decoder, where)
        if any(not 0 <= block < _OWN for block in row.hash_ids):
            raise InvalidRequest(f"{where}: hash_ids must lie in 0 to {_OWN - 1}")
        prompt = _mooncake_prompt(number, row.hash_ids, row.input_length)
        arrival = row.timestamp * 10**6
        requests.append(_sim_request(number, where, arrival, row.input_length, row.output_length, prompt))
    return _timed(path, requests)


def _mooncake_prompt(number: int, hash_ids: list[int], count: int) -> Callable[[], np.ndarray]:
    blocks = np.array(hash_ids, np.int64)

    def make() -> np.ndarray:
        shared = stream_tokens(blocks, MOONCAKE_BLOCK).reshape(-1)[:count]
        return np.concatenate((shared, _own_tokens(number, count - len(shared))))

    return make


class _ServeGen(msgspec.Struct):
    t: float  # s
    text_tokens: int
    output_tokens: int
    image_tokens: int = 0
    audio_tokens: int = 0
    video_tokens: int = 0
    image_count: int = 0
    audio_count: int = 0
    video_count: int = 0


def read_servegen(path: Path, limit: int | None) -> Workload:
    """Read a multimodal ServeGen trace. The media of a request come before its text.

    All items are distinct. The items of a modality share the modality's tokens evenly.
    """
    decoder = msgspec.json.Decoder(_ServeGen)
    requests = []
    for number, (at, line) in enumerate(lines(path, limit)):
        where = f"{path}, line {at}"
        requests.append(_servegen_request(number, decode(line, decoder, where), where))
    return _timed(path, requests)


def _servegen_request(number: int, row: _ServeGen, where: str) -> SimRequest:
    if not 0 <= row.t < 2**31:
        raise InvalidRequest(f"{where}: t must lie in 0 to 2^31 s, not {row.t}")
    media: list[MediaItem] = []
    start = 0
    for modality in ("image", "audio", "video"):
        tokens, count = getattr(row, f"{modality}_tokens"), getattr(row, f"{modality}_count")
        if not 0 <= tokens <= MAX_TOKENS or not 0 <= count <= MAX_IMAGES:
            raise InvalidRequest(
                f"{where}: {modality}_tokens {tokens} or {modality}_count {count} is out of range; "
                f"the limits are 0 to {MAX_TOKENS} and 0 to {MAX_IMAGES}"
            )
        items = _media(number, modality, start, tokens, max(count, 1))
        media += items
        start += sum(item.num_embeds for item in items)
    num_media = start

    def make() -> np.ndarray:
        return np.concatenate(
            (np.full(num_media, IMAGE_TOKEN, np.int32), _own_tokens(number, row.text_tokens))
        )

    num_prompt, arrival = num_media + row.text_tokens, int(row.t * 10**9)
    return _sim_request(number, where, arrival, num_prompt, row.output_tokens, make, tuple(media))


def _media(number: int, modality: str, start: int, tokens: int, count: int) -> list[MediaItem]:
    """Return at most `count` adjacent items, the first at prompt token `start`. The items share `tokens`
    embeddings evenly, and no item is empty.
    """
    items = []
    for index in range(min(count, tokens)):
        length = tokens // count + (index < tokens % count)
        mm_hash = hashlib.sha256(f"{modality}:{number}:{index}".encode()).digest()
        items.append(MediaItem(mm_hash, modality, ((start, length),), (1, 2, 2 * length)))
        start += length
    return items


def _sim_request(
    number: int,
    where: str,
    arrival: int,
    num_prompt: int,
    num_output: int,
    prompt: Callable[[], np.ndarray],
    media: tuple[MediaItem, ...] = (),
) -> SimRequest:
    if not 1 <= num_prompt <= MAX_TOKENS or not 0 <= num_output <= MAX_TOKENS:
        raise InvalidRequest(f"{where}: a prompt has 1 to {MAX_TOKENS} tokens, an output 0 to {MAX_TOKENS}")
    if not 0 <= arrival < 2**62:
        raise InvalidRequest(f"{where}: the request arrives before the first request, or 146 years after it")
    return SimRequest(f"r{number}", num_prompt, prompt, max(num_output, 1), arrival, media)


def _timed(path: Path, requests: list[SimRequest]) -> Workload:
    return Workload(name=path.stem, requests=requests, timed=True)
