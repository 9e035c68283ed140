"""Events about steps: a step's decisions and its result. vocabulary.py lists all events."""

from mmengine.events.event_base import EventBase

FOR_ALL = -1  # value of `for_row`: any row may use the freed blocks
AS_CACHED = -1  # value of `num_computed`: as many tokens as the cached blocks contain
NO_STATE = -1  # value of `state_from`: there is no kept state


class Preempted(EventBase, frozen=True):
    """Decision: the request loses its row and blocks, and waits again.

    `mode`: "recompute" drops the request's KV, "swap" copies the KV to `host_blocks` (int32). `reason`: why
    the request was preempted, such as "no free blocks". `for_row`: under vLLM's rules, the row that gets the
    freed blocks for a chunk with `for_tokens` tokens. FOR_ALL (-1): any row may use the blocks.
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

    `rows`: int32; None: the same rows as in the previous step. `num_tokens`: int32, each row's token count;
    None: one token each. `new_blocks`: int32, blocks that the rows get in order. `block_counts`: int32, how
    many new blocks each row gets; None: as many as the row's tokens need. `encode`: (key, row, index in the
    request's media) for each item that the encoder computes. `evict`: keys for encoder outputs that leave the
    cache to make room. `num_drafts`: how many tokens at each row's end are drafts; None: no row has drafts.
    `drafters`: each row's drafter number; None: drafter 0. `num_decided`: under vLLM's rules, how many
    leading running rows the scheduler has decided; 0: all rows.
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
    """Decision: a waiting request gets a row and joins the open step. If no step is open, this decision opens
    one.

    `num_tokens`: how many tokens the step computes. Tokens beyond the request's known tokens are placeholders
    for drafts. `cached_blocks`: int32, prefix hits. `new_blocks`: int32, the request's other blocks.
    `encode`, `evict`: as in SCHEDULED. `num_computed`: how many tokens have KV when the step starts;
    AS_CACHED (-1): the tokens in the prefix hits. `copy`: (source block, destination block) for the KV of a
    block that is only partly shared. `swap_in`: whether the request's host blocks are copied to the first new
    blocks.
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
    which is copied to `state_slot`; NO_STATE (-1): the row begins with zeros. `num_shared`: the number of
    tokens in the request's longest prefix with cached blocks, with or without a kept state.
    """

    state_slot: int = 0
    state_from: int = NO_STATE
    num_shared: int = 0


class AdmittedWithAdapter(AdmittedWithState, frozen=True):
    """Decision: ADMITTED for a request with a LoRA adapter. `adapters_out`: digests of the adapters that are
    unloaded for this adapter. Without recurrent states, the fields from `state_slot` to `num_shared` are
    unused.
    """

    adapters_out: tuple[bytes, ...] = ()


class StatesKept(EventBase, frozen=True):
    """Decision: the step keeps recurrent states for prefix hits. The decision follows the decisions on the
    step's rows.

    For each row in `rows`, the state after the row's first `num_tokens` tokens is copied to a slot in `slots`
    and replaces the slot's old state. The three fields are int32 and have equal lengths.
    """

    rows: bytes
    num_tokens: bytes
    slots: bytes


class Evicted(EventBase, frozen=True):
    """Decision under vLLM's rules: the encoder outputs `keys` leave the cache. The scheduler evicted these
    outputs for a chunk, and then could not schedule the chunk in this step. `used`: unreferenced outputs that
    become the most recently used outputs in the cache's LRU order.
    """

    keys: tuple[bytes, ...]
    used: tuple[bytes, ...] = ()


class Encoded(EventBase, frozen=True):
    """Decision: the step encodes a part of item `index` in the request's media, because the item is too large
    for one step. This is the step's last decision. If no step is open, this decision opens one.

    `until`: how much encoder work for the item is done after this part, in the units of
    encoder_cache/work.py. The part starts where this item's previous part ended. Unfinished parts of another
    item are dropped. After the last part the item's output is in the cache. `evict`: keys for the outputs
    that leave the cache to make room.
    """

    request_id: str
    index: int
    until: int
    evict: tuple[bytes, ...] = ()


class Dispatched(EventBase, frozen=True):
    """Decision: the open step is completely decided, and the next step may be decided while this step runs.
    The event occurs only with max_in_flight above 1. Otherwise EXECUTED closes the open step.
    """


class Executed(EventBase, frozen=True):
    """Observation: the result of the oldest step in flight, or of the open step if no step is in flight. In
    the fields, an index is a position among the rows that sampled, in step order.

    `token_ids`: int32, the rows' sampled tokens, row by row. `counts`: each row's number of accepted drafts
    plus 1; None: one token each. `stops`: (index, kind) for each row whose text ended, for example with the
    kind "eos" or "string". `errors`: (index, text) for each row that failed while the other rows did not.
    `logprobs`: (index, [(token id, logprob), …]) for rows that want logprobs. Rows that want confidences have
    further pairs with negative ids. Id -1 has the token's logprob under the grammar, and id -2 the entropy.
    Each likely allowed token t has its logprob at id -3 - t.

    `drafts`: int32, drafts for the next step. `num_drafts`: how many drafts each row has; None: no drafts.
    `drafters`: the number of the drafter that made each row's drafts; None: drafter 0. `device_ns`: the
    step's time. `draft_ns`: the time for making drafts, which is included in `device_ns`. `host_ns`: this
    process's time between the previous step and this step; 0: unknown.

    `prompt_logprobs`: (index, 1 + k, token ids, float32 logprobs). Token ids and logprobs are [n, 1 + k] for
    n prompt tokens: each prompt token, then the k likeliest tokens at its position. The first prompt token
    has an id but no logprobs.

    `pooled`: (row, digest, vector) for each pooled request whose prompt ended in this step. `digest`: SHA-256
    of the vector's float32 bytes; b"": the vector is not finite, and the request fails. `vector`: the float32
    bytes if the setting log_vectors is on, else b"".
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
    """Observation: drafts for the next step arrived after the last step's EXECUTED, for example from vLLM's
    workers.

    `rows`: int32, the running rows that have drafts. `num_drafts`: int32, how many drafts each row has.
    `drafts`: int32, the rows' drafts, row by row. They replace the rows' earlier drafts.
    """

    rows: bytes
    num_drafts: bytes
    drafts: bytes
