"""The previous process's requests in the log to which no caller is attached yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mmengine.core.undelivered_answers import ResumedAnswer
from mmengine.events.vocabulary import Queued
from mmengine.serve.prompt.prompt import core_ids


class UnclaimedRequest(Protocol):
    """The facts by which a caller recognizes its request. `envelope` are the bytes that the caller kept with
    it.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def envelope(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RecoveredRequest:
    """The previous process's request.

    `queued` is its first answer's event. `num_tokens` counts all its answers' tokens when the log was read.
    `has_ended` says whether they were complete then and only not delivered.
    """

    request_id: str
    num_choices: int
    queued: Queued
    num_tokens: int
    has_ended: bool

    @property
    def envelope(self) -> bytes:
        """The bytes that the caller kept with the request."""
        return self.queued.envelope


def find_recovered(resumed: Mapping[str, ResumedAnswer]) -> tuple[dict[str, RecoveredRequest], list[str]]:
    """Return recovered requests by id, and core ids whose answers no caller can claim. `resumed` is by core
    id.

    An answer cannot be claimed if its request was cancelled, or lacks a choice that was delivered or
    cancelled.
    """
    choices: dict[str, dict[str, ResumedAnswer]] = {}  # by the first choice's core id
    for name, answer in resumed.items():
        choices.setdefault(answer.queued.group or name, {})[name] = answer
    out: dict[str, RecoveredRequest] = {}
    unclaimed: list[str] = []
    for first, answers in choices.items():
        request_id = first.removesuffix("/0") if len(answers) > 1 else first
        names = core_ids(request_id, len(answers))
        if answers.keys() != set(names) or any(answer.was_given_up for answer in answers.values()):
            unclaimed += answers
            continue
        tokens = sum(len(answer.token_ids) for answer in answers.values())
        ended = all(answer.reason for answer in answers.values())
        out[request_id] = RecoveredRequest(request_id, len(answers), answers[names[0]].queued, tokens, ended)
    return out, unclaimed
