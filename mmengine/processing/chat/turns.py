"""A conversation that is written piece by piece: what stands before and behind a piece of a user's turn.

A session's first piece opens a turn, and so does the first one behind an answer; others go on in it, and a
question closes it. What the template writes around them is found by rendering them between two marks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mmengine.errors import InvalidRequest
from mmengine.models.plugin import Opens
from mmengine.processing.chat.template import ChatTemplate

# Where a piece begins and ends: high surrogates, which nobody's text holds (as CUT in contents.py).
_BEGIN, _END, _SAID = "\ud801", "\ud802", "\ud803"


class RenderedTurn(NamedTuple):
    """`text`: the piece with what stands around it. `opening`: what of it belongs to what came before."""

    text: str
    opening: str


def render_turn(
    template: ChatTemplate,
    parts: Sequence[dict[str, object]],
    *,
    system: str,
    opens: Opens,
    closes: bool,
    variables: Mapping[str, object],
) -> RenderedTurn:
    """`parts`: plain content of a user's message. `closes`: the answer comes next. Raises InvalidRequest
    where the template leaves the marks out."""
    before: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    if opens == "next":
        before += [_user([_text("-")]), {"role": "assistant", "content": _SAID}]

    def rendered(content: list[dict[str, object]]) -> str:
        return template.render(
            [*before, _user(content)],
            add_generation_prompt=True,
            continue_final_message=False,
            variables=variables,
        )

    opening = _between(rendered([_text(_BEGIN)]), _SAID if opens == "next" else "", _BEGIN) if opens else ""
    if opens:
        whole = rendered([*parts, _text(_END)])
        text = _between(whole, _SAID if opens == "next" else "", _END)
    else:
        whole = rendered([_text(_BEGIN), *parts, _text(_END)])
        text = _between(whole, _BEGIN, _END)
    if closes:
        text += whole[whole.rindex(_END) + 1 :]
    return RenderedTurn(text, opening)


def _between(rendered: str, begin: str, end: str) -> str:
    first = rendered.rfind(begin) + 1 if begin else 0
    last = rendered.rfind(end)
    if (begin and not first) or last < first:
        raise InvalidRequest(
            "the model's chat template leaves out or moves what a message holds, so a session cannot be "
            "written piece by piece; send whole conversations"
        )
    return rendered[first:last]


def _user(content: list[dict[str, object]]) -> dict[str, object]:
    return {"role": "user", "content": content}


def _text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}
