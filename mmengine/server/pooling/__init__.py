"""Embeddings, reranking and scores over HTTP, in OpenAI's formats, vLLM, Jina and Cohere."""
