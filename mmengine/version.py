"""The version of mmengine, which is written into every log."""

__version__ = "0.1.0"
