"""What is asked for: the fields of `response_format` and `grammar`, tags, and what the log has of them."""
