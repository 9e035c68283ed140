"""The grammar engines' matcher interface, with llguidance's method names."""

from typing import Protocol, Self


class Matcher(Protocol):
    """A text's grammar state: the tokens consumed so far determine the tokens that may follow."""

    def consume_token(self, token_id: int) -> bool:
        """Consume a token. If the grammar refuses the token, returns False, and the matcher has an error from
        then on.
        """

    def consume_tokens(self, token_ids: list[int]) -> bool:
        """Consume several tokens in order, like `consume_token`."""

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        """Consume as many of these tokens as the grammar allows, and return their number. The matcher stays
        valid.
        """

    def validate_tokens(self, token_ids: list[int]) -> int:
        """Return how many of these tokens `try_consume_tokens` would consume."""

    def rollback(self, num_tokens: int) -> object:
        """Undo the last `num_tokens` tokens, none of which may be an end of sequence. The return value has no
        meaning.
        """

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer spells them. Only tokens whose spelling
        does not depend on the text that follows are included, so the list may be empty although some bytes
        are forced.
        """

    def compute_ff_bytes(self) -> bytes:
        r"""Return the bytes that must come next, as far as they are known. A special token appears as
        \xff[its id].
        """

    def compute_bitmask(self) -> bytes:
        """Return the allowed next tokens: token t is bit t % 8 of byte t // 8."""

    def deep_copy(self) -> Self:
        """Return a copy at the same position, to explore continuations."""

    def is_accepting(self) -> bool:
        """Return whether the text may end here."""

    def is_stopped(self) -> bool:
        """Return whether nothing can follow: the text is complete, or the matcher has an error."""

    def is_error(self) -> bool: ...

    def get_error(self) -> str:
        """Return the matcher's error, or "" for a valid matcher."""
