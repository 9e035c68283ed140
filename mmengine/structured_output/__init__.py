"""Answers in a form that was asked for: what may be asked, how it is compiled, and what a row may say."""
