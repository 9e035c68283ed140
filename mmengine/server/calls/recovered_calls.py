"""Calls that the process before had accepted, and did not answer."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from mmengine.request import SamplingParams
from mmengine.serve.requests.recovered_requests import UnclaimedRequest
from mmengine.server.calls.call_identity import Caller, Key, keys_of
from mmengine.server.chat.parsed_request import Asked, Envelope
from mmengine.server.chat.submission import in_log, log_id


class Orphan(NamedTuple):
    """A call of the process before. `left`: those of its prompts that the log has, by their places. Nobody
    was told that a call was accepted which lacks one; still, what is there has its ids."""

    envelope: Envelope
    request_id: str
    left: dict[int, UnclaimedRequest]

    def keys(self) -> list[Key]:
        return keys_of(self.envelope, self.request_id)

    def is_of(self, envelope: Envelope, keys: list[Key], caller: Caller) -> bool:
        """Whether a call with this envelope, of this caller, may have it."""
        mine = self.envelope
        if mine.owner != envelope.owner:
            return False
        if not set(keys).isdisjoint(self.keys()):
            return True
        # No client tries a stream again by itself: whoever asks for it again says the same.
        may_claim = caller.tries_again or mine.is_stream
        return may_claim and not mine.key and mine.digest == envelope.digest


def orphans_of(left: Iterable[UnclaimedRequest]) -> list[Orphan]:
    """Calls of which something is left."""
    found: dict[str, Orphan] = {}
    for one in left:
        try:
            envelope = msgspec.json.decode(one.envelope, type=Envelope)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        prefix = in_log(envelope.owner, "")
        name = one.request_id.removeprefix(prefix)
        if envelope.num_prompts > 1:
            name = name.removesuffix(f"-{envelope.place}")
        if log_id(envelope, name, envelope.place) == one.request_id:
            orphan = found.setdefault(f"{prefix}{name}", Orphan(envelope, name, {}))
            orphan.left[envelope.place] = one
    return list(found.values())


def asked_before(request_id: str, envelope: Envelope, sampling: SamplingParams) -> Asked:
    """A call of which the log, or the store, has what it was asked."""
    return Asked(
        [],
        sampling,
        request_id,
        envelope,
        envelope.is_stream,
        envelope.usage_frames,
        logprobs=sampling.logprobs is not None,
        show_reasoning=envelope.show_reasoning,
    )
