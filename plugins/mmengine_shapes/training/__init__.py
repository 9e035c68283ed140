"""The code that made the embedded checkpoint: tokenizer, model, data, training, export and evaluation. Not
part of the wheel.
"""
