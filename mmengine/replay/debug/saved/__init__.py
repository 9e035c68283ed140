"""Saves engine states at some positions in a log. The debugger replays from a saved state to any other
position.

marks.py: positions and their copies   packed_state.py, copied_state.py: a copy
request_table.py: live requests, shared by all copies   kept_states.py: a file in the user's cache
compression.py: the packed form of states and requests
"""
