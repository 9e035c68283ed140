"""Calls that the process before had accepted, and did not answer."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from mmengine.request import SamplingParams
from mmengine.serve.left import Left
from mmengine.server.asked import Asked, Envelope
from mmengine.server.asking import log_id
from mmengine.server.callers import IDEMPOTENCY_KEY, ITS_ID, Caller, Key


class Orphan(NamedTuple):
    """A call of the process before. `left`: its prompts in order."""

    envelope: Envelope
    request_id: str
    left: list[Left]

    def keys(self) -> list[Key]:
        mine = self.envelope
        found = [(mine.owner, IDEMPOTENCY_KEY, mine.key)] if mine.key else []
        return [*found, (mine.owner, ITS_ID, self.request_id)]

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


def orphans_of(left: Iterable[Left]) -> list[Orphan]:
    """The calls that are whole: nobody was told that one was accepted which lacks a prompt."""
    found: dict[str, dict[int, tuple[Envelope, Left]]] = {}
    for one in left:
        try:
            envelope = msgspec.json.decode(one.envelope, type=Envelope)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        prefix = f"{envelope.owner}:" if envelope.owner else ""
        name = one.request_id.removeprefix(prefix)
        if envelope.num_prompts > 1:
            name = name.removesuffix(f"-{envelope.place}")
        if log_id(envelope, name, envelope.place) == one.request_id:
            found.setdefault(f"{prefix}{name}", {})[envelope.place] = envelope, one
    orphans = []
    for name, places in found.items():
        envelope = next(iter(places.values()))[0]
        if len(places) == envelope.num_prompts:
            request_id = name.removeprefix(f"{envelope.owner}:") if envelope.owner else name
            orphans.append(Orphan(envelope, request_id, [places[place][1] for place in sorted(places)]))
    return orphans


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
