"""Applies events about media: encoded items, and references to encoder outputs.

A row begins to reference an encoder output in the first chunk that reads the output. The reference ends when
all the item's tokens are computed. The open step is the step to which decisions are being added.
"""

from collections.abc import Sequence

from mmengine.core.state.columns import NEVER
from mmengine.core.state.flight import Part, work_done
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.request import MediaItem, num_before


def encode(state: State, encode: tuple[tuple[bytes, int, int], ...], evict: tuple[bytes, ...]) -> None:
    """Evict the encoder outputs in `evict`, and add the outputs that the open step computes.

    `encode`: (key, row, index in the request's media) for each item.
    """
    _evict(state, evict)
    for key, row, index in encode:
        req_state = state.requests_by_row[row]
        size = req_state.request.media[index].num_embeds
        state.encoder.add(key, size)
        state.encoder_left -= size
        if req_state.media_work:
            state.work_left -= req_state.media_work[index]
        state.step_encoded.append((key, req_state.request, index))


def _evict(state: State, keys: tuple[bytes, ...]) -> None:
    for key in keys:
        state.encoder.evict(key)
        state.step_encoded = [item for item in state.step_encoded if item[0] != key]
    state.step_evicted += keys


def encode_part(state: State, event: ev.Encoded) -> None:
    """Add a part of a large item to the open step. The last part puts the item's output into the cache."""
    state.is_open = True
    request_id, index, until, evict = event.request_id, event.index, event.until, event.evict
    req_state = state.requests[request_id]
    key = req_state.media_keys[index]
    done = work_done(state.part, key)
    if not done:
        drop_part(state)
    _evict(state, evict)
    state.step_part = state.part = Part(request_id, key, index, done, until)
    if until >= req_state.media_work[index]:
        state.part = None
        state.encoder.add(key, req_state.request.media[index].num_embeds)
        state.step_encoded.append((key, req_state.request, index))


def drop_part(state: State) -> None:
    """Drop the computed parts of a partly encoded item."""
    if state.part is not None:
        state.encoder.dropped.append(state.part.key)
        state.part = None


def leave_part(state: State, request_id: str) -> None:
    """Give an ended request's partly encoded item to another request with the same item. Without such a
    request, drop the computed parts.
    """
    part = state.part
    if part is None or part.request_id != request_id:
        return
    for name, req_state in state.requests.items():
        if part.key in req_state.media_keys:
            state.part = part._replace(request_id=name, item=req_state.media_keys.index(part.key))
            return
    drop_part(state)


def next_media(media: Sequence[MediaItem], computed: int) -> int:
    """Return the start of the first embedding run with tokens that are not computed yet, or NEVER."""
    runs = (run for item in media[num_before(media, computed) :] for run in item.runs)
    return next((start for start, length in runs if start + length > computed), int(NEVER))


def reference_media(state: State, row: int) -> None:
    """Reference the encoder outputs that the row's chunk reads, and find the next embedding run."""
    req_state = state.requests_by_row[row]
    computed = int(state.num_computed[row])
    read = computed + bool(state.config.lookahead_tokens)  # a drafter reads one token ahead
    before = computed - int(state.scheduled[row])
    media = req_state.request.media
    for index in range(num_before(media, before), len(media)):
        for start, length in media[index].runs:
            reached = start < computed or (start < read and state.encoder.has(req_state.media_keys[index]))
            if reached and start + length > before and index not in req_state.held_media:
                req_state.held_media.add(index)
                state.encoder.reference(req_state.media_keys[index])
    state.next_media[row] = next_media(media, computed)
    held = state.constants.media_held_ahead
    state.release_at[row] = min(
        (media[index].end + held for index in req_state.held_media), default=int(NEVER)
    )


def release_media(state: State, row: int, computed: int) -> None:
    """Release encoder outputs for items that end within the row's first `computed` tokens."""
    req_state = state.requests_by_row[row]
    release_at = int(NEVER)
    for index in sorted(req_state.held_media):
        end = req_state.request.media[index].end + state.constants.media_held_ahead
        if end <= computed:
            req_state.held_media.discard(index)
            state.encoder.release(req_state.media_keys[index])
        else:
            release_at = min(release_at, end)
    state.release_at[row] = release_at
