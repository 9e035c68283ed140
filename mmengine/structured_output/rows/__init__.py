"""The grammars for a batch's rows. A grammar is compiled once, and each row has a matcher for its masks."""
