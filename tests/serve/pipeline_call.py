"""What a call of the table says."""

from typing import NamedTuple


class Call(NamedTuple):
    code: str
    group: str
    outcome: str = "agrees"  # or "differs", "refused"
    note: str = ""  # why it differs, or what to use


def group(group: str, *calls: str | tuple[str, str, str]) -> list[Call]:
    return [Call(call, group) if isinstance(call, str) else Call(call[0], group, *call[1:]) for call in calls]
