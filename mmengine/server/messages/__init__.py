"""Anthropic's Messages API. Bodies are translated to chat bodies, and answers are rendered as Anthropic's
events.
"""
