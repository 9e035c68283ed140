"""Reads a schema, within size limits, into a document: a list of subschemas in draft 2020-12 with resolved
references.
"""
