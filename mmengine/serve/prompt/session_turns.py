"""Builds the prompt for a session's request from the session's tokens and the appended content. Each request
appends a piece: the new content's tokens and media. The session's pieces form the chain, which is the
request's prompt. If the chain would exceed the session's length, older pieces are dropped, except the anchor
(pieces at the start that the client marked). The shorter chain is prefilled again, so dropped pieces have no
influence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmengine.core.state.sessions import Chunk, SessionState
from mmengine.errors import InvalidRequest
from mmengine.models.plugin import MediaInput, Opens, Prepared
from mmengine.request import MediaItem

Part = dict[str, object]  # a part of a message


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """Describes how a request's prompt extends a session. `opens`: which turn the prompt opens (see
    TurnProcessor in models/plugin.py). `is_anchor`: whether the new piece is never dropped. `length`: maximum
    number of tokens in the session. `keep`: maximum number of tokens after pieces were dropped. `loaded`:
    older media that must be encoded again.
    """

    session_id: str
    opens: Opens
    is_anchor: bool
    length: int
    keep: int
    film: int = 0  # 1: the request ends inside a video; 2: the request also begins inside a video
    was_in_film: bool = False  # whether a video was open when the prompt was prepared
    loaded: tuple[MediaInput, ...] = ()


class SessionChain(NamedTuple):
    """The whole prompt for a session's request: tokens (int32 [n]), and media in prompt order. The first
    `num_kept` tokens are already in the session. The next `num_opening` tokens open a turn.
    """

    tokens: np.ndarray
    media: tuple[MediaItem, ...]
    num_kept: int
    num_opening: int
    film: int = 0


def has_open_video(session: SessionState) -> bool:
    """Return whether the last piece is a video to which frames may be added."""
    return bool(session.chunks and session.chunks[-1].film)


def next_opening(session: SessionState) -> Opens:
    """Return which turn the next piece opens: "first", "next", or "" if the last turn is still open."""
    if not session.chunks:
        return "first"
    return "next" if session.chunks[-1].num_outputs else ""


def build_chain(
    session: SessionState,
    prepared: Prepared,
    place: SessionPlace,
    num_answer: int,
    film_begins: Callable[[], list[int]],
) -> SessionChain:
    """Return the session's next chain. `num_answer`: the number of reserved answer tokens. `film_begins`: a
    function that returns the tokens before a video. Raises InvalidRequest if the new piece does not fit after
    the anchor, or if an anchor follows other pieces.
    """
    if place.is_anchor and not all(chunk.is_anchor for chunk in session.chunks):
        raise InvalidRequest("an anchor must come first in a session: append it before other content")
    new = _Piece(prepared.prompt_token_ids, tuple(one.item for one in prepared.media), prepared.num_opening)
    if place.opens == "next" and new.num_opening and new.tokens[0] == session.tokens[-1]:
        new = new.without(1)  # The answer already ends with the token that closes the turn.
    num_kept = len(session.tokens)
    if num_kept + len(new.tokens) + num_answer <= place.length:
        return _joined(session, num_kept, [new], place.film)
    anchor = _end_of_anchor(session)
    if anchor + len(new.tokens) + num_answer > place.length:
        raise InvalidRequest(
            f"the new content has {len(new.tokens)} tokens, its answer may have {num_answer}, and the "
            "anchor has "
            f"{anchor}; the session's limit is {place.length}: send less at a time, ask for a shorter "
            "answer, or open a longer session"
        )
    begins_in_film = place.film > 1
    room = place.keep - anchor - len(new.tokens) - num_answer
    pieces = [new]
    for first, last, chunk in reversed(_chunks_from(session, anchor)):
        room -= last - first
        if room < 0:
            break
        media = tuple(item.moved(-first) for item in session.media if first <= item.start < last)
        pieces.insert(0, _Piece(session.tokens[first:last], media, chunk.num_opening))
        begins_in_film = chunk.film > 1
    pieces[0] = pieces[0].without(pieces[0].num_opening)
    if begins_in_film:
        pieces[0] = pieces[0].after(film_begins())
    return _joined(session, anchor, pieces, min(place.film, 1))


class _Piece(NamedTuple):
    """A piece's tokens and media. The media's positions are relative to the first token."""

    tokens: np.ndarray
    media: tuple[MediaItem, ...]
    num_opening: int

    def without(self, count: int) -> "_Piece":
        media = tuple(item.moved(-count) for item in self.media)
        return _Piece(self.tokens[count:], media, self.num_opening - count)

    def after(self, tokens: list[int]) -> "_Piece":
        media = tuple(item.moved(len(tokens)) for item in self.media)
        return _Piece(np.concatenate((np.array(tokens, np.int32), self.tokens)), media, self.num_opening)


def _joined(session: SessionState, num_kept: int, pieces: Sequence[_Piece], film: int) -> SessionChain:
    tokens, media, length = [session.tokens[:num_kept]], list(session.before(num_kept)), num_kept
    for piece in pieces:
        tokens.append(piece.tokens)
        media += [item.moved(length) for item in piece.media]
        length += len(piece.tokens)
    return SessionChain(np.concatenate(tokens), tuple(media), num_kept, pieces[0].num_opening, film)


def _end_of_anchor(session: SessionState) -> int:
    """Return the anchor's number of tokens. Without an anchor, return the number of tokens that open the
    first turn.
    """
    end = session.chunks[0].num_opening if session.chunks else 0
    for _, last, chunk in _chunks_from(session, 0):
        if not chunk.is_anchor:
            break
        end = last
    return end


def _chunks_from(session: SessionState, start: int) -> list[tuple[int, int, Chunk]]:
    """Return (first token, end, chunk) for each chunk that begins at `start` or later."""
    ends = [*(chunk.start for chunk in session.chunks[1:]), len(session.tokens)]
    return [
        (chunk.start, end, chunk)
        for chunk, end in zip(session.chunks, ends, strict=True)
        if chunk.start >= start
    ]


def parts_of(content: object) -> list[Part]:
    """Return the appended texts and parts as a list of message parts. Raises InvalidRequest."""
    given = content if isinstance(content, (list, tuple)) else [content]
    parts: list[Part] = []
    for part in given:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif isinstance(part, dict):
            parts.append(part)
    if not parts or len(parts) < len(given):
        raise InvalidRequest(
            "appended content must be a text, a part of a message such as {'type': 'image', 'image': …}, or "
            "a list of these"
        )
    return parts


def frames_part(frames: Sequence[tuple[float, object]], in_patch: int) -> list[Part]:
    """Return a video's frames, (seconds, image), as message parts. If the encoder reads `in_patch` > 1 frames
    together, each group of `in_patch` frames becomes a video part. Otherwise each frame becomes a text with
    the time and an image part.
    """
    parts: list[Part] = []
    for first in range(0, len(frames), in_patch):
        patch = frames[first : first + in_patch]
        if in_patch == 1:
            parts.append({"type": "text", "text": f"<{patch[0][0]:.1f} seconds>"})
            parts.append({"type": "image", "image": patch[0][1]})
            continue
        metadata = {"fps": _TICKS, "frames_indices": [round(seconds * _TICKS) for seconds, _ in patch]}
        parts.append({"type": "video", "video": ([image for _, image in patch], metadata)})
    return parts


_TICKS = 1000.0  # ticks per second in frame times
