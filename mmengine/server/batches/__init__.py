"""The routes below /v1/files and /v1/batches. A batch is a file of requests that run beside live calls and
survive a crash of the server.
"""
