"""Renders a session's prompt with the chat template, a piece of a user's turn at a time. Also joins the
videos in consecutive pieces into a single video.

A session's first piece opens a turn, and so does the first piece after an answer. A piece that asks for an
answer closes the turn. To find the template's text around a piece, the piece is rendered between two markers.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from mmengine.errors import InvalidRequest
from mmengine.models.plugin import Opens
from mmengine.processing.chat.marks import ANSWER, PIECE_BEGIN, PIECE_END
from mmengine.processing.chat.template import ChatTemplate


class RenderedTurn(NamedTuple):
    """A rendered piece. `text`: the piece with the template's text around the piece. `opening`: the start of
    `text`, which ends the preceding turn and opens this turn.
    """

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
    """Render a piece of a user's turn.

    `parts`: the content of a user message, as plain data for the template. `opens`: "first" if the piece
    begins the session's first turn, "next" if it begins a later turn, "" if it continues a turn. `closes`:
    whether the answer comes next. Raises InvalidRequest if the template drops the markers.
    """
    before: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    if opens == "next":
        before += [_user([_text("-")]), {"role": "assistant", "content": ANSWER}]

    def rendered(content: list[dict[str, object]]) -> str:
        return template.render(
            [*before, _user(content)],
            add_generation_prompt=True,
            continue_final_message=False,
            variables=variables,
        )

    opening = (
        _between(rendered([_text(PIECE_BEGIN)]), ANSWER if opens == "next" else "", PIECE_BEGIN)
        if opens
        else ""
    )
    if opens:
        whole = rendered([*parts, _text(PIECE_END)])
        text = _between(whole, ANSWER if opens == "next" else "", PIECE_END)
    else:
        whole = rendered([_text(PIECE_BEGIN), *parts, _text(PIECE_END)])
        text = _between(whole, PIECE_BEGIN, PIECE_END)
    if closes:
        text += whole[whole.rindex(PIECE_END) + 1 :]
    return RenderedTurn(text, opening)


def around_video(
    template: ChatTemplate, pads: Collection[int], variables: Mapping[str, object]
) -> tuple[list[str | int], list[str | int]]:
    """Return the tokens that the template writes before and after a video's placeholder. `pads`: placeholder
    ids.
    """
    video: list[dict[str, object]] = [{"type": "video"}]
    turn = render_turn(template, video, system="", opens="", closes=False, variables=variables)
    pieces = template.split(turn.text)
    place = next((n for n, piece in enumerate(pieces) if piece in pads), len(pieces))
    return pieces[:place], pieces[place + 1 :]


def in_one_film(
    pieces: list[str | int],
    before: list[str | int],
    after: list[str | int],
    *,
    in_film: bool,
    is_film: bool,
) -> list[str | int]:
    """Return `pieces` with all their videos joined into a single video, which stays open: the template's
    tokens after the video are missing.

    `before`, `after`: the template's tokens around a video. `in_film`: whether the pieces follow an open
    video. `is_film`: whether the pieces contain a video. With both, this video continues the open video.
    Without `is_film`, the open video is closed before the pieces.
    """
    if not is_film:
        return [*after, *pieces]
    ends, begins = len(after), len(before)
    whole = pieces[: len(pieces) - ends] if ends else list(pieces)
    between, place, out = [*after, *before], 0, list[str | int]()
    while place < len(whole):
        if between and whole[place : place + len(between)] == between:
            place += len(between)
        else:
            out.append(whole[place])
            place += 1
    return out[begins:] if in_film else out


def _between(rendered: str, begin: str, end: str) -> str:
    first = rendered.rfind(begin) + 1 if begin else 0
    last = rendered.rfind(end)
    if (begin and not first) or last < first:
        raise InvalidRequest(
            "the model's chat template drops or moves a message's content, so a session cannot be written "
            "piece by piece; send whole conversations"
        )
    return rendered[first:last]


def _user(content: list[dict[str, object]]) -> dict[str, object]:
    return {"role": "user", "content": content}


def _text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}
