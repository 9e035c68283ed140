"""Queries over a log: lists of requests and steps, the state at a record, and the reasons for a request's
delays.
"""
