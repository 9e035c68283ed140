"""Python types as JSON Schemas: those of pydantic, msgspec, dataclasses and plain annotations."""
