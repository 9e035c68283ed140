"""How a setting's field is annotated: its text for help and reference, and its range."""

from msgspec import Meta


def described(text: str) -> Meta:
    """Annotate a setting without a range. `text`: a sentence for `--help` and the settings reference."""
    return Meta(description=text)


def between(low: float, high: float, text: str) -> Meta:
    """Annotate a number from `low` to `high`, both included."""
    return Meta(ge=low, le=high, description=text)
