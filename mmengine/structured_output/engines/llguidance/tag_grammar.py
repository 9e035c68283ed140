"""Writes structural tags as grammars for llguidance.

The tags become a Lark grammar, and each schema in a tag becomes a JSON Schema or Lark grammar.

Free text before a trigger is a lazy lexeme (shortest match): it ends at the trigger's first occurrence, and a
tag must follow. A trigger with a special token needs no lazy lexeme, because free text contains no special
tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence

import msgspec

from mmengine.errors import ErrorCode, InvalidRequest, shown
from mmengine.structured_output.engines.llguidance.json_schema_lark import lark_of
from mmengine.structured_output.engines.llguidance.lark_text import quoted
from mmengine.structured_output.request.structural_tags import StructuralTag

_STARTS = {  # The keys are (at_least_one, stop_after_first).
    (False, False): "call* rest",
    (True, False): "call+ rest",
    (False, True): "call | rest",
    (True, True): "call",
}


def grammars_of(
    tag: StructuralTag, specials: Mapping[str, int], ends: Sequence[int], max_digits: int = 0
) -> str:
    """Return the grammars as JSON.

    `specials` maps the names for special tokens to their ids. Ordinary text never contains special tokens.
    `ends` has the token ids that end an answer. `max_digits`: as in `lark_of` (0: no limit). Raises
    InvalidRequest if a tag contains a token that ends an answer.
    """
    pieces = _Pieces(specials, ends)
    lines = [
        "start: " + _STARTS[tag.at_least_one, tag.stop_after_first],
        "rest: TEXT",
        "TEXT: /(?s:.*)/",
    ]
    opened = []
    for n, trigger in enumerate(tag.triggers):
        lines += pieces.opening(n, trigger)
        tags = []
        for m, each in enumerate(tag.structures):
            if each.begin.startswith(trigger):
                tags.append(f"tag_{m}")
                rest = pieces.of(each.begin[len(trigger) :])
                lines.append(f"tag_{m}: {rest} @schema_{m} {pieces.of(each.end)}")
        opened.append(f"open_{n} ({' | '.join(tags)})")
    lines.append("call: " + " | ".join(opened))
    grammars: list[dict[str, object]] = [{"name": "tags", "lark_grammar": "\n".join(lines)}]
    for m, each in enumerate(tag.structures):
        grammars.append(schema_named(f"schema_{m}", bytes(each.schema).decode(), max_digits))
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def schema_named(name: str, schema: str, max_digits: int) -> dict[str, object]:
    """Return a grammar called `name` for a normalized schema.

    `max_digits`: as in `grammars_of`.
    """
    lark = lark_of(schema, max_digits)
    inner = {"json_schema": msgspec.json.decode(schema)} if lark is None else {"lark_grammar": lark}
    return {"name": name, **inner}


class _Pieces:
    def __init__(self, specials: Mapping[str, int], ends: Sequence[int]):
        self._specials, self._ends = specials, set(ends)
        names = sorted((name for name in specials if name), key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def of(self, text: str) -> str:
        """Return `text` as a Lark expression in which special tokens' names become token ids."""
        return " ".join(self._special(one) if odd else quoted(one) for one, odd in self._split(text))

    def opening(self, n: int, trigger: str) -> list[str]:
        """Return the rules for free text up to and including the trigger. `n` numbers the main rule."""
        (first, is_special), *_ = parts = self._split(trigger)
        if len(parts) == 1 and not is_special:
            return [f"open_{n}[lazy]: TEXT {quoted(trigger)}"]
        if is_special:
            return [f"open_{n}: TEXT {self.of(trigger)}"]
        before = f"BEFORE_{n}"
        return [f"{before}: TEXT {quoted(first)}", f"open_{n}: {before} {self.of(trigger[len(first) :])}"]

    def _split(self, text: str) -> list[tuple[str, bool]]:
        """Split a text into runs (text, is_special). A special run is a special token's name."""
        runs = self._pattern.split(text) if self._pattern else [text]
        return [(run, bool(place % 2)) for place, run in enumerate(runs) if run]

    def _special(self, name: str) -> str:
        token = self._specials[name]
        if token in self._ends:
            text = f"{shown(name)} ends an answer, so no structural tag may contain it"
            raise InvalidRequest(text, code=ErrorCode.INVALID_GRAMMAR)
        return f"<[{token}]>"
