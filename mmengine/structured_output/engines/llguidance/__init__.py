"""The llguidance grammar engine: translates grammars into llguidance's formats, and masks tokens with it."""
