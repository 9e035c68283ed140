"""Embeddings, rerankers and scores over HTTP, in the shapes of OpenAI, vLLM, Jina and Cohere."""
