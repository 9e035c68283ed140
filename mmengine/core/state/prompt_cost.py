"""Measures how much time a draft head spends on reading prompts, per answer token.

A draft head reads each prompt before it drafts. For short answers, reading the prompt may take longer than
the drafts save. The times of decode-only steps do not include the time for prompts.
"""

MEMORY = 64  # above this number of requests, counts are halved, so that newer requests weigh more
FIRST_TOKENS, FIRST_REQUESTS = 64, 2  # initial counts: they assume 32 tokens per answer
COUNTERS = ("tokens", "requests", "new_requests", "read_ns", "read_requests")


class PromptCost:
    """Counts requests and tokens, and adds up the time for reading prompts."""

    def __init__(self) -> None:
        self.tokens, self.requests = FIRST_TOKENS, FIRST_REQUESTS
        self.new_requests = 0  # number of requests admitted since the last call of `read`
        # The time for reading prompts, and the number of requests whose prompts were read.
        self.read_ns = self.read_requests = 0

    def admit(self) -> None:
        """Count a request that got a row."""
        self.requests += 1
        self.new_requests += 1
        if self.requests > MEMORY:
            self.tokens, self.requests = self.tokens // 2, self.requests // 2

    def read(self, ns: int) -> None:
        """Count a completed step with prompts. `ns`: the draft head's time for reading the prompts, or 0
        without a draft head.
        """
        if ns > 0:
            self.read_ns += ns
            self.read_requests += self.new_requests
            if self.read_requests > MEMORY:
                self.read_ns, self.read_requests = self.read_ns // 2, self.read_requests // 2
        self.new_requests = 0

    def ns_a_token(self) -> int:
        return self.read_ns * self.requests // max(self.read_requests * self.tokens, 1)
