"""Builds prompts for embedding models and rerankers, and turns the models' vectors into embeddings and
scores.

A pooled request returns a vector and generates no text. `Engine` and `AsyncEngine` submit the prompts. This
package depends on neither an engine nor HTTP.
"""
