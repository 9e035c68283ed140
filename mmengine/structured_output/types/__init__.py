"""Python types as JSON Schemas: pydantic, msgspec, dataclasses and plain annotations."""
