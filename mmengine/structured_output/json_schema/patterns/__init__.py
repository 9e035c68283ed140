"""Read ECMA-262 patterns and rewrite them so that every grammar engine reads them alike."""
