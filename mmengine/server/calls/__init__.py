"""Calls that continue after their client disconnects: how they are identified, detached from the connection,
stored, recovered from the log, and traced.
"""
