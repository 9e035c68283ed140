"""The rules that each logged decision must satisfy. The rules for large decisions have modules of their
own.
"""
