"""Images and videos for transformers models: runs transformers' processor on single items, and computes
features. Must not depend on scheduling or attention.
"""
