"""OpenAI's Responses API: parsing of bodies, stream events, response objects, and routes for stored
responses.
"""
