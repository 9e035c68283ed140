"""Checks the context edits in a /v1/messages body. The server never removes content from a prompt, so only
edits without an effect are accepted.
"""

from collections.abc import Sequence
from functools import cached_property

from mmengine.errors import FIELD, ErrorCode, FieldPath
from mmengine.server.http.errors import ApiError, Json

# Maps each edit to its default threshold in input tokens, as in Anthropic's API.
_TRIGGERS = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}
_KEPT_RESULTS, _KEPT_TURNS = 3, 1  # Anthropic's defaults.
_THINKING = ("thinking", "redacted_thinking")


def check_context_management(given: Json | None, turns: Sequence[Json], max_model_len: int) -> None:
    """Raise ApiError if an edit is unknown or could remove content from the messages `turns`.
    `max_model_len`: the prompt's maximum length. No prompt reaches a threshold above this length.
    """
    where = FieldPath("context_management")
    fields = given or {}
    edits = [] if fields.get("edits") is None else fields["edits"]
    if not isinstance(edits, list) or fields.keys() - {"edits"}:
        raise _refusal(where)
    history = _History(turns)
    for number, edit in enumerate(edits):
        if not isinstance(edit, dict) or not _removes_nothing(edit, history, max_model_len):
            raise _refusal(where / "edits" / number)


def _refusal(where: FieldPath) -> ApiError:
    text = f"{FIELD} is not supported, because context is never removed; send fewer messages"
    return ApiError(ErrorCode.UNSUPPORTED_FIELD, text, where)


class _History:
    """Counts the content that edits could remove."""

    def __init__(self, turns: Sequence[Json]):
        self._turns = turns

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the number of tool results, of tool uses, and of turns with thinking."""
        results = uses = thoughts = 0
        for turn in self._turns:
            content = turn.get("content")
            blocks = content if isinstance(content, list) else []
            kinds = [block.get("type") for block in blocks if isinstance(block, dict)]
            results, uses = results + kinds.count("tool_result"), uses + kinds.count("tool_use")
            thoughts += any(kind in _THINKING for kind in kinds)
        return {"results": results, "uses": uses, "thoughts": thoughts}


def _removes_nothing(edit: Json, history: _History, max_model_len: int) -> bool:
    kind = edit.get("type")
    if kind == "clear_thinking_20251015":
        keep = edit.get("keep")
        if keep in ("all", {"type": "all"}):
            return True
        return history.counts["thoughts"] <= _value(keep, "thinking_turns", _KEPT_TURNS)
    if not isinstance(kind, str) or kind not in _TRIGGERS:
        return False
    trigger = edit.get("trigger")
    if max_model_len <= _value(trigger, "input_tokens", _TRIGGERS[kind]):
        return True
    if kind == "compact_20260112":
        return False
    if history.counts["results"] <= _value(edit.get("keep"), "tool_uses", _KEPT_RESULTS):
        return True
    return trigger is not None and history.counts["uses"] <= _value(trigger, "tool_uses", -1)


def _value(given: object, kind: str, default: int) -> int:
    """Return the number in an object such as {"type": "input_tokens", "value": 100}. Returns `default` for
    None, and -1 for an object of another type.
    """
    if given is None:
        return default
    if not isinstance(given, dict) or given.get("type") != kind:
        return -1
    value = given.get("value")
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
