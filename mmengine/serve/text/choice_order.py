"""Interleaves the outputs of a request's choices in generation order."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from mmengine.serve.text.request_output import RequestOutput, split_output


def in_order(choices: Sequence[RequestOutput], order: bytes) -> list[RequestOutput]:
    """Return outputs with the tokens of `choices`, in the order in which the tokens were generated.

    `choices`: for each choice, an output with all its tokens. Its text is empty, because readers of a stream
    decode the tokens. `order`: for each generated token, the choice's index in `choices`, as a byte. Tokens
    beyond `order` come last. The last output gets the last choice's field `completion`.
    """
    if len(choices) == 1 or not order:
        return [piece for choice in choices for piece in split_output(choice)]
    places = np.frombuffer(order, np.uint8)
    starts = np.flatnonzero(np.diff(places, prepend=255)).tolist()
    runs = [(int(places[at]), end - at) for at, end in pairwise([*starts, len(places)])]
    runs += [(place, len(choice.token_ids)) for place, choice in enumerate(choices)]
    taken, ended, pieces = [0] * len(choices), set[int](), list[RequestOutput]()
    for place, length in runs:
        choice, at = choices[place], taken[place]
        end = taken[place] = min(at + length, len(choice.token_ids))
        is_last = end == len(choice.token_ids)
        if at == end and (place in ended or choice.finish_reason is None):
            continue
        piece = msgspec.structs.replace(
            choice,
            token_ids=choice.token_ids[at:end],
            logprobs=None if choice.logprobs is None else choice.logprobs[at:end],
            confidences=None if choice.confidences is None else choice.confidences[at:end],
            completion=None,
            prompt_scores=None if at else choice.prompt_scores,
        )
        if is_last:
            ended.add(place)
        else:
            piece = msgspec.structs.replace(piece, finish_reason=None, detail="", code=None)
        pieces += split_output(piece)
    if pieces and choices[-1].completion is not None:
        pieces[-1] = msgspec.structs.replace(pieces[-1], completion=choices[-1].completion)
    return pieces
