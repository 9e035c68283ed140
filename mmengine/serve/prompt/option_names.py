"""Advice on sampling options that other libraries have, or that are misspelt."""

from collections.abc import Iterable
from difflib import get_close_matches

_IMAGES = "put the media into a message: {'type': 'image', 'image': path}"
_STRINGS = "use stop"
_MAX = "use max_tokens"
# Option names in transformers, in vLLM, and in OpenAI's and llama.cpp's APIs.
FOREIGN = {
    "max_new_tokens": _MAX,
    "max_completion_tokens": _MAX,
    "max_output_tokens": _MAX,
    "max_length": "use max_tokens, which counts only the answer's tokens",
    "n_predict": _MAX,
    "min_new_tokens": "use min_tokens",
    "do_sample": "use temperature; 0 is greedy",
    "num_return_sequences": "use n",
    "best_of": "use n",
    "num_beams": "there is no beam search; leave it out",
    "use_beam_search": "there is no beam search; leave it out",
    "repeat_penalty": "use repetition_penalty",
    "typical": "use typical_p",
    "stop_strings": _STRINGS,
    "stop_sequences": _STRINGS,
    "eos_token_id": "use stop_token_ids",
    "sampling_params": "give its fields as keyword arguments, such as max_tokens=64",
    "generation_config": "give its fields as keyword arguments, such as max_tokens=64",
    "images": _IMAGES,
    "image": _IMAGES,
    "videos": _IMAGES.replace("image", "video"),
    "multi_modal_data": _IMAGES,
    "messages": "give the messages as the prompt",
    "use_tqdm": "there is no progress bar; leave it out",
    "stream": "use AsyncEngine.stream, or stream_chat",
    "lora_request": "use adapter, with the name of a loaded adapter",
    "tools": "use Engine.chat",
}


def advice_for_option(name: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown sampling option, or all known names."""
    if name in FOREIGN:
        return FOREIGN[name]
    names = sorted(known)
    near = get_close_matches(name[:64], names, 1, 0.7)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
