"""Chooses a replica for a request by its prefix, so that requests with equal prefixes share KV blocks.

The routing key is a hash of the cache salt, the adapter and the prompt's beginning. Requests share blocks
only if salt and adapter are equal. In a prompt with media, the first image or video is hashed instead,
because its features and blocks cost most. Consistent hashing ignores load: all requests for a popular image
go to the same replica. When the replica is full, further requests go to the next replicas on the ring.
"""

import bisect
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from mmengine.serve.prompt.prompt import MAX_LOOKED_AT, MEDIA_KEYS, Prompt

TEXT_CHARS = 1024  # number of characters, or token ids, that are hashed in a prompt without media
VIRTUAL_NODES = 100  # points of one replica on the ring
_KEY_BYTES = 16


def affinity(prompt: Prompt, salt: str = "", adapter: str = "") -> str:
    """Return the routing key, 32 hex characters. Requests that should share a replica have equal keys.

    For an image URL, the URL itself is hashed.
    """
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in (salt.encode(), adapter.encode(), _beginning(prompt)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _beginning(prompt: Prompt) -> bytes:
    medium = next(_media(prompt), None)
    if medium is not None:
        return b"m" + (medium if isinstance(medium, bytes) else str(medium).encode(errors="replace"))
    if prompt.token_ids is not None:
        return b"t" + msgspec.json.encode(list(islice(prompt.token_ids, TEXT_CHARS)))
    text = prompt.text if prompt.text is not None else "\0".join(_texts(prompt))
    return b"s" + text[:TEXT_CHARS].encode(errors="replace")


def _parts(prompt: Prompt) -> Iterator[Mapping[str, object]]:
    for message in prompt.messages or ():
        content = message.get("content")
        if isinstance(content, str):
            yield {"type": "text", "text": content}
        elif isinstance(content, (list, tuple)):
            yield from (part for part in islice(content, MAX_LOOKED_AT) if isinstance(part, Mapping))


def _media(prompt: Prompt) -> Iterator[object]:
    for part in _parts(prompt):
        for name in sorted(MEDIA_KEYS & part.keys()):
            given = part[name]
            yield given.get("url") if isinstance(given, Mapping) else given
    yield from (*prompt.images, *prompt.videos)


def _texts(prompt: Prompt) -> Iterator[str]:
    for part in _parts(prompt):
        text = part.get("text")
        if isinstance(text, str):
            yield text


class Ring:
    """Replica names on a consistent-hash ring. Adding or removing a replica moves only the keys next to its
    points on the ring.
    """

    def __init__(self, names: Iterable[str]):
        self._points = sorted(
            (_place(f"{name}#{n}"), name) for name in set(names) for n in range(VIRTUAL_NODES)
        )

    def order(self, key: str) -> list[str]:
        """Return all replica names: first the replica for `key`, then its successors on the ring."""
        at = bisect.bisect(self._points, (_place(key), ""))
        return list(dict.fromkeys(name for _, name in (*self._points[at:], *self._points[:at])))


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
