"""The matcher interface that grammar engines implement, with llguidance's method names."""

from typing import Protocol, Self


class Matcher(Protocol):
    """The state of a text in a grammar. The tokens consumed so far determine which tokens may follow."""

    def consume_token(self, token_id: int) -> bool:
        """Consume a token.

        Returns False if the grammar does not allow the token. The matcher then has an error.
        """

    def consume_tokens(self, token_ids: list[int]) -> bool:
        """Consume several tokens in order, like `consume_token`."""

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        """Consume tokens as long as the grammar allows them, and return how many. The matcher stays valid."""

    def validate_tokens(self, token_ids: list[int]) -> int:
        """Return how many tokens `try_consume_tokens` would consume. The matcher does not advance."""

    def rollback(self, num_tokens: int) -> object:
        """Undo the last `num_tokens` tokens, which must not include an end of sequence.

        The return value has no meaning.
        """

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens that must come next (fast-forward tokens).

        A token is in the list only if no later text can require another tokenization. The list may therefore
        be empty although some bytes are forced.
        """

    def compute_ff_bytes(self) -> bytes:
        r"""Return the bytes that must come next. A special token appears as \xff[id]."""

    def compute_bitmask(self) -> bytes:
        """Return the allowed next tokens: token t is bit t % 8 of byte t // 8."""

    def deep_copy(self) -> Self:
        """Return an independent copy at the same position."""

    def is_accepting(self) -> bool:
        """Return whether the text may end here."""

    def is_stopped(self) -> bool:
        """Return whether no token can follow, because the text is complete or the matcher has an error."""

    def is_error(self) -> bool: ...

    def get_error(self) -> str:
        """Return the matcher's error, or "" if there is none."""
