"""The llguidance grammar engine: translates grammars to llguidance's formats, and computes token masks."""
