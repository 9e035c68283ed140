"""Copies of a log's states at some positions, from which the debugger reaches all other positions.

marks.py: positions and their copies   packed_state.py, copied_state.py: a copy
request_table.py: live requests, shared by all copies   kept_states.py: a file in the user's cache
compression.py: the packed form of states and requests
"""
