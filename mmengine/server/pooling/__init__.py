"""Embeddings, reranking and scores over HTTP, in the formats of OpenAI, vLLM, Jina and Cohere."""
