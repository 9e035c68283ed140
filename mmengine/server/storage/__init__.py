"""The data that the server stores next to the log: answers with their media, uploaded files, and batches. The
data is in an SQLite database and in files.
"""
