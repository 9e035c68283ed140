"""Code points that mark positions in a rendered prompt. All are high surrogates, which user text never has.

Each purpose has its own marks, because several purposes can meet in one rendering. ChatTemplate uses the low
surrogates for special tokens.
"""

CUT = "\ud800"  # the end of the text to continue, for `continue_final_message`
PIECE_BEGIN, PIECE_END = "\ud801", "\ud802"  # around a piece of a session's turn
ANSWER = "\ud803"  # stands for the answer before a session's turn
ROLE_BEGIN, ROLE_END = "\ud804", "\ud805"  # around a message's role
