"""The events in vocabulary.py about steps: a step's decisions and its result."""

from mmengine.events.event_base import EventBase

FOR_ALL = -1  # in `for_row`: any row may use the freed blocks
AS_CACHED = -1  # in `num_computed`: as many tokens as the cached blocks hold
NO_STATE = -1  # in `state_from`: no kept state


class Preempted(EventBase, frozen=True):
    """Decision: the request loses its row and blocks, and waits again.

    `mode`: "recompute" drops the request's KV, "swap" copies the KV to `host_blocks` (int32). `reason`: why
    the request was preempted, such as "no free blocks". `for_row`: the row that gets the freed blocks, for a
    chunk of `for_tokens` tokens, under vLLM's rules. FOR_ALL (-1): any row may use them.
    """

    request_id: str
    row: int
    mode: str
    reason: str
    host_blocks: bytes = b""
    for_row: int = FOR_ALL
    for_tokens: int = 0


class Scheduled(EventBase, frozen=True):
    """Decision that opens a step: which running rows compute tokens, and how many tokens each row computes.

    `rows`: int32; None: the same rows as in the step before. `num_tokens`: int32, each row's tokens;
    None: one token each. `new_blocks`: int32, given to the rows in order, as many as each row's tokens need.
    `encode`: (key, row, index in the request's media) for each item that the encoder computes. `evict`: keys
    of encoder outputs that leave the cache to make room. `num_drafts`: how many tokens at each
    row's end are drafts; None: no row has drafts. `drafters`: the number of each row's drafter; None:
    drafter 0. `num_decided`: this step's work is decided for the first `num_decided` running rows, under
    vLLM's rules; 0: for all rows.
    """

    rows: bytes | None
    num_tokens: bytes | None
    new_blocks: bytes = b""
    encode: tuple[tuple[bytes, int, int], ...] = ()
    evict: tuple[bytes, ...] = ()
    num_drafts: bytes | None = None
    drafters: bytes | None = None
    num_decided: int = 0
    block_counts: bytes | None = None


class Admitted(EventBase, frozen=True):
    """Decision: a waiting request gets a row and joins the open step. If no step is open, one opens.

    `num_tokens`: the tokens that the step computes. If they reach beyond the request's known tokens, the rest
    are placeholders for drafts. `cached_blocks`: int32, prefix hits, whose tokens count as computed.
    `new_blocks`: int32, the request's other blocks. `encode`, `evict`: as in SCHEDULED. `num_computed`: the
    tokens that have KV when the step starts; AS_CACHED (-1): the tokens of the prefix hits. `copy`: (source,
    destination) if a block is shared in part, so that its KV is copied. `swap_in`: the request's host blocks
    are copied to the first new blocks.
    """

    request_id: str
    row: int
    num_tokens: int
    cached_blocks: bytes
    new_blocks: bytes
    encode: tuple[tuple[bytes, int, int], ...] = ()
    evict: tuple[bytes, ...] = ()
    num_computed: int = AS_CACHED
    copy: tuple[int, int] | None = None
    swap_in: bool = False


class AdmittedWithState(Admitted, frozen=True):
    """Decision: ADMITTED in an engine with recurrent states.

    `state_slot`: the slot for the row's state. `state_from`: the slot with the state after the cached blocks,
    which is copied to `state_slot`; NO_STATE (-1): the row begins with zeros. `num_shared`: the length of the
    longest prefix, in tokens, that is in the prefix cache, whether or not a state was kept after it.
    """

    state_slot: int = 0
    state_from: int = NO_STATE
    num_shared: int = 0


class AdmittedWithAdapter(AdmittedWithState, frozen=True):
    """Decision: ADMITTED for a request with a LoRA adapter. `adapters_out`: digests of the adapters that are
    unloaded to make room for this adapter. The fields from `state_slot` to `num_shared` are only used in an
    engine with recurrent states.
    """

    adapters_out: tuple[bytes, ...] = ()


