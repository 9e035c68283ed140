"""Anthropic's Messages API: bodies and events, translated to and from chat."""
