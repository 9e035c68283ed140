"""Benchmarks of embeddings."""
