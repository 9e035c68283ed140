"""Read the requested output form: the fields of `response_format` and `grammar`, tags, tool calls, and their
form in the log.
"""
