"""Release an encoder output for all rows when the first of them no longer needs it."""

from mmengine.encoder_cache.cache import EncoderCache

SETTINGS = {"long_prefill_token_threshold": 24}  # rows share steps, so several are inside an image
_release = EncoderCache.release


def release(self, key):
    entry = self.entries.get(key)
    if entry is not None and entry.references:
        entry.references = 1
        _release(self, key)


EncoderCache.release = release
