"""Calls that the previous process accepted but did not finish. The calls are recovered from the log."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from mmengine.request import SamplingParams
from mmengine.serve.requests.recovery import UnclaimedRequest
from mmengine.server.calls.call_identity import Caller, Key, keys_of
from mmengine.server.chat.parsed_request import Envelope, ParsedRequest
from mmengine.server.chat.submission import log_request_id, prompt_request_id


class RecoveredCall(NamedTuple):
    """A recovered call. `left` maps a prompt's index to the prompt's unclaimed request.

    If `left` lacks a prompt, the process ended before the whole call was accepted, so the client received no
    answer. The engine continues the call's accepted requests.
    """

    envelope: Envelope
    request_id: str
    left: dict[int, UnclaimedRequest]

    def keys(self) -> list[Key]:
        return keys_of(self.envelope, self.request_id)

    def is_of(self, envelope: Envelope, keys: list[Key], caller: Caller) -> bool:
        """Whether a new call may get this call's answer. `envelope`, `keys` and `caller` describe the new
        call.
        """
        mine = self.envelope
        if mine.owner != envelope.owner:
            return False
        if not set(keys).isdisjoint(self.keys()):
            return True
        # Client libraries retry with a retry header, but they never retry a stream. Retries of a stream come
        # from the caller's code and have no header.
        may_claim = caller.tries_again or mine.is_stream
        return may_claim and not mine.key and mine.digest == envelope.digest


def group_recovered_calls(left: Iterable[UnclaimedRequest]) -> list[RecoveredCall]:
    """Group unclaimed requests into calls. Requests whose envelope cannot be decoded are skipped."""
    found: dict[str, RecoveredCall] = {}
    for one in left:
        try:
            envelope = msgspec.json.decode(one.envelope, type=Envelope)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        prefix = log_request_id(envelope.owner, "")
        name = one.request_id.removeprefix(prefix)
        if envelope.num_prompts > 1:
            name = name.removesuffix(f"-{envelope.place}")
        if prompt_request_id(envelope, name, envelope.place) == one.request_id:
            recovered_call = found.setdefault(f"{prefix}{name}", RecoveredCall(envelope, name, {}))
            recovered_call.left[envelope.place] = one
    return list(found.values())


def rebuild_request(request_id: str, envelope: Envelope, sampling: SamplingParams) -> ParsedRequest:
    """Return a recovered or stored call's request, without prompts."""
    return ParsedRequest(
        [],
        sampling,
        request_id,
        envelope,
        envelope.is_stream,
        envelope.usage_frames,
        logprobs=sampling.logprobs is not None,
        show_reasoning=envelope.show_reasoning,
    )
