"""OpenAI's Responses API: parsing of bodies, stream events, and response objects."""
