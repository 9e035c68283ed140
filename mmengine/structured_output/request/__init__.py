"""Read the requested output form: the fields in `response_format` and `grammar`, tags, tool calls, and their
form in the log.
"""
