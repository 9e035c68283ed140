"""The time for reading prompts for drafts, per answer token.

A head reads each prompt before it drafts. For short answers the reading may take longer than the drafts save,
and decode-only steps do not show that time.
"""

MEMORY = 64  # requests above which older requests count half
FIRST_TOKENS, FIRST_REQUESTS = 64, 2  # the assumption at the beginning: 32 tokens per answer
COUNTERS = ("tokens", "requests", "new_requests", "read_ns", "read_requests")


class PromptCost:
    def __init__(self) -> None:
        self.tokens, self.requests = FIRST_TOKENS, FIRST_REQUESTS
        self.new_requests = 0  # since the last step with prompts returned
        self.read_ns = self.read_requests = 0  # of prompts that were read for drafts

    def admit(self) -> None:
        """Count a request that got a row."""
        self.requests += 1
        self.new_requests += 1
        if self.requests > MEMORY:
            self.tokens, self.requests = self.tokens // 2, self.requests // 2

    def read(self, ns: int) -> None:
        """Count a returned step with prompts. Reading them for drafts took `ns`; 0: no head read them."""
        if ns > 0:
            self.read_ns += ns
            self.read_requests += self.new_requests
            if self.read_requests > MEMORY:
                self.read_ns, self.read_requests = self.read_ns // 2, self.read_requests // 2
        self.new_requests = 0

    def ns_a_token(self) -> int:
        return self.read_ns * self.requests // max(self.read_requests * self.tokens, 1)
