"""Integers in English words, as in the text before a video."""

_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen")
_BELOW_TWENTY = (*_ONES, *_TEENS, "eighteen", "nineteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Return the words for 0 to 999,999: "twenty-one", "one hundred and five", "two thousand, three hundred
    and ten".
    """
    if number < 20:
        return _BELOW_TWENTY[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    size, unit = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    head = f"{in_words(count)} {unit}"
    if not rest:
        return head
    return head + (", " if rest >= 100 else " and ") + in_words(rest)
