"""llguidance: JSON Schemas, regular expressions, Lark and tags in its words, and its errors in ours."""
