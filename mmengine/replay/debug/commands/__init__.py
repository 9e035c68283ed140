"""The debugger's commands. A command is a line of text, and its result consists of tables and texts. The
terminal and the web page run the same commands.
"""
