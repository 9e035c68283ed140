"""The code that made the included checkpoint: tokenizer, model, data, training, export and evaluation. Not
part of the wheel.
"""
