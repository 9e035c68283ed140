"""A load generator for servers with OpenAI's chat API. It measures the latency and throughput of the
server.
"""
