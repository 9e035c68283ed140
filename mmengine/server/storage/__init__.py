"""SQLite and files beside the log: finished answers with their media, uploaded files, and batches."""
