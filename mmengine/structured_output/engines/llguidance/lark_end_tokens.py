"""Refuses Lark grammars with an end-of-sequence token, because such a token always ends the answer."""

import re
from collections.abc import Mapping, Sequence

from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown
from mmengine.structured_output.request.spec import LARK_LITERAL

_IDS = re.compile(r"<\[(\^?)([^\]]*)\]>")
_RANGE = re.compile(r"\s*([0-9]{1,9})\s*(-?)\s*([0-9]{1,9})?\s*")
_AT_END = re.compile(r"""\bstop\s*=\s*("")""")


def check_ends(lark: str, specials: Mapping[str, int], ends: Sequence[int]) -> None:
    """Raise InvalidRequest if a rule may contain a token that ends answers.

    A rule may contain the token's name, a list with the token's id (<[3,7-9]>, <[^3]>, <[*]>), or stop="",
    which ends the rule at an end of sequence. A quoted name is ordinary text. `specials` maps token names to
    ids.
    """
    rules = LARK_LITERAL.sub(" ", lark)  # Inside literals, a token's name is ordinary text.
    found = [name for name, token in specials.items() if token in ends and name in rules]
    for each in _IDS.finditer(rules):
        covered = any(_holds(each[2], token) != bool(each[1]) for token in ends)
        found += [each[0]] if covered else []
    found += [each[0] for each in _AT_END.finditer(lark)]
    if found:
        raise InvalidRequest(
            f"{FIELD}: {shown(found[0])} may end an answer, so no rule may contain it; leave it "
            "out: an answer may end wherever the rules are complete",
            path=FieldPath("grammar", "lark"),
        )


def _holds(ids: str, token: int) -> bool:
    """Return whether an id list contains the token. Malformed lists are refused later by llguidance."""
    for one in ids.split(","):
        if one.strip() == "*":
            return True
        found = _RANGE.fullmatch(one)
        if found and int(found[1]) <= token <= int(found[3] or (found[1] if not found[2] else token)):
            return True
    return False
