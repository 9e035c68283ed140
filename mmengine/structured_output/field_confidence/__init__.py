"""Computes how confident the model was in each field of a JSON answer, from the tokens' probabilities.

This package must not depend on engines, requests or tokenizers.
"""
