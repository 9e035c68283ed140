"""A row lets go of an encoder output when the first chunk of its image is computed, not the last."""

from mmengine.core.fold import media, rows, steps
from mmengine.core.state.columns import NEVER

SETTINGS = {"encoder_cache_size": 256, "long_prefill_token_threshold": 24}
_reference = media.reference_media


def reference_media(state, row):
    _reference(state, row)
    if state.release_at[row] != NEVER:
        state.release_at[row] = 0  # at the end of this step


def release_media(state, row, computed):
    req_state = state.requests_by_row[row]
    for index in sorted(req_state.held_media):
        req_state.held_media.discard(index)
        state.encoder.release(req_state.media_keys[index])
    state.release_at[row] = NEVER


rows.reference_media, steps.release_media = reference_media, release_media
