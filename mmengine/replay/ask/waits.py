"""The steps in which one request got nothing, told as one sentence."""

from collections import Counter
from typing import Any, NamedTuple

from mmengine.replay.ask.reasons import BEHIND, Reason


class Wait(NamedTuple):
    """One step without tokens. `since_ns`: when, since the request came. `ahead`: why the request that it
    stands behind waits itself."""

    step: int
    since_ns: int
    reason: Reason
    ahead: Reason | None


def told(waits: list[Wait]) -> tuple[str, dict[str, Any]]:
    """The sentence, the commonest reason first, and its figures."""
    counts = Counter(wait.reason.kind for wait in waits)
    parts, facts = [], []
    for kind, count in counts.most_common():
        same = [wait for wait in waits if wait.reason.kind == kind]
        text, figures = _behind(same) if kind == BEHIND else _short(same)
        share = "" if count == len(waits) else f"in {count} of them " if len(waits) > 1 else ""
        parts.append(share + text)
        span = {"first_step": same[0].step, "last_step": same[-1].step}
        facts.append({"reason": kind, "steps": count, **span, **figures})
    plural = "a step" if len(waits) == 1 else f"{len(waits)} steps"
    return f"It got nothing in {plural}: {'; '.join(parts)}.", {"steps": len(waits), "reasons": facts}


def _short(waits: list[Wait]) -> tuple[str, dict[str, Any]]:
    last = waits[-1].reason
    text = last.sentence()
    figures: dict[str, object] = {}
    if last.other:
        figures["other"] = last.other
    if last.short:
        short = [wait.reason.short for wait in waits]
        figures |= {"needed": last.needed, "free": last.free, "short": [min(short), max(short)]}
        if min(short) != max(short):
            text += f" at last, {min(short)} to {max(short)} on the way"
    return text, figures


def _behind(waits: list[Wait]) -> tuple[str, dict[str, Any]]:
    names = list(dict.fromkeys(wait.reason.other for wait in waits))
    last = waits[-1]
    why = f" ({last.ahead.sentence()})" if last.ahead is not None else ""
    if len(names) == 1:
        return f"it stands behind {names[0]}{why}", {"others": names}
    text = f"it stands behind {len(names)} others, one after the other, from {names[0]} to {names[-1]}{why}"
    return text, {"others": names}
