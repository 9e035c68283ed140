"""Requests that the process before left in its log, and that nobody took up yet."""

from collections.abc import Mapping
from dataclasses import dataclass

from mmengine.core.unreceived import ResumedAnswer
from mmengine.events.vocabulary import Queued


@dataclass(frozen=True, slots=True)
class Left:
    """`queued`: of its first answer. `num_tokens`: of all its answers when the log was read. `has_ended`:
    whether they were whole then, and only nobody had received them."""

    request_id: str
    num_choices: int
    queued: Queued
    num_tokens: int
    has_ended: bool

    @property
    def envelope(self) -> bytes:
        """What whoever asked kept with it."""
        return self.queued.envelope


def left_of(resumed: Mapping[str, ResumedAnswer]) -> dict[str, Left]:
    """By request id; `resumed` is by core id. Those that were given up are nobody's."""
    choices: dict[str, list[ResumedAnswer]] = {}  # by the core id of the first
    for name, answer in resumed.items():
        if not answer.was_given_up:
            choices.setdefault(answer.queued.group or name, []).append(answer)
    out = {}
    for first, answers in choices.items():
        request_id = first.removesuffix("/0") if len(answers) > 1 else first
        queued = min((answer.queued for answer in answers), key=lambda each: each.sample_index)
        tokens = sum(len(answer.token_ids) for answer in answers)
        ended = all(answer.reason for answer in answers)
        out[request_id] = Left(request_id, len(answers), queued, tokens, ended)
    return out
