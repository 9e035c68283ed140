"""An engine's settings: one frozen struct, validated once and written into the event STARTED."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from mmengine.decode_errors import out_of_range
from mmengine.errors import ConfigError, shown

# Settings that no decision depends on; a process that continues a log may change them.
OPERATIONAL = (
    *("log_sync", "log_retain_bytes", "log_retain_s", "snapshot_bytes", "media_store_bytes"),
    *("step_timeout_s", "num_threads", "media_workers", "media_cache_bytes", "media_ahead_bytes"),
    *("media_decoding", "media_process_bytes", "prepare_timeout_s"),
    *("grammar_timeout_s", "spec", "reasoning_start", "reasoning_end", "cuda_graphs"),
    *("tensor_parallel", "batch_invariant"),
    *("block_store_path", "block_store_bytes", "fetch_timeout_s"),
    "session_media_bytes",
)
MAX_MARKER_CHARS = 64
ENCODER_CACHE = 32_768  # embeddings to keep if nothing is measured
MAX_DRAFT_TOKENS = 64  # of one row


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine's settings. Sizes are in tokens unless the name says otherwise; encoder sizes are in
    embeddings.

    A field whose default 0 means "auto" is set when the model is known.
    """

    # older versions of `transformers.pipeline` read this attribute of any model's config
    _commit_hash: ClassVar[None] = None

    max_num_seqs: Annotated[int, Meta(ge=1, le=65536)] = 64  # rows: requests that run at once
    token_budget: Annotated[int, Meta(ge=1, le=2**20)] = 1024  # tokens of one step
    # Prompt and output of one request; auto: the model's maximum, limited by the pool.
    max_model_len: Annotated[int, Meta(ge=0, le=2**24)] = 0
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    num_blocks: Annotated[int, Meta(ge=0, le=2**22)] = 0  # KV blocks of the pool; auto: from free memory
    enable_prefix_caching: bool = True
    # Maximum number of tokens of one request in one step; 0 for no limit.
    long_prefill_token_threshold: Annotated[int, Meta(ge=0, le=2**20)] = 0
    split_media: bool = True  # False: a chunk ends before an item instead of inside it, if possible
    encoder_budget: Annotated[int, Meta(ge=1, le=2**24)] = 16384  # embeddings computed in one step
    # Embeddings kept; auto: a share of a GPU's memory, otherwise ENCODER_CACHE.
    encoder_cache_size: Annotated[int, Meta(ge=0, le=2**26)] = 0
    # Embeddings of one image or video; 0: as many as both encoder sizes allow.
    max_item_embeds: Annotated[int, Meta(ge=0, le=2**24)] = 0
    policy: str = "fcfs"
    # blocks that must be free before a request starts
    admission_reserve: Literal["none", "prompt", "output"] = "prompt"
    spec: str = "auto"  # the drafter (docs/explanation/speculation.md)
    # Maximum number of drafts of one row; 0: as many as `spec` suggests.
    num_draft_tokens: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] = 0
    # number of drafts; auto: goodput, in simulations all
    draft_policy: Literal["auto", "all", "goodput"] = "auto"
    drafts_for: Literal["all", "forms"] = "all"  # rows that get drafts: all, or those with a grammar
    # KV slots that a drafter needs after the known tokens.
    lookahead_tokens: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] = 0
    # Steps given to the executor before the first one's result is awaited; auto: 2 on a GPU, else 1.
    max_in_flight: Annotated[int, Meta(ge=0, le=2)] = 0
    kv_dtype: Literal["auto", "fp8"] = "auto"  # type of the stored K and V; auto: the model's
    # Storage of the decoder's matrices, for checkpoints that are not quantised: docs/how-to/quantisation.md.
    quantize: Literal["none", "int8", "fp8"] = "none"
    # Type of the activations that integer matrices are multiplied by; int8 is outside parity.
    activations: Literal["model", "int8"] = "model"
    cuda_graphs: bool = True  # replay decode steps and small images as CUDA graphs (docs/how-to/gpu.md)
    compat: Literal["", "vllm"] = ""  # make decisions as this engine does, for comparisons
    preempt_mode: Literal["auto", "recompute", "swap"] = "auto"  # auto: the cheaper mode
    swap_blocks: Annotated[int, Meta(ge=0, le=2**22)] = 0  # KV blocks of the host pool
    recompute_token_ns: Annotated[int, Meta(ge=0, le=2**40)] = 5_000  # cost of computing a token again
    # Cost of copying a block out and back in.
    swap_block_ns: Annotated[int, Meta(ge=0, le=2**40)] = 20_000
    # Consecutive preemptions of one request without a token that are reported.
    thrash_limit: Annotated[int, Meta(ge=1, le=2**20)] = 16
    max_waiting: Annotated[int, Meta(ge=1, le=2**20)] = 4096  # requests without a row; one more is refused
    max_media_per_request: Annotated[int, Meta(ge=0, le=4096)] = 64
    # Failed steps that a request survives before it ends with "error".
    max_retries: Annotated[int, Meta(ge=0, le=100)] = 1
    checkpoint_interval: Annotated[int, Meta(ge=1, le=2**20)] = 256  # steps between state digests in the log
    eos_token_ids: tuple[int, ...] = ()
    log_sync: Literal["background", "always", "never"] = "background"
    # Newest bytes and seconds of the log to keep (docs/reference/log-format.md); 0: all of it.
    log_retain_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    log_retain_s: Annotated[int, Meta(ge=0, le=2**40)] = 0  # likewise
    # Bytes of log between two snapshots of the state beside it; 0 for none.
    snapshot_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 64 * 2**20
    # Seconds without progress after which a step counts as hung and the process ends; 0 for never.
    step_timeout_s: Annotated[int, Meta(ge=0, le=10**6)] = 0
    # Bytes of images and videos kept beside the log; 0 for none.
    media_store_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 16 * 2**30
    # Threads that prepare images and videos; 0: half of the cores, one to four.
    media_workers: Annotated[int, Meta(ge=0, le=256)] = 0
    # Where encoded media are decoded: in processes with limits, which cannot crash the engine, or on its
    # threads; auto: processes for AsyncEngine, threads for Engine.
    media_decoding: Literal["auto", "processes", "threads"] = "auto"
    # Memory limit of a process that decodes one image or video.
    media_process_bytes: Annotated[int, Meta(ge=2**24, le=2**40)] = 2 * 2**30
    # Seconds from submission within which AsyncEngine must have prepared a prompt, and within which a process
    # must have decoded one image or video; 0 for no limit.
    prepare_timeout_s: Annotated[int, Meta(ge=0, le=10**6)] = 60
    # Bytes of prepared images and videos kept by content; 0 for none.
    media_cache_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 256 * 2**20
    # Bytes of pixels in flight; beyond this no further prompt is prepared.
    media_ahead_bytes: Annotated[int, Meta(ge=1, le=2**50)] = 2**30
    grammar_backend: str = "llguidance"  # the grammar engine (docs/how-to/structured_output.md)
    # Seconds after which the compilation of a grammar is aborted.
    grammar_timeout_s: Annotated[int, Meta(ge=1, le=10**6)] = 10
    # Markers that enclose a model's reasoning; a form begins after the end marker. "" for no reasoning. See
    # docs/how-to/structured_output.md.
    reasoning_start: str = "<think>"
    reasoning_end: str = "</think>"
    batch_invariant: bool = False  # the same bits whatever else runs (docs/how-to/gpu.md)
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1  # devices of the model (docs/how-to/gpu.md)
    # Threads that compute on a CPU; 0: chosen by machine and model (docs/explanation/cpu.md).
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    # The store that keeps KV blocks beyond this process (docs/how-to/block_store.md); "" for none.
    block_store: str = ""
    block_store_path: str = ""  # its place; for a folder, the path
    # Bytes that the store may keep there; the least recently used go first.
    block_store_bytes: Annotated[int, Meta(ge=2**20, le=2**50)] = 16 * 2**30
    # Seconds that a request waits for blocks from the store before they are computed.
    fetch_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 2.0
    # Encoder work of one step (encoder_cache/work.py). Items within it are encoded whole; a larger item is
    # encoded in pieces of that size over several steps. 0: auto, the machine's work of one second. There is
    # no limit in a log, or if the encoder cannot stop in between.
    encoder_piece: Annotated[int, Meta(ge=0, le=2**62)] = 0
    # Patches of a frame at which its attention takes as long as the rest of the encoder; 0: measured.
    encoder_even_patches: Annotated[int, Meta(ge=0, le=2**31)] = 0
    # Time of a unit of encoder work; 0: measured.
    encoder_work_ns: Annotated[int, Meta(ge=0, le=2**40)] = 0
    # Slots for the recurrent states of rows and of prefix hits (docs/explanation/models.md). 0: auto, from
    # free memory; in a log 0 means that the model has no such states.
    num_state_slots: Annotated[int, Meta(ge=0, le=2**20)] = 0
    # Tokens between two kept states of one request. 0: only at the prompt's end, and where the prompt leaves
    # a prefix of earlier requests.
    snapshot_every: Annotated[int, Meta(ge=0, le=2**24)] = 256
    # LoRA adapters that may be in one step (docs/how-to/lora.md); 0: adapters are refused.
    max_loras: Annotated[int, Meta(ge=0, le=1024)] = 0
    # Bytes of adapters' matrices that are kept in memory, including those of unused adapters.
    lora_bytes: Annotated[int, Meta(ge=1, le=2**50)] = 2 * 2**30

    # Sessions that are open at once (docs/how-to/sessions.md); one more is refused.
    max_sessions: Annotated[int, Meta(ge=0, le=2**16)] = 64
    # KV blocks that idle sessions may keep; 0: auto, half of the pool.
    session_blocks: Annotated[int, Meta(ge=0, le=2**22)] = 0
    # Images and frames in a session; max_media_per_request limits other requests.
    max_media_per_session: Annotated[int, Meta(ge=0, le=2**16)] = 2048
    # Bytes of images and frames that sessions without a log keep in memory, to compute again from. Over HTTP
    # the same limit applies to frames that wait for others.
    session_media_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 512 * 2**20

    def as_dict(self) -> dict:
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, settings: dict) -> "EngineConfig":
        """Convert a dict.

        Raises ConfigError for an unknown name, or a value with a wrong type or outside its range.
        """
        try:
            return msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            found = out_of_range(error, settings, cls)
            if found is None:
                raise ConfigError(f"the settings cannot be read: {error}") from None
            name, low, high, value = found
            raise ConfigError(f"{name} must lie in {low} to {high}, not {shown(value)}") from None

    def check(self) -> None:
        """Raise ConfigError for the first value with a wrong type or outside its range, or for two
        contradictory values.
        """
        self._check_fields()
        for contradiction in (*_contradictions(self), *(_no_vllm(self) if self.compat else _unsplit(self))):
            raise ConfigError(contradiction)

    def check_resolved(self) -> None:
        """Run `check` and `check_foldable`."""
        self.check()
        self.check_foldable()

    def check_foldable(self) -> None:
        """Raise ConfigError if a size is outside its range or not set, or the pool cannot hold one request.

        A log needs no further checks: settings that contradict each other today were valid when the log was
        written.
        """
        self._check_fields()
        if self.max_model_len < 2 or self.num_blocks < 2:
            raise ConfigError(
                f"max_model_len {self.max_model_len} and num_blocks {self.num_blocks} must both be at least "
                "2: one prompt token and one more, one block and the dummy"
            )
        if not self.encoder_cache_size:
            raise ConfigError("encoder_cache_size is still open; set it to the embeddings that are kept")
        room = (self.num_blocks - 1) * self.block_size
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
            raise ConfigError(f"the settings cannot be read: {error}") from None
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, not {self.block_size}")
        for name in ("reasoning_start", "reasoning_end"):
            value = getattr(self, name)
            if len(value) > MAX_MARKER_CHARS or not _is_unicode(value):
                raise ConfigError(
                    f"{name} must have at most {MAX_MARKER_CHARS} characters of Unicode, not {shown(value)}"
                )
        for token in self.eos_token_ids:
            if not 0 <= token < 2**31:
                raise ConfigError(f"eos_token_ids must lie in 0 to 2^31 - 1, not {shown(token)}")

    def without_store(self) -> "EngineConfig":
        """Return settings without a store, for replays and simulations, which compute the blocks that a store
        would send.
        """
        return msgspec.structs.replace(self, block_store="") if self.block_store else self

    @property
    def most_leased(self) -> int:
        """Maximum KV block count for all sessions together."""
        return self.session_blocks or (self.num_blocks - 1) // 2

    @property
    def largest_item(self) -> int:
        """Embedding count for the largest image or video that is accepted."""
        # limits that are known
        limits = (self.encoder_cache_size, self.max_item_embeds, self.max_model_len - 1)
        return min([self.encoder_budget, *(each for each in limits if each > 0)])


