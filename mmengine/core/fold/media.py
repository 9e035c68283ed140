"""The part of `evolve` that concerns media: what is encoded, who holds it, when it is let go."""

from mmengine.core.state.columns import NEVER
from mmengine.core.state.state import State


def encode(state: State, encode: tuple[tuple[bytes, int, int], ...], evict: tuple[bytes, ...]) -> None:
    """Encoder outputs leave the cache, others are about to be computed into it."""
    for key in evict:
        state.encoder.evict(key)
        state.step_encoded = [item for item in state.step_encoded if item[0] != key]
    state.step_evicted += evict
    for key, row, index in encode:
        size = state.requests_by_row[row].request.media[index].num_embeds
        state.encoder.add(key, size)
        state.encoder_left -= size
        state.step_encoded.append((key, state.requests_by_row[row].request, index))


def reference_media(state: State, row: int) -> None:
    """The row's chunk overlaps embeddings: hold what it uses, find what comes next."""
    req_state = state.requests_by_row[row]
    computed = int(state.num_computed[row])
    read = computed + bool(state.config.lookahead_tokens)  # a drafter reads one token ahead
    before = computed - int(state.scheduled[row])
    next_start, release_at = int(NEVER), int(NEVER)
    for index, item in enumerate(req_state.request.media):
        for start, length in item.runs:
            reached = start < computed or (start < read and state.encoder.has(req_state.media_keys[index]))
            if reached and start + length > before and index not in req_state.held_media:
                req_state.held_media.add(index)
                state.encoder.reference(req_state.media_keys[index])
            if start + length > computed:
                next_start = min(next_start, start)
        if index in req_state.held_media:
            release_at = min(release_at, item.end)
    state.next_media[row] = next_start
    state.release_at[row] = release_at


def release_media(state: State, row: int, computed: int) -> None:
    """Drop references to items whose embeddings are all computed."""
    req_state = state.requests_by_row[row]
    release_at = int(NEVER)
    for index in sorted(req_state.held_media):
        end = req_state.request.media[index].end
        if end <= computed:
            req_state.held_media.discard(index)
            state.encoder.release(req_state.media_keys[index])
        else:
            release_at = min(release_at, end)
    state.release_at[row] = release_at
