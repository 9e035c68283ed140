"""A server on 127.0.0.1 for one person's debugger page (`mmengine log debug --web`)."""
