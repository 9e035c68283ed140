"""Read a schema with limits into a document in draft 2020-12, with references resolved."""
