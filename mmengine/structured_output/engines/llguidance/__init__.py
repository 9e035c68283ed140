"""The llguidance grammar engine: translates grammars into llguidance's formats, and computes token masks with
llguidance.
"""
