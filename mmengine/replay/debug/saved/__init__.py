"""Saves engine states at some positions in a log. The debugger replays from a saved state to any other
position.

marks.py: the positions with a saved copy of the state
packed_state.py, copied_state.py: the two forms of a copy
request_table.py: the live requests, which all copies share
kept_states.py: keeps the copies in a file in the user's cache folder
compression.py: compresses states and requests
"""
