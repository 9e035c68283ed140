"""Embeddings, rerankers and scores: prompts for pooled requests, and what follows from their vectors.

Knows no HTTP and does not step an engine: `Engine` and `AsyncEngine` submit the prompts.
"""
