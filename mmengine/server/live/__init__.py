"""The page /live. The page draws the log in a browser while the log is written, and has a playground for
chats.
"""
