"""OpenAI's Responses API: body parsing, stream events, response objects, and routes for stored responses."""
