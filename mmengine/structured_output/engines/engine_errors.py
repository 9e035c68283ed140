"""Rewrites a grammar engine's error messages for clients: a message names the fault and the remedy."""

import re

from mmengine.errors import shown

PANIC = "panic"  # Prefix of an error that reports a bug in llguidance.
MAX_ERROR_CHARS = 300  # Longer messages are truncated.
_KNOWN = tuple(
    (re.compile(found), said)
    for found, said in (
        (
            r"grammar.symbols.len|^[Gg]rammar size",
            "the expanded grammar has more rules than the grammar engine supports (about 65,000); use $ref "
            "for parts that are repeated, and fewer alternatives",
        ),
        (r"panic|<backtrace>", "the grammar engine itself failed; write the grammar differently"),
        (
            r"intersection stack level",
            "properties and patternProperties (or allOf) together lead back to themselves; let no name "
            "in properties match a pattern beside it",
        ),
        (r"[Cc]ircular references", "its parts refer to themselves without an end; give them one"),
        (
            r"too deeply nested|nest limit|nested parentheses|[Rr]ecursion limit",
            "nested deeper than the grammar engine supports; give the inner parts their own rules, or "
            "write them without groups",
        ),
        (
            r"too many expressions|determine if regex is empty|[Ff]uel exhausted|[Tt]oo many states|"
            r"exceeds size limit|lexer.* too (?:big|large)|[Ss]chema too large",
            "a regex, terminal or pattern needs more states than the grammar engine supports; lower the "
            r"counts of repetitions, or name narrower classes than \p{L} or \w, such as [a-z]",
        ),
        (
            r"Too many items|Current row has",
            "at one place there are too many continuations for the grammar engine, or rules that never end;  "
            'make alternatives that are texts one terminal (NAME: "a" | "b"), and give each rule an end',
        ),
        (r"^NoExtension", "the grammar allows no text"),
    )
)
_REGEX = re.compile(r'invalid regex "(.*?)" \(in regex\): (.*)', re.S)
# The form in which llguidance quotes a pattern from a normalized schema.
_PATTERN = re.compile(r"SearchRegex /\^\(\?:(.*?)\)\$/")
# The grammar lines that llguidance quotes, and the line in which ^ marks a position.
_SOURCE_LINE = re.compile(r"^ *(?:\d+ \| .*|\^)\n?", re.M)


def is_panic(failure: BaseException) -> bool:
    """Return whether the failure is a panic in a Rust library. PanicException is a BaseException, but not an
    Exception.

    llguidance converts panics in its matchers to errors. The caller must report other panics.
    """
    return type(failure).__name__ == "PanicException"


def describe_error(error: str) -> str:
    """Return the rewritten error as a single line with at most MAX_ERROR_CHARS characters."""
    text = error.replace("<non-verbose/>", "")
    for pattern, said in _KNOWN:
        if pattern.search(text):
            of_schema = _PATTERN.search(text)
            return said if of_schema is None else f"{said}; the pattern is {shown(of_schema[1])}"
    text = _SOURCE_LINE.sub("", text)
    found = _REGEX.search(text)
    if found is not None:
        reason = found[2].rpartition("error: ")[2]
        text = f"invalid regex {shown(found[1])}: {reason}"
    text = " ".join(text.split())
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[: MAX_ERROR_CHARS - 3]}..."
