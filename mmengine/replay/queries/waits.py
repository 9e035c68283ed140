"""Writes a sentence that summarizes the steps in which a request was not scheduled."""

from collections import Counter
from typing import Any, NamedTuple

from mmengine.replay.queries.reasons import BEHIND, Reason
from mmengine.replay.queries.wording import Words


class Wait(NamedTuple):
    """A step in which the request was not scheduled.

    `since_ns`: time since the request's arrival. `ahead`: if this request waits for another request, the
    other request's own reason; else None.
    """

    step: int
    since_ns: int
    reason: Reason
    ahead: Reason | None


def describe_waits(waits: list[Wait], words: Words) -> tuple[str, dict[str, Any]]:
    """Return a sentence about the waits, most frequent reason first, and a dict with its numbers."""
    counts = Counter(wait.reason.kind for wait in waits)
    parts, facts = [], []
    for kind, count in counts.most_common():
        same = [wait for wait in waits if wait.reason.kind == kind]
        text, figures = (_behind if kind == BEHIND else _short)(same, words)
        share = "" if count == len(waits) else f"in {count} of them, " if len(waits) > 1 else ""
        parts.append(share + text)
        span = {"first_step": same[0].step, "last_step": same[-1].step}
        facts.append({"reason": kind, "steps": count, **span, **figures})
    plural = "a step" if len(waits) == 1 else f"{len(waits)} steps"
    return f"Not scheduled for {plural}: {'; '.join(parts)}.", {"steps": len(waits), "reasons": facts}


def _short(waits: list[Wait], words: Words) -> tuple[str, dict[str, Any]]:
    last = waits[-1].reason
    text = words.reason(last, waits[-1].step)
    figures: dict[str, object] = {}
    if last.other:
        figures["other"] = last.other
    if last.short:
        short = [wait.reason.short for wait in waits]
        figures |= {"needed": last.needed, "free": last.free, "short": [min(short), max(short)]}
        if min(short) != max(short):
            text += f" in the last step, {min(short)} to {max(short)} short overall"
    return text, figures


def _behind(waits: list[Wait], words: Words) -> tuple[str, dict[str, Any]]:
    names = list(dict.fromkeys(wait.reason.other for wait in waits))
    last = waits[-1]
    why = f" ({words.reason(last.ahead, last.step)})" if last.ahead is not None else ""
    if len(names) == 1:
        return f"{names[0]} comes first{why}", {"others": names}
    text = f"{len(names)} other requests come first, in turn, from {names[0]} to {names[-1]}{why}"
    return text, {"others": names}