def _is_unicode(text: str) -> bool:
    """Return whether the text has no unpaired surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _contradictions(config: EngineConfig) -> Iterator[str]:
    """Yield contradictions between settings that are each in range, as sentences that name both."""
    budget, drafts = config.token_budget, config.num_draft_tokens
    if budget < config.max_num_seqs:
        yield (
            f"token_budget {budget} is smaller than max_num_seqs {config.max_num_seqs}: rows would wait for "
            "ever; raise token_budget or lower max_num_seqs"
        )
    if config.draft_policy == "goodput" and config.compat:
        yield (
            f"draft_policy goodput cannot go with compat {config.compat}, which verifies all drafts; set "
            "draft_policy auto, or no compat"
        )
    if config.lookahead_tokens and not drafts:
        yield (
            f"lookahead_tokens {config.lookahead_tokens} keeps KV slots for a drafter, but num_draft_tokens "
            "is 0; set num_draft_tokens, or no lookahead_tokens"
        )
    if config.max_in_flight > 1 and config.compat:
        yield (
            f"max_in_flight {config.max_in_flight} cannot go with compat {config.compat}: vLLM's decisions "
            "are compared step by step; set max_in_flight 1, or no compat"
        )
    if config.batch_invariant and config.tensor_parallel > 1:
        yield (
            f"batch_invariant cannot go with tensor_parallel {config.tensor_parallel}: ranks compute with "
            "torch's products, whose bits depend on the number of rows; choose one of them"
        )
    if config.block_store and not config.block_store_path:
        yield f"block_store {config.block_store} needs a place: set block_store_path"
    if config.block_store and config.num_state_slots:
        yield (
            "block_store keeps KV blocks, and behind them this model needs recurrent states, which are in no "
            "store; set no block_store"
        )
    if config.block_store and config.compat:
        yield f"block_store cannot go with compat {config.compat}, which has none; choose one of them"
    if config.block_store and config.tensor_parallel > 1:
        yield (
            f"block_store keeps whole blocks, and tensor_parallel {config.tensor_parallel} cuts them over "
            "ranks; choose one of them"
        )
    if config.block_store and not config.enable_prefix_caching:
        yield "block_store fetches prefixes, and enable_prefix_caching is off; set it, or no block_store"
    if config.preempt_mode == "swap" and not config.swap_blocks:
        yield "preempt_mode swap needs a host pool: set swap_blocks, or another preempt_mode"
    if config.preempt_mode == "recompute" and config.swap_blocks:
        yield (
            f"swap_blocks {config.swap_blocks} would never be used with preempt_mode recompute; set "
            "swap_blocks 0, or preempt_mode auto or swap"
        )
    if config.num_state_slots and config.compat:
        yield f"compat {config.compat} knows no recurrent states (num_state_slots {config.num_state_slots})"
    if config.num_state_slots and config.swap_blocks:
        yield (
            f"swap_blocks {config.swap_blocks} would never be used: who gives way and has a recurrent state "
            "is computed again, from the last state that was kept; set swap_blocks 0"
        )
    if config.max_loras and config.tensor_parallel > 1:
        yield (
            f"max_loras {config.max_loras} takes adapters, which are not cut over ranks, and tensor_parallel "
            f"is {config.tensor_parallel}; choose one of them"
        )
    for name in ("encoder_budget", "encoder_cache_size"):
        if config.max_item_embeds > getattr(config, name) > 0:
            yield (
                f"max_item_embeds {config.max_item_embeds} is larger than {name} {getattr(config, name)}: "
                f"such an item could never be encoded; raise {name} or lower max_item_embeds"
            )


def _unsplit(config: EngineConfig) -> Iterator[str]:
    """Yield settings that vLLM accepts and this engine does not."""
    if config.token_budget < config.block_size:
        yield (
            f"token_budget {config.token_budget} is smaller than block_size {config.block_size}, one block; "
            "raise token_budget or lower block_size"
        )
    if config.token_budget <= config.num_draft_tokens:
        yield (
            f"num_draft_tokens {config.num_draft_tokens} and the token before them never fit token_budget "
            f"{config.token_budget}; lower num_draft_tokens or raise token_budget"
        )
    if config.split_media:
        return
    for name in ("token_budget", "long_prefill_token_threshold"):
        if 0 < getattr(config, name) < config.largest_item:
            yield (
                f"{name} {getattr(config, name)} is smaller than an item of {config.largest_item} embeddings "
                f"that split_media=false computes at once; raise {name}, set a smaller max_item_embeds, "
                "or split media"
            )


def _no_vllm(config: EngineConfig) -> Iterator[str]:
    """Yield features that vLLM does not have, so that decisions could not be compared."""
    if config.policy not in ("fcfs", "priority"):
        yield (
            f"compat vllm knows the policies fcfs and priority, not {config.policy}; choose one of them, or "
            "no compat"
        )
    if config.encoder_piece:
        yield (
            f"compat vllm encodes each item in one step, but encoder_piece is {config.encoder_piece}; choose "
            "one of them"
        )
    if config.swap_blocks:
        yield f"compat vllm has no host pool, but swap_blocks is {config.swap_blocks}; choose one of them"
    if config.admission_reserve == "output":
        yield "compat vllm has no admission_reserve output; use none or prompt, or no compat"
