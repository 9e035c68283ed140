"""Extracts the fields of many documents into a table: `mmengine extract`."""
