"""/v1/files and /v1/batches: files of requests that run beside live traffic and survive a crash."""
