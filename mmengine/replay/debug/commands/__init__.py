"""The debugger's commands: one line of text in, tables and texts out. A terminal and a page run the same
commands.
"""
