"""Makes mmengine's loggers print INFO records, for `run --verbose` and the server's request log."""

import logging
import sys


def show_records() -> None:
    """Print mmengine's log records from level INFO on, one line each, to stderr."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("mmengine").setLevel(logging.INFO)
