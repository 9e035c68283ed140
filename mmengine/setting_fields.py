"""Annotations for the fields of settings: the range, and the text for `--help` and the reference."""

from msgspec import Meta


def described(text: str) -> Meta:
    """Return the annotation of a setting without a range. `text`: a sentence for `--help` and the
    reference.
    """
    return Meta(description=text)


def between(low: float, high: float, text: str) -> Meta:
    """Return the annotation of a number from `low` to `high`, both included. `text`: as in `described`."""
    return Meta(ge=low, le=high, description=text)
