"""Anthropic's Messages API: asked in its words, answered in its events, by the ways of chat."""
