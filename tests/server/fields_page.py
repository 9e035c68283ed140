"""The tables of docs/server.md, made from the code's own.

python -m tests.server.fields_page     writes them
"""

from pathlib import Path

from mmengine.server.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Field
from mmengine.server.responses.table import RESPONSES

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
_BEGIN, _END = "<!-- fields: {} -->\n", "<!-- end -->"


def table(fields: tuple[Field, ...]) -> str:
    rows = ["| field | | |", "|---|---|---|"]
    order = ("taken", "translated", "ignored", "refused")
    for field in sorted(fields, key=lambda each: order.index(each.how)):
        said = field.says.replace("|", "\\|")
        if field.neutral:
            said += f" ({', '.join(f'`{_json(value)}`' for value in field.neutral)} is taken)"
        rows.append(f"| `{field.name}` | {field.how} | {said} |")
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
    tables = (
        *(("chat", CHAT), ("completions", only), ("responses", responses)),
        *(("tokenize", TOKENIZE), ("detokenize", DETOKENIZE)),
    )
    for name, fields in tables:
        head, begin, rest = text.partition(_BEGIN.format(name))
        _, end, tail = rest.partition(_END)
        assert begin and end, f"docs/server.md has no place for the fields of {name}"
        text = head + begin + "\n" + table(fields) + "\n" + end + tail
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
