"""A load generator for servers with OpenAI's chat API. It summarizes its results."""
