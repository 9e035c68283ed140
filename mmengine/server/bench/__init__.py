"""A load generator for servers with OpenAI's chat API. The generator measures the latency and throughput of a
server.
"""
