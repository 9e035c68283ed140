"""The first of several rows that are done with an image lets go of its encoder output for all of them."""

from mmengine.encoder_cache.cache import EncoderCache

SETTINGS = {"long_prefill_token_threshold": 24}  # rows share steps, so several are inside of one image
_release = EncoderCache.release


def release(self, key):
    entry = self.entries.get(key)
    if entry is not None and entry.references:
        entry.references = 1
        _release(self, key)


EncoderCache.release = release
