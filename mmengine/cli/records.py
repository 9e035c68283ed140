"""Shows the records of the library's loggers, which are silent by default."""

import logging
import sys


def show_records() -> None:
    """Print records on stderr, a line each."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("mmengine").setLevel(logging.INFO)
