"""The debugger's web page: a file that contains a small log, or the page of a debug server."""
