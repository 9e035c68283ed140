"""What stands where in a session: pieces of turns, and the chain that they make.

Where the chain would be longer than the session may be, a new one begins: the anchor, the last pieces, and
what comes now. Its tokens are computed as those of any prompt, so nothing of what was dropped is in them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmengine.core.state.sessions import Chunk, SessionState
from mmengine.errors import InvalidRequest
from mmengine.models.plugin import MediaInput, Opens, Prepared
from mmengine.request import MediaItem

Part = dict[str, object]  # of a message


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """Where a prompt stands: in which session, what it `opens` (see TurnProcessor), and whether it stays when
    others are dropped. `length`: tokens that the session may have; `keep`: those that a new chain may begin
    with. `loaded`: older media of the session, which it has to encode again."""

    session_id: str
    opens: Opens
    is_anchor: bool
    length: int
    keep: int
    film: int = 0  # as in APPENDED
    was_in_film: bool = False  # when it was prepared
    loaded: tuple[MediaInput, ...] = ()


class SessionChain(NamedTuple):
    """The prompt of a request of a session, whole: int32 [n], and its media in order. `num_kept`: tokens of
    the session that it goes on with; `num_opening`: of those behind them, as in APPENDED."""

    tokens: np.ndarray
    media: tuple[MediaItem, ...]
    num_kept: int
    num_opening: int
    film: int = 0


def has_open_video(session: SessionState) -> bool:
    """Whether a video was left open, for more frames."""
    return bool(session.chunks and session.chunks[-1].film)


def next_opening(session: SessionState) -> Opens:
    """What the next piece opens."""
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
    """`num_answer`: tokens that are kept free for the answer. `film_begins`: gives the tokens before a video.
    Raises InvalidRequest where the piece does not fit behind the anchor, or is an anchor behind something
    that is none."""
    if place.is_anchor and not all(chunk.is_anchor for chunk in session.chunks):
        raise InvalidRequest("an anchor stands at a session's beginning; append it before all else")
    own = _Piece(prepared.prompt_token_ids, tuple(one.item for one in prepared.media), prepared.num_opening)
    if place.opens == "next" and own.num_opening and own.tokens[0] == session.tokens[-1]:
        own = own.without(1)  # the answer ended its turn itself
    kept = len(session.tokens)
    if kept + len(own.tokens) + num_answer <= place.length:
        return _joined(session, kept, [own], place.film)
    anchor = _end_of_anchor(session)
    if anchor + len(own.tokens) + num_answer > place.length:
        raise InvalidRequest(
            f"the piece has {len(own.tokens)} tokens, its answer may have {num_answer}, and the anchor has "
            f"{anchor}: more than the {place.length} of the session; send less at a time, ask for a shorter "
            "answer, or open a longer session"
        )
    begins_in_film = place.film > 1
    room = place.keep - anchor - len(own.tokens) - num_answer
    pieces = [own]
    for first, last, chunk in reversed(_chunks_behind(session, anchor)):
        room -= last - first
        if room < 0:
            break
        media = tuple(item.moved(-first) for item in session.media if first <= item.start < last)
        pieces.insert(0, _Piece(session.tokens[first:last], media, chunk.num_opening))
        begins_in_film = chunk.film > 1
    pieces[0] = pieces[0].without(pieces[0].num_opening)
    if begins_in_film:
        pieces[0] = pieces[0].behind(film_begins())
    return _joined(session, anchor, pieces, min(place.film, 1))


class _Piece(NamedTuple):
    """Tokens, and media whose runs are counted from them."""

    tokens: np.ndarray
    media: tuple[MediaItem, ...]
    num_opening: int

    def without(self, count: int) -> "_Piece":
        media = tuple(item.moved(-count) for item in self.media)
        return _Piece(self.tokens[count:], media, self.num_opening - count)

    def behind(self, tokens: list[int]) -> "_Piece":
        media = tuple(item.moved(len(tokens)) for item in self.media)
        return _Piece(np.concatenate((np.array(tokens, np.int32), self.tokens)), media, self.num_opening)


def _joined(session: SessionState, kept: int, pieces: Sequence[_Piece], film: int) -> SessionChain:
    tokens, media, length = [session.tokens[:kept]], list(session.before(kept)), kept
    for piece in pieces:
        tokens.append(piece.tokens)
        media += [item.moved(length) for item in piece.media]
        length += len(piece.tokens)
    return SessionChain(np.concatenate(tokens), tuple(media), kept, pieces[0].num_opening, film)


def _end_of_anchor(session: SessionState) -> int:
    """Without an anchor it is what opens the first turn."""
    end = session.chunks[0].num_opening if session.chunks else 0
    for _, last, chunk in _chunks_behind(session, 0):
        if not chunk.is_anchor:
            break
        end = last
    return end


def _chunks_behind(session: SessionState, start: int) -> list[tuple[int, int, Chunk]]:
    """(first token, end, chunk) of those that begin at `start` or later."""
    ends = [*(chunk.start for chunk in session.chunks[1:]), len(session.tokens)]
    return [
        (chunk.start, end, chunk)
        for chunk, end in zip(session.chunks, ends, strict=True)
        if chunk.start >= start
    ]


def parts_of(content: object) -> list[Part]:
    """Content as it is appended, as parts of a message: a text, a part, or a list of both. Raises
    InvalidRequest."""
    given = content if isinstance(content, (list, tuple)) else [content]
    parts: list[Part] = []
    for part in given:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif isinstance(part, dict):
            parts.append(part)
    if not parts or len(parts) < len(given):
        raise InvalidRequest(
            "what is appended is a text, a part of a message such as {'type': 'image', 'image': …}, or a "
            "list of those"
        )
    return parts


def frames_part(frames: Sequence[tuple[float, object]], in_patch: int) -> list[Part]:
    """Frames of a video as parts: (seconds, image) each. What the encoder reads together is one part; where
    it reads each by itself, an image behind its time."""
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


_TICKS = 1000.0  # a second has, of the times of frames
