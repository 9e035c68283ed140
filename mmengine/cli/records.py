"""Prints the log records that the library's loggers hide by default."""

import logging
import sys


def show_records() -> None:
    """Print records on stderr, each as a line."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("mmengine").setLevel(logging.INFO)
