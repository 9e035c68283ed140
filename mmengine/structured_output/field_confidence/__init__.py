"""Confidences of the fields of a JSON answer, computed from its tokens' confidences.

Knows JSON text and a schema's values. Must not know engines, requests or tokenizers.
"""
