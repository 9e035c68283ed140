"""The engine's settings: a frozen struct and its checks. The engine writes the checked settings into the
log's first event, STARTED.
"""

from typing import ClassVar

import msgspec

from mmengine.config_checks import contradictions
from mmengine.decode_errors import out_of_range
from mmengine.errors import ConfigError, shown
from mmengine.model_settings import ModelSettings

# Settings on which no decision depends. A process that continues a log may change these settings.
OPERATIONAL = (
    *("log_sync", "log_retain_bytes", "log_retain_s", "snapshot_bytes", "media_store_bytes"),
    *("step_timeout_s", "num_threads", "media_workers", "media_cache_bytes", "media_ahead_bytes"),
    *("media_decoding", "media_process_bytes", "prepare_timeout_s"),
    *("grammar_timeout_s", "max_digits", "spec", "reasoning_start", "reasoning_end", "cuda_graphs"),
    *("tensor_parallel", "batch_invariant"),
    *("block_store_path", "block_store_bytes", "fetch_timeout_s"),
    *("session_media_bytes", "task"),
)
MAX_MARKER_CHARS = 64
ENCODER_CACHE = 32_768  # embeddings in the encoder cache if free memory is not measured


class EngineConfig(ModelSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine's settings, and their checks."""

    _commit_hash: ClassVar[None] = None  # older versions of `transformers.pipeline` read this attribute

    def as_dict(self) -> dict:
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, settings: dict) -> "EngineConfig":
        """Return the settings in a dict. Raises ConfigError for an unknown name, a wrong type or a value out
        of range.
        """
        try:
            return msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            found = out_of_range(error, settings, cls)
            if found is None:
                raise ConfigError(f"invalid settings: {error}") from None
            name, low, high, value = found
            raise ConfigError(f"{name} must lie in {low} to {high}, not {shown(value)}") from None

    def check(self) -> None:
        """Raise ConfigError for the first value that has a wrong type or is out of range. Also raise
        ConfigError for settings that exclude each other.
        """
        self._check_fields()
        for contradiction in contradictions(self):
            raise ConfigError(contradiction)

    def check_resolved(self) -> None:
        """Raise ConfigError if the settings are inconsistent, or if a size is not set yet."""
        self.check()
        self.check_foldable()

    def check_foldable(self) -> None:
        """Raise ConfigError if a size is out of range or not set yet, or if the pool cannot hold one request.

        Settings in a log need to pass only this check, because an older build may have allowed combinations
        that this build refuses.
        """
        self._check_fields()
        if self.max_model_len < 2 or self.num_blocks < 2:
            raise ConfigError(
                f"max_model_len {self.max_model_len} and num_blocks {self.num_blocks} must both be at least "
                "2: a prompt token and an answer token; a block and the dummy block"
            )
        if not self.encoder_cache_size:
            raise ConfigError("encoder_cache_size is not set; set it to a number of embeddings")
        room = self.longest_row(self.num_blocks)
        if self.max_model_len > room:
            raise ConfigError(
                f"num_blocks {self.num_blocks} of {self.block_size} tokens hold {room} tokens (one block is "
                f"the dummy), less than max_model_len {self.max_model_len}; raise num_blocks or lower "
                "max_model_len"
            )

    def _check_fields(self) -> None:
        try:
            self.from_dict(self.as_dict())
        except TypeError as error:
            raise ConfigError(f"invalid settings: {error}") from None
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, not {self.block_size}")
        for name in ("reasoning_start", "reasoning_end"):
            value = getattr(self, name)
            if len(value) > MAX_MARKER_CHARS or not _is_unicode(value):
                raise ConfigError(
                    f"{name} must have at most {MAX_MARKER_CHARS} Unicode characters, not {shown(value)}"
                )
        for token in self.eos_token_ids:
            if not 0 <= token < 2**31:
                raise ConfigError(f"eos_token_ids must lie in 0 to 2^31 - 1, not {shown(token)}")

    def without_store(self) -> "EngineConfig":
        """Return the settings without a block store, for simulations."""
        return msgspec.structs.replace(self, block_store="") if self.block_store else self

    @property
    def num_rows(self) -> int:
        """Return how many rows (slots for running requests) the state has.

        With `compat` and overlapping steps, vLLM's rules start a request while the step in flight still uses
        the row of a finished request. Therefore, the state has two rows for each running request.
        """
        return 2 * self.max_num_seqs if self.compat and self.max_in_flight > 1 else self.max_num_seqs

    @property
    def most_leased(self) -> int:
        """Return the maximum number of KV blocks in the leases of all idle sessions together."""
        return self.session_blocks or (self.num_blocks - 1) // 2


def _is_unicode(text: str) -> bool:
    """Return whether `text` has no unpaired surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
