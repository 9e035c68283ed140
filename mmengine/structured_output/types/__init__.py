"""Python types as JSON Schemas: types of pydantic, msgspec, dataclasses and plain annotations."""
