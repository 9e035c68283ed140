"""The rules that each logged decision must satisfy, and checks of logged observations (events from outside
the engine).
"""
