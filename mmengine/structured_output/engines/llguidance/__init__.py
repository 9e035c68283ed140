"""The llguidance engine: translates grammars into llguidance's formats, and its errors into ours."""
