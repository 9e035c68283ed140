"""Makes mmengine's loggers print records that they hide by default (--verbose)."""

import logging
import sys


def show_records() -> None:
    """Print the records of mmengine's loggers on stderr, one line each."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("mmengine").setLevel(logging.INFO)
