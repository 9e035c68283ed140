"""The debugger as a page in a browser: one file that contains a small log, or the page of a debug server."""
