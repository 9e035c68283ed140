"""What holds for all tests."""

import signal

# A shell starts background jobs with SIGINT ignored, and children inherit that: a test that interrupts
# one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
