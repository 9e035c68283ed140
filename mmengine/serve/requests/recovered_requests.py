"""Requests that the process before left in its log, and that nobody took up yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mmengine.core.undelivered_answers import ResumedAnswer
from mmengine.events.vocabulary import Queued
from mmengine.serve.prompt.prompt import core_ids


class UnclaimedRequest(Protocol):
    """What whoever asked knows a request of the process before by. `envelope`: what it kept with it."""

    @property
    def request_id(self) -> str: ...

    @property
    def envelope(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RecoveredRequest:
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


def find_recovered(resumed: Mapping[str, ResumedAnswer]) -> tuple[dict[str, RecoveredRequest], list[str]]:
    """By request id; `resumed` is by core id. The second: core ids of what is nobody's, because its request
    was given up, or lacks a choice that was delivered or given up."""
    choices: dict[str, dict[str, ResumedAnswer]] = {}  # by the core id of the first
    for name, answer in resumed.items():
        choices.setdefault(answer.queued.group or name, {})[name] = answer
    out: dict[str, RecoveredRequest] = {}
    nobodys: list[str] = []
    for first, answers in choices.items():
        request_id = first.removesuffix("/0") if len(answers) > 1 else first
        names = core_ids(request_id, len(answers))
        if answers.keys() != set(names) or any(answer.was_given_up for answer in answers.values()):
            nobodys += answers
            continue
        tokens = sum(len(answer.token_ids) for answer in answers.values())
        ended = all(answer.reason for answer in answers.values())
        out[request_id] = RecoveredRequest(request_id, len(answers), answers[names[0]].queued, tokens, ended)
    return out, nobodys
