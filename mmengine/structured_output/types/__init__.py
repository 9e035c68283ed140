"""Converts Python types to JSON Schemas: pydantic and msgspec types, dataclasses and annotations."""
