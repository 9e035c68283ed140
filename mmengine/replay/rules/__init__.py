"""The rules that each logged decision must satisfy (decisions.py), and checks of observations. The rules for
ADMITTED and SCHEDULED have modules of their own.
"""
