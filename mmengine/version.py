"""The version of the distribution, written into every log."""

__version__ = "0.1.0"
