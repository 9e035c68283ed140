"""The routes below /v1/files and /v1/batches. A batch is a file of requests that run at the same time as live
calls. Batches survive a crash of the server.
"""
