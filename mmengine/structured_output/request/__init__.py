"""Read the requested output format: the fields in `response_format` and `grammar`, structural tags, and tool
calls. Defines how the log stores them.
"""
