"""Generates the tables in docs/reference/http.md from the code.

`python -m tests.server.fields_page` writes the tables to the page.
"""

from pathlib import Path

from mmengine.server.chat.field_tables import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from mmengine.server.http.body_fields import Field
from mmengine.server.messages.field_table import BLOCKS, COUNT_TOKENS, MESSAGES
from mmengine.server.responses.field_table import RESPONSES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http.md"
_BEGIN, _END = "<!-- fields: {} -->\n", "<!-- end -->"


def table(fields: tuple[Field, ...]) -> str:
    rows = ["| field | | |", "|---|---|---|"]
    order = ("taken", "translated", "ignored", "optional", "refused")
    for field in sorted(fields, key=lambda each: order.index(each.how)):
        said = field.says.replace("|", "\\|")
        if field.neutral:
            said += f" ({', '.join(f'`{_json(value)}`' for value in field.neutral)} is taken)"
        rows.append(f"| `{field.name}` | {field.how} | {said} |")
    return "\n".join(rows) + "\n"


def blocks() -> str:
    rows = ["| block, or tool | read | ignored |", "|---|---|---|"]
    for kind, sides in BLOCKS.items():
        read, ignored = (", ".join(f"`{name}`" for name in names) for names in sides)
        rows.append(f"| `{kind}` | {read} | {ignored} |")
    return "\n".join(rows) + "\n"


def _json(value: object) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()


def filled(text: str) -> str:
    shared = {field.name for field in CHAT} & {field.name for field in COMPLETION}
    only = tuple(
        field
        for field in COMPLETION
        if field.name not in shared or field.name in ("max_tokens", "logprobs", "echo")
    )
    responses = tuple(field for field in RESPONSES if field not in CHAT)
    messages = tuple(field for field in MESSAGES if field not in CHAT)
    counted = tuple(field for field in COUNT_TOKENS if field not in MESSAGES)
    tables = (
        *(("chat", CHAT), ("completions", only), ("responses", responses)),
        *(("messages", messages), ("tokenize", TOKENIZE), ("detokenize", DETOKENIZE)),
    )
    assert not counted, "count_tokens has a field that /v1/messages lacks; the page needs a table for it"
    pages = [*((name, table(fields)) for name, fields in tables), ("blocks", blocks())]
    for name, made in pages:
        head, begin, rest = text.partition(_BEGIN.format(name))
        _, end, tail = rest.partition(_END)
        assert begin and end, f"docs/reference/http.md has no markers for the fields of {name}"
        text = head + begin + "\n" + made + "\n" + end + tail
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
