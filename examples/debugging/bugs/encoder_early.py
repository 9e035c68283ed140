"""A planted bug: when one row releases an encoder output, the output is released for all rows."""

from mmengine.encoder_cache.cache import EncoderCache

# With short chunks, several rows share a step, and several images are partly prefilled.
SETTINGS = {"long_prefill_token_threshold": 24}
_release = EncoderCache.release


def release(self, key):
    entry = self.entries.get(key)
    if entry is not None and entry.references:
        entry.references = 1
        _release(self, key)


EncoderCache.release = release
