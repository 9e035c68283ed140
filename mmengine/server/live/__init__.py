"""The live page: a log while it is written, drawn in a browser, and a playground beside it."""
