"""Images and videos of hosted models: runs transformers' processor on one item at a time, and computes the
item's features. Knows nothing of scheduling or attention.
"""
