"""Builds prompts for embedding models and rerankers, and turns the models' vectors into embeddings and
scores.

A pooled request returns a vector and generates no text. `Engine` and `AsyncEngine` submit the prompts, so
this package does not depend on an engine or HTTP.
"""
