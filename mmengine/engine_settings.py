"""The fields of the engine's settings: each has a type, a default, a range, and a text for `--help` and the
settings reference.
"""

from typing import Annotated, Literal

import msgspec

from mmengine.setting_fields import between, described

MAX_DRAFT_TOKENS = 64  # maximum number of draft tokens per request


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of EngineConfig.

    Sizes are in tokens unless the name says otherwise; encoder sizes are in embeddings. In some fields, 0
    stands for "from free memory" or "measured". The engine replaces this 0 when it knows the model.
    """

    max_num_seqs: Annotated[
        int, between(1, 65536, "Maximum number of running requests. Further requests wait.")
    ] = 64
    token_budget: Annotated[
        int,
        between(
            1,
            2**20,
            "Tokens per step. The scheduler cuts prompts into chunks and leaves the rest to later steps.",
        ),
    ] = 1024
    max_model_len: Annotated[
        int,
        between(
            0,
            2**24,
            "Tokens of prompt and answer together; 0: the model's limit, at most the KV pool. A "
            "longer prompt is refused; an answer that reaches the limit ends with `length`.",
        ),
    ] = 0
    block_size: Annotated[
        int, between(1, 1024, "Tokens per KV block. Only full blocks enter the prefix cache.")
    ] = 16
    num_blocks: Annotated[
        int,
        between(
            0,
            2**22,
            "KV blocks of the pool; 0: from free memory. Without free blocks new requests wait, "
            "and the policy preempts a running one.",
        ),
    ] = 0
    enable_prefix_caching: Annotated[
        bool, described("Whether prompts reuse the KV blocks of equal prefixes.")
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        between(
            0,
            2**20,
            "Tokens of one prompt per step; 0: no limit. The rest of the prompt is computed in later steps.",
        ),
    ] = 0
    split_media: Annotated[
        bool,
        described("False: a chunk of a prompt ends before an image or video, not inside it, if possible."),
    ] = True
    encoder_budget: Annotated[
        int, between(1, 2**24, "Embeddings that one step encodes. Further images wait for the next step.")
    ] = 16384
    encoder_cache_size: Annotated[
        int,
        between(
            0,
            2**26,
            "Embeddings in the encoder cache; 0: from free memory. Unused entries are evicted; if "
            "all are used, requests wait.",
        ),
    ] = 0
    max_item_embeds: Annotated[
        int,
        between(
            0,
            2**24,
            "Embeddings of one image or video; 0: the smaller of encoder_budget and "
            "encoder_cache_size. A larger item is refused.",
        ),
    ] = 0
    policy: Annotated[str, described("Scheduling policy: `fcfs`, `priority`, or a plugin's name.")] = "fcfs"
    admission_reserve: Annotated[
        Literal["none", "prompt", "output"],
        described(
            "Free blocks that a request needs before it starts: none, its prompt's, or its "
            "prompt's and answer's."
        ),
    ] = "prompt"
    spec: Annotated[
        str,
        described("Drafter: auto, none, grammar, ngram, suffix, eagle3[=FOLDER], mtp, or a plugin's name."),
    ] = "auto"
    num_draft_tokens: Annotated[
        int,
        between(
            0,
            MAX_DRAFT_TOKENS,
            "Draft tokens per request and step; 0: the drafter's default. Further drafts are not made.",
        ),
    ] = 0
    draft_policy: Annotated[
        Literal["auto", "all", "goodput"],
        described("Number of drafts: all, or as many as pay (goodput). auto: goodput; in simulations all."),
    ] = "auto"
    drafts_for: Annotated[
        Literal["all", "forms"], described("Requests that get drafts: all, or those with a grammar.")
    ] = "all"
    lookahead_tokens: Annotated[
        int,
        between(
            0,
            MAX_DRAFT_TOKENS,
            "KV slots after the known tokens, for a drafter with its own KV cache. Admission "
            "reserves blocks for them.",
        ),
    ] = 0
    max_in_flight: Annotated[
        int,
        between(
            0,
            2,
            "Steps that run concurrently; 0: 2 on a GPU, else 1. The scheduler waits for a result "
            "before the next step.",
        ),
    ] = 0
    kv_dtype: Annotated[
        Literal["auto", "fp8"], described("Data type of the KV cache; auto: the model's.")
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        described(
            "native: mmengine's own description of the architecture; transformers: transformers' modules; "
            "auto: native if that serves the model."
        ),
    ] = "auto"
    quantize: Annotated[
        Literal["none", "int8", "fp8"],
        described("Quantisation of the decoder's weights at load, for a checkpoint that is not quantised."),
    ] = "none"
    activations: Annotated[
        Literal["model", "int8"],
        described("int8: multiply int8 and int4 weights by activations rounded to int8; outside parity."),
    ] = "model"
    cuda_graphs: Annotated[bool, described("Whether decode steps and small images run as CUDA graphs.")] = (
        True
    )
    compat: Annotated[
        Literal["", "vllm", "vllm-0.32", "vllm-0.33"],
        described(
            "vllm: make the scheduling decisions of vLLM 0.33, for comparisons, but without its known "
            "hangs; vllm-0.32, vllm-0.33: those of this version exactly."
        ),
    ] = ""
    preempt_mode: Annotated[
        Literal["auto", "recompute", "swap"],
        described("Recompute or swap the KV of a preempted request; auto: the cheaper one."),
    ] = "auto"
    swap_blocks: Annotated[
        int,
        between(
            0,
            2**22,
            "KV blocks in host memory. Without a free host block, preempted requests are recomputed.",
        ),
    ] = 0
    recompute_token_ns: Annotated[
        int,
        between(
            0,
            2**40,
            "Estimated cost of recomputing one token. `preempt_mode` auto compares it with swap_block_ns.",
        ),
    ] = 5_000
    swap_block_ns: Annotated[
        int,
        between(
            0,
            2**40,
            "Estimated cost of copying one block out and back. `preempt_mode` auto compares it "
            "with recompute_token_ns.",
        ),
    ] = 20_000
    thrash_limit: Annotated[
        int,
        between(
            1,
            2**20,
            "Preemptions of one request without a new token. At the limit the engine reports "
            "thrashing and `readiness()` is false.",
        ),
    ] = 16
    max_waiting: Annotated[
        int, between(1, 2**20, "Waiting requests. Another request is refused; over HTTP with 429.")
    ] = 4096
    max_media_per_request: Annotated[
        int, between(0, 4096, "Images and videos per request. More are refused.")
    ] = 64
    max_retries: Annotated[
        int, between(0, 100, "Failed steps that a request survives. After that it ends with `error`.")
    ] = 1
    checkpoint_interval: Annotated[
        int, between(1, 2**20, "Steps between two state digests in the log. `verify` compares each digest.")
    ] = 256
    eos_token_ids: Annotated[
        tuple[int, ...], described("Token ids that end an answer; filled in from the checkpoint.")
    ] = ()
    log_sync: Annotated[
        Literal["background", "always", "never"],
        described("When the log is synced to disk: in the background, before each effect, or never."),
    ] = "background"
    log_vectors: Annotated[bool, described("Whether the log has pooled vectors, beside digests.")] = False
    log_retain_bytes: Annotated[
        int,
        between(
            0,
            2**50,
            "Bytes of log; 0: all. Older segments are deleted, except those with undelivered answers.",
        ),
    ] = 0
    log_retain_s: Annotated[
        int,
        between(
            0,
            2**40,
            "Seconds of log; 0: all. Older segments are deleted, except those with undelivered answers.",
        ),
    ] = 0
    snapshot_bytes: Annotated[
        int,
        between(0, 2**40, "Bytes of log between two snapshots; 0: none. A snapshot shortens the next start."),
    ] = 64 * 2**20
    step_timeout_s: Annotated[
        int,
        between(
            0,
            10**6,
            "Seconds without progress in a step; 0: no limit. The step counts as hung, and the "
            "process exits with code 75.",
        ),
    ] = 0
    media_store_bytes: Annotated[
        int,
        between(
            0,
            2**50,
            "Bytes of images and videos beside the log; 0: none are stored. A request that does "
            "not fit is refused.",
        ),
    ] = 16 * 2**30
    media_workers: Annotated[
        int,
        between(0, 256, "Threads that prepare media; 0: half of the cores, one to four. Further items wait."),
    ] = 0
    media_decoding: Annotated[
        Literal["auto", "processes", "threads"],
        described(
            "Decode media in processes or in threads; auto: processes in AsyncEngine, threads in Engine."
        ),
    ] = "auto"
    media_process_bytes: Annotated[
        int, between(2**24, 2**40, "Memory of one decoder process. An item that needs more is refused.")
    ] = 2 * 2**30
    prepare_timeout_s: Annotated[
        int,
        between(
            0,
            10**6,
            "Seconds for preparing a prompt, and for decoding one item; 0: no limit. After that "
            "the request is refused.",
        ),
    ] = 60
    media_cache_bytes: Annotated[
        int,
        between(0, 2**50, "Bytes of prepared media in memory; 0: none. The least recently used are dropped."),
    ] = 256 * 2**20
    media_ahead_bytes: Annotated[
        int,
        between(
            1, 2**50, "Bytes of prepared pixels that are not yet encoded. Preparation pauses at the limit."
        ),
    ] = 2**30
    grammar_backend: Annotated[str, described("Grammar engine: llguidance, or a plugin's name.")] = (
        "llguidance"
    )
    max_digits: Annotated[
        int,
        between(
            0,
            10_000,
            "Digits of each part of a JSON number that its schema leaves unlimited; 0: no limit.",
        ),
    ] = 40
    grammar_timeout_s: Annotated[
        int, between(1, 10**6, "Seconds for compiling one grammar. After that the request is refused.")
    ] = 10
    task: Annotated[Literal["auto", "chat", "embed", "rerank"], described("Task of the model.")] = "auto"
    reasoning_start: Annotated[
        str, described("Text that begins reasoning; empty: the model does not reason.")
    ] = "<think>"
    reasoning_end: Annotated[
        str, described("Text that ends reasoning; a structured answer begins after it.")
    ] = "</think>"
    batch_invariant: Annotated[bool, described("Whether results are equal bit for bit in every batch.")] = (
        False
    )
    tensor_parallel: Annotated[int, between(1, 64, "Devices of one model. Needs as many devices.")] = 1
    num_threads: Annotated[int, between(0, 1024, "CPU threads; 0: from the machine and the model.")] = 0
    block_store: Annotated[
        str, described("Store for KV blocks outside the process: `folder`, or a plugin's name; empty: none.")
    ] = ""
    block_store_path: Annotated[str, described("Location of the block store; for `folder` a path.")] = ""
    block_store_bytes: Annotated[
        int, between(2**20, 2**50, "Bytes in the block store. The least recently used blocks are deleted.")
    ] = 16 * 2**30
    fetch_timeout_s: Annotated[
        float,
        between(
            0, 3600, "Seconds that a request waits for blocks from the store. After that they are computed."
        ),
    ] = 2.0
    encoder_piece: Annotated[
        int,
        between(
            0,
            2**62,
            "Encoder work per step; 0: what this machine does in a second. A larger image is "
            "encoded in pieces over several steps.",
        ),
    ] = 0
    encoder_even_patches: Annotated[
        int,
        between(
            0,
            2**31,
            "Patches per frame at which attention costs as much as the rest of the encoder; 0: "
            "measured. Estimates encoder work.",
        ),
    ] = 0
    encoder_work_ns: Annotated[
        int, between(0, 2**40, "Nanoseconds per unit of encoder work; 0: measured. Estimates encoder time.")
    ] = 0
    num_state_slots: Annotated[
        int,
        between(
            0,
            2**20,
            "Slots for recurrent states; 0: from free memory. Cached states are evicted; without "
            "a free slot requests wait.",
        ),
    ] = 0
    snapshot_every: Annotated[
        int,
        between(
            0,
            2**24,
            "Tokens between two cached recurrent states of a request; 0: only at the prompt's end "
            "and where its prefix ends.",
        ),
    ] = 256
    max_loras: Annotated[
        int, between(0, 1024, "LoRA adapters per step; 0: none. Requests for further adapters wait.")
    ] = 0
    lora_bytes: Annotated[
        int,
        between(
            1,
            2**50,
            "Bytes of loaded adapters. Unused adapters are dropped; an adapter that does not fit is refused.",
        ),
    ] = 2 * 2**30
    max_sessions: Annotated[int, between(0, 2**16, "Open sessions. Another session is refused.")] = 64
    session_blocks: Annotated[
        int,
        between(
            0,
            2**22,
            "KV blocks that idle sessions keep; 0: half of the pool. The scheduler takes back the "
            "oldest leases.",
        ),
    ] = 0
    max_media_per_session: Annotated[
        int, between(0, 2**16, "Images and frames per session. More are refused.")
    ] = 2048
    session_media_bytes: Annotated[
        int, between(0, 2**50, "Bytes of media that sessions without a log keep in memory. More are refused.")
    ] = 512 * 2**20

    @property
    def largest_item(self) -> int:
        """Return the size, in embeddings, of the largest image or video that the engine accepts."""
        limits = (self.encoder_cache_size, self.max_item_embeds, self.max_model_len - 1)
        return min([self.encoder_budget, *(each for each in limits if each > 0)])
