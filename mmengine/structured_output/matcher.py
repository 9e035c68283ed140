"""What a grammar engine's object for one text can do, in the words of llguidance."""

from typing import Protocol, Self


class Matcher(Protocol):
    """The grammar state of one text: the tokens that it took, and what may follow."""

    def consume_token(self, token_id: int) -> bool:
        """Go on by this token; False, and broken from then on, where the grammar refuses it."""

    def consume_tokens(self, token_ids: list[int]) -> bool:
        """The same by one token after the other."""

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        """Go on by as many of these tokens as the grammar takes, and say how many; it stays sound."""

    def validate_tokens(self, token_ids: list[int]) -> int:
        """How many of these tokens `try_consume_tokens` would take."""

    def rollback(self, num_tokens: int) -> object:
        """Be where it was before the last `num_tokens` that it took, none of them an end of sequence. What it
        returns means nothing."""

    def compute_ff_tokens(self) -> list[int]:
        """Tokens, as the tokenizer spells them, of what must come next; only those whose spelling does not
        depend on what follows. They may be none though something is forced."""

    def compute_ff_bytes(self) -> bytes:
        """Bytes that must come next, as far as that is known; a token that no text holds is among them as
        \\xff[its id]."""

    def compute_bitmask(self) -> bytes:
        """What it allows next: token t is bit t % 8 of byte t // 8."""

    def deep_copy(self) -> Self:
        """Another one at the same place, to try out how the text could go on."""

    def is_accepting(self) -> bool:
        """Whether the text may end here."""

    def is_stopped(self) -> bool:
        """Whether nothing can follow: the text is complete, or the matcher is broken."""

    def is_error(self) -> bool: ...

    def get_error(self) -> str:
        """Why it is broken; empty when it is not."""
