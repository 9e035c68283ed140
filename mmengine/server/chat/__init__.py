"""OpenAI's chat completions and completions APIs: parsing of bodies, and rendering of answers as stream
frames or JSON.
"""
