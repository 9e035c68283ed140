"""Recognises special tokens that a chat template builds around a message's role, such as '<|' + role + '|>'.

While the template renders, the text of a role carries marks, which no message text can contain. If a
rendered prompt has a token's text with these marks around the role, the template wrote the token.
"""

from collections.abc import Iterable, Mapping, Sequence

from mmengine.processing.chat.marks import ROLE_BEGIN, ROLE_END

# Any other role is arbitrary text from the caller, so it may not become a part of a special token.
ROLES = ("system", "user", "assistant", "tool", "developer", "function", "observation")


class MarkedRole(str):
    """A role that equals its plain text, and that has marks when the template writes it."""

    __slots__ = ()

    def __str__(self) -> str:
        return ROLE_BEGIN + super().__str__() + ROLE_END

    def __format__(self, spec: str) -> str:
        return format(str(self) if not spec else super().__str__(), spec)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def texts_around_roles(tokens: Iterable[str], source: str) -> dict[str, str]:
    """Return marked text -> token, for each token that contains a role and whose parts before and after the
    role are in the template `source`.
    """
    found = {}
    for token in tokens:
        for role in ROLES:
            before, middle, after = token.partition(role)
            if middle and before and after and before in source and after in source:
                found[f"{before}{ROLE_BEGIN}{role}{ROLE_END}{after}"] = token
    return found


def with_marked_roles(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return copies of the messages in which known roles are marked."""
    return [
        {**message, "role": MarkedRole(message["role"])} if message.get("role") in ROLES else dict(message)
        for message in messages
    ]


def replace_marked_roles(rendered: str, tokens: Mapping[str, str]) -> str:
    """Replace each text in `tokens` by its value, and remove the marks around all other roles."""
    for text, token in tokens.items():
        rendered = rendered.replace(text, token)
    return rendered.replace(ROLE_BEGIN, "").replace(ROLE_END, "")
