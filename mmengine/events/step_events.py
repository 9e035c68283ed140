"""Events about steps, a part of vocabulary.py: a step's decisions and its results."""

from mmengine.events.event_base import EventBase

FOR_ALL = -1  # in place of a row: any row may use the freed blocks
AS_CACHED = -1  # in place of a number of tokens: as many as the cached blocks hold
NO_STATE = -1  # in place of a state slot


class Preempted(EventBase, frozen=True):
    """Decision: the request loses its row and blocks, and waits again. Its KV is dropped ("recompute") or
    copied to `host_blocks` ("swap").

    `for_row`: the row that gets the blocks, for a chunk of `for_tokens`, or FOR_ALL.
    """

    request_id: str
    row: int
    mode: str
    reason: str
    host_blocks: bytes = b""
    for_row: int = FOR_ALL
    for_tokens: int = 0


class Scheduled(EventBase, frozen=True):
    """Decision that opens a step: the running rows that compute tokens, and how many.

    `rows`: None for the rows in the step before. `num_tokens`: None for one each. `new_blocks` are dealt to
    the rows in order, as many as each row's tokens need. `num_drafts`: how many drafts are at the end of each
    row's tokens; None: no row has drafts. `drafters`: their drafters' numbers; None: drafter 0.
    `num_decided`: running rows before this place are decided for this step; 0: all are.
    """

    rows: bytes | None
    num_tokens: bytes | None
    new_blocks: bytes = b""
    encode: tuple[tuple[bytes, int, int], ...] = ()  # (key, row, media index)
    evict: tuple[bytes, ...] = ()
    num_drafts: bytes | None = None
    drafters: bytes | None = None
    num_decided: int = 0


class Admitted(EventBase, frozen=True):
    """Decision: a waiting request gets a row and joins the step, or opens one.

    `cached_blocks`: prefix hits; their tokens count as computed. `new_blocks`: the other blocks.
    `num_computed`: tokens with KV when the step starts, or AS_CACHED. `copy`: (source, destination) for a
    block shared in part. `swap_in`: the request's host blocks are copied to the first new blocks. Tokens
    after the known ones are placeholders for drafts.
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
    """Decision: ADMITTED in an engine with recurrent states. `state_slot`: the row's slot. `state_from`: the
    slot to copy from, with the state after the cached blocks; NO_STATE: the row begins with zeros.
    `num_shared`: how many of its first tokens other requests' blocks hold, with or without a kept state.
    """

    state_slot: int = 0
    state_from: int = NO_STATE
    num_shared: int = 0


class AdmittedWithAdapter(AdmittedWithState, frozen=True):
    """Decision: ADMITTED for a request with a LoRA adapter. `adapters_out`: digests of adapters that leave
    for it. Without recurrent states the fields from `state_slot` on have no meaning.
    """

    adapters_out: tuple[bytes, ...] = ()


class StatesKept(EventBase, frozen=True):
    """Decision, after all rows of the open step: the states of `rows` after their first `num_tokens`, which
    this step computes, are kept in `slots` for prefix hits, replacing the slots' old states. int32 columns.
    """

    rows: bytes
    num_tokens: bytes
    slots: bytes


class Evicted(EventBase, frozen=True):
    """Decision under vLLM's rules: encoder outputs leave the cache for a chunk that does not run in this step
    after all. `used`: unreferenced outputs that count as just used.
    """

    keys: tuple[bytes, ...]
    used: tuple[bytes, ...] = ()


class Encoded(EventBase, frozen=True):
    """Decision, a step's last one (it opens a step if none is open): the step computes a part of item
    `index`, which is too large for one step.

    `until`: how much of the item's work is done then (encoder_cache/work.py). After the last part the
    features exist, and `evict` has left the cache for them. An item with earlier parts continues; a different
    item replaces it.
    """

    request_id: str
    index: int
    until: int
    evict: tuple[bytes, ...] = ()


class Dispatched(EventBase, frozen=True):
    """Decision: the open step is complete, and the next step may open before this one ran. Only with
    max_in_flight above 1; otherwise EXECUTED closes the open step.
    """


class Executed(EventBase, frozen=True):
    """Observation: the oldest step in flight ran, or the open step if none is in flight. Indices count the
    rows that sampled, in step order.

    `stops`: (index, kind) where the text ended. `errors`: (index, text) where one row failed. `logprobs`:
    (index, [(token id, logprob), …]).

    `counts`: each row's tokens (accepted drafts and one more); None: one each. `token_ids` holds them row
    after row. `drafts` are for the next step, with `num_drafts` for each row and the `drafters` that made
    them; None: no drafts, drafter 0. `draft_ns`: the part of `device_ns` for making drafts. `host_ns`: this
    process's time between the step before and this one; 0: unknown. `prompt_logprobs`: (index, 1 + k, token
    ids, float32 logprobs) for a prompt with n tokens, both [n, 1 + k]: the prompt token first, then the k
    likeliest; the first token has its id alone.
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
