"""Settings of an engine. One frozen struct, checked once, written into STARTED."""

from typing import Literal

import msgspec

from mmengine.errors import ConfigError


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes are in tokens unless the name says otherwise; encoder sizes are in embeddings.

    A field that is 0 and says "auto" is filled in when the model is known.
    """

    max_num_seqs: int = 64  # rows: requests that run at once
    token_budget: int = 1024  # tokens of one step
    max_model_len: int = 0  # prompt and output of one request; auto: the model's, capped by the pool
    block_size: int = 16
    num_blocks: int = 0  # KV blocks of the pool; auto: from free memory
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0  # most tokens of one request in one step; 0: no limit
    split_media: bool = True  # False: a chunk ends before an item rather than inside it, where it can
    encoder_budget: int = 16384  # embeddings computed in one step
    encoder_cache_size: int = 32768  # embeddings kept
    policy: str = "fcfs"
    admission_reserve: Literal["none", "prompt", "output"] = "prompt"  # blocks free before one starts
    num_draft_tokens: int = 0  # most drafts of one row
    lookahead_tokens: int = 0  # KV slots a drafter needs behind the known tokens
    max_in_flight: int = 1  # steps given to the executor before the first one's result is awaited
    compat: Literal["", "vllm"] = ""  # decisions as that engine makes them, for comparisons
    preempt_mode: Literal["auto", "recompute", "swap"] = "auto"  # auto: what costs less
    swap_blocks: int = 0  # KV blocks of the host pool
    recompute_token_ns: int = 5_000  # what it costs to compute a token again
    swap_block_ns: int = 20_000  # what it costs to copy a block out and back in
    thrash_limit: int = 16  # preemptions of one request without a token in between that are reported
    max_waiting: int = 4096  # requests without a row; one more is refused
    max_media_per_request: int = 64
    max_retries: int = 1  # times a request survives a failed step before it ends with "error"
    checkpoint_interval: int = 256  # steps between state digests in the log
    eos_token_ids: tuple[int, ...] = ()
    log_sync: Literal["background", "always", "never"] = "background"

    def as_dict(self) -> dict:
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, settings: dict) -> "EngineConfig":
        """Raises ConfigError for a name that is no setting, or a value of another type."""
        try:
            return msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the settings cannot be read: {error}") from None

    def check(self) -> None:
        """Raise ConfigError for the first value out of range, or two that contradict each other."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must lie in {low} to {high}, not {value}")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, not {self.block_size}")
        if self.token_budget < self.max_num_seqs:
            raise ConfigError(
                f"token_budget {self.token_budget} is smaller than max_num_seqs {self.max_num_seqs}: "
                "rows would wait for ever; raise token_budget or lower max_num_seqs"
            )
        if self.compat == "vllm" and self.policy not in ("fcfs", "priority"):
            raise ConfigError(
                f"compat vllm knows the policies fcfs and priority, not {self.policy}; choose one of them, "
                "or no compat"
            )
        if self.preempt_mode == "swap" and not self.swap_blocks:
            raise ConfigError("preempt_mode swap needs a host pool: set swap_blocks, or another preempt_mode")

        if self.max_in_flight > 1 and (self.num_draft_tokens or self.compat):
            raise ConfigError(
                f"max_in_flight {self.max_in_flight} cannot go with num_draft_tokens or compat: how many "
                "drafts a step accepts is known when it has run, and vLLM's decisions are compared step by "
                "step; set max_in_flight 1"
            )

    def check_resolved(self) -> None:
        """`check`, and raise ConfigError where a size is still open or the pool cannot hold one request."""
        self.check()
        if self.max_model_len < 2 or self.num_blocks < 2:
            raise ConfigError(
                f"max_model_len {self.max_model_len} and num_blocks {self.num_blocks} must both be at least "
                "2: one prompt token and one more, one block and the dummy"
            )
        room = (self.num_blocks - 1) * self.block_size
        if self.max_model_len > room:
            raise ConfigError(
                f"num_blocks {self.num_blocks} of {self.block_size} tokens hold {room} tokens (one block is "
                f"the dummy), less than max_model_len {self.max_model_len}; raise num_blocks or lower "
                "max_model_len"
            )


_RANGES = (
    ("max_num_seqs", 1, 65536),
    ("token_budget", 1, 2**20),
    ("max_model_len", 0, 2**24),
    ("block_size", 1, 1024),
    ("num_blocks", 0, 2**22),
    ("long_prefill_token_threshold", 0, 2**20),
    ("num_draft_tokens", 0, 64),
    ("lookahead_tokens", 0, 64),
    ("max_in_flight", 1, 2),
    ("encoder_budget", 1, 2**24),
    ("encoder_cache_size", 1, 2**26),
    ("swap_blocks", 0, 2**22),
    ("recompute_token_ns", 0, 2**40),
    ("swap_block_ns", 0, 2**40),
    ("thrash_limit", 1, 2**20),
    ("max_waiting", 1, 2**20),
    ("max_media_per_request", 0, 4096),
    ("max_retries", 0, 100),
    ("checkpoint_interval", 1, 2**20),
)
