"""What reading prompts for drafts takes, of each token that is answered.

A head reads each prompt before it drafts behind it. Where answers are short that may take longer than its
drafts save, and none of it shows in steps that only decode.
"""

MEMORY = 64  # requests, at which older ones count half
FIRST_TOKENS, FIRST_REQUESTS = 64, 2  # an answer has 32 tokens, where nothing is known
COUNTERS = ("tokens", "requests", "new_requests", "read_ns", "read_requests")


class PromptCost:
    def __init__(self) -> None:
        self.tokens, self.requests = FIRST_TOKENS, FIRST_REQUESTS
        self.new_requests = 0  # since the last step that computed prompts was back
        self.read_ns = self.read_requests = 0  # of prompts that were read for drafts

    def admit(self) -> None:
        """A request got a row."""
        self.requests += 1
        self.new_requests += 1
        if self.requests > MEMORY:
            self.tokens, self.requests = self.tokens // 2, self.requests // 2

    def read(self, ns: int) -> None:
        """A step that computed prompts is back, and reading these for drafts took `ns`; 0: nobody did."""
        if ns > 0:
            self.read_ns += ns
            self.read_requests += self.new_requests
            if self.read_requests > MEMORY:
                self.read_ns, self.read_requests = self.read_ns // 2, self.read_requests // 2
        self.new_requests = 0

    def ns_a_token(self) -> int:
        return self.read_ns * self.requests // max(self.read_requests * self.tokens, 1)
