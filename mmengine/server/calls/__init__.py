"""Calls that continue after their client disconnects: their ids, storage, recovery from the log, and
traces.
"""
