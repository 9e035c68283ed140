"""Images and videos of hosted models: transformers' processors, run on one item at a time, and the features
of the item. Knows nothing of scheduling or attention.
"""
