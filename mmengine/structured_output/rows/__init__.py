"""The rows of a batch: grammars are compiled once, and each row has a matcher that fills its mask."""
