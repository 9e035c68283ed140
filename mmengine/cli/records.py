"""Records of the library's loggers, which are silent by themselves."""

import logging
import sys


def show_records() -> None:
    """On stderr, one line each."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("mmengine").setLevel(logging.INFO)