class StatesKept(EventBase, frozen=True):
    """Decision, logged after the open step's rows are decided: the step keeps recurrent states for prefix
    hits. For each of `rows`, the state after the row's first `num_tokens` tokens is copied to one of `slots`
    and replaces the slot's old state. The three columns are int32 and have equal lengths.
    """

    rows: bytes
    num_tokens: bytes
    slots: bytes


class Evicted(EventBase, frozen=True):
    """Decision under vLLM's rules: the encoder outputs `keys` leave the cache. They made room for a chunk
    that then could not be scheduled in this step. `used`: unreferenced outputs that move to the most recently
    used end of the cache's LRU order.
    """

    keys: tuple[bytes, ...]
    used: tuple[bytes, ...] = ()


class Encoded(EventBase, frozen=True):
    """Decision: the step encodes a part of item `index` in the request's media, because the item is too
    large for one step. This is the step's last decision; if no step is open, one opens.

    `until`: how much encoder work for the item is done after this part, in the units of
    encoder_cache/work.py. If earlier steps encoded parts of this item, the work continues after them. If
    they encoded parts of another item, those parts are dropped. After the last part the item's output is in
    the cache. `evict`: keys of the outputs that leave the cache to make room for that output.
    """

    request_id: str
    index: int
    until: int
    evict: tuple[bytes, ...] = ()


class Dispatched(EventBase, frozen=True):
    """Decision: the open step is decided, and the next step may open while this step runs. The
    event occurs only with max_in_flight above 1; otherwise EXECUTED closes the open step.
    """


class Executed(EventBase, frozen=True):
    """Observation: the oldest step in flight (or the open step if none is in flight) ran. An index counts the
    rows that sampled, in step order.

    `token_ids`: int32, the sampled tokens, one row after the other. `counts`: how many tokens each row got:
    its accepted drafts and one more; None: one token each. `stops`: (index, kind) for each row whose text
    ended, for example with the kind "eos" or "string". `errors`: (index, text) for each row that failed
    alone. `logprobs`: (index, [(token id, logprob), …]) for rows that want logprobs.

    `drafts`: int32, drafts for the next step. `num_drafts`: how many drafts each row has; None: no drafts.
    `drafters`: the number of the drafter that made each row's drafts; None: drafter 0. `device_ns`: the time
    of the step. `draft_ns`: the part of `device_ns` that making drafts took. `host_ns`: this process's time
    between the step before and this step; 0: unknown.

    `prompt_logprobs`: (index, 1 + k, token ids, float32 logprobs). Token ids and logprobs are [n, 1 + k] for
    n prompt tokens: each prompt token, then the k likeliest tokens at its position. The first prompt token
    has an id but no logprobs.

    `pooled`: (row, digest, vector) for each pooled request whose prompt ended in this step. `digest`: SHA-256
    of the vector's float32 bytes; b"": the vector is not finite, and the request fails. `vector`: float32
    with log_vectors, else b"".
    """

    token_ids: bytes
    stops: tuple[tuple[int, str], ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    logprobs: tuple[tuple[int, tuple[tuple[int, float], ...]], ...] = ()
    device_ns: int = 0
    counts: bytes | None = None
    drafts: bytes = b""
    num_drafts: bytes | None = None
    drafters: bytes | None = None
    draft_ns: int = 0
    host_ns: int = 0
    prompt_logprobs: tuple[tuple[int, int, bytes, bytes], ...] = ()
    pooled: tuple[tuple[int, bytes, bytes], ...] = ()


class Drafted(EventBase, frozen=True):
    """Observation: drafts for the next step arrived after the last step's EXECUTED, as from vLLM's workers.

    `rows`: int32, the running rows that have drafts. `num_drafts`: int32, how many drafts each row has.
    `drafts`: int32, the drafts, one row after the other. They replace the rows' earlier drafts.
    """

    rows: bytes
    num_drafts: bytes
    drafts: bytes
