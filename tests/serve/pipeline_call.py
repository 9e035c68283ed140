"""A call in the table of docs/reference/pipeline.md, with its outcome."""

from typing import NamedTuple


class Call(NamedTuple):
    code: str
    group: str
    outcome: str = "agrees"  # or "differs", "refused" (only by mmengine), "more" (only transformers raises)
    note: str = ""  # why it differs, or the replacement if it is refused


def group(group: str, *calls: str | tuple[str, str, str]) -> list[Call]:
    return [Call(call, group) if isinstance(call, str) else Call(call[0], group, *call[1:]) for call in calls]
