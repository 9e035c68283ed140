"""Release an encoder output for all rows as soon as one of the rows no longer needs the output."""

from mmengine.encoder_cache.cache import EncoderCache

# Short chunks let several rows share a step, so several images are partly computed.
SETTINGS = {"long_prefill_token_threshold": 24}
_release = EncoderCache.release


def release(self, key):
    entry = self.entries.get(key)
    if entry is not None and entry.references:
        entry.references = 1
        _release(self, key)


EncoderCache.release = release
