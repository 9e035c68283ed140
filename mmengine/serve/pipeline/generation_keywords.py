"""Lists transformers' generation keywords: supported (TAKEN), without effect, or refused."""

from collections.abc import Mapping
from typing import Any

Keywords = Mapping[str, Any]  # keyword arguments of a call or of the constructor, by name

# Keywords that have no effect without do_sample.
WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
FILTERS = ("epsilon_cutoff", "eta_cutoff", "top_h")
TAKEN = frozenset(
    {
        "bad_words_ids",
        "do_sample",
        "eos_token_id",
        "generation_config",
        "logprobs",
        "max_length",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "no_repeat_ngram_size",
        "num_return_sequences",
        "repetition_penalty",
        "seed",
        "sequence_bias",
        "stop_strings",
        "streamer",
        "suppress_tokens",
        *WHEN_SAMPLING,
    }
)
# Keywords without effect. They tune refused features (beam search, assistants) or transformers'
# implementation, or request values that are never returned.
CHANGES_NOTHING = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "decoder_start_token_id",
        "disable_compile",
        "diversity_penalty",
        "early_stopping",
        "forced_bos_token_id",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",
        "renormalize_logits",
        "return_dict_in_generate",
        "synced_gpus",
        "target_lookbehind",
        "tokenizer",
        "transformers_version",
        "use_cache",
        "use_model_defaults",
    }
)
_FORM = "set the answer's format with response_format= or grammar="
_BEAMS = "for several answers give do_sample=True and num_return_sequences"
_BIAS = "use repetition_penalty, no_repeat_ngram_size or sequence_bias"
_DRAFTS = "drafts are a setting of the engine (docs/explanation/speculation.md)"
_FILTERS = "use top_p, min_p or typical_p"
# For each keyword: accepted values without effect, and advice for other values.
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "assistant_model": ((), _DRAFTS),
    "assistant_tokenizer": ((), _DRAFTS),
    "begin_suppress_tokens": (([],), "use suppress_tokens, which hold for the whole answer"),
    "constraints": ((), _FORM),
    "custom_generate": ((), "register a policy or a drafter of your own (docs/explanation/architecture.md)"),
    "dola_layers": ((), "it decodes as the model was trained to"),
    "encoder_no_repeat_ngram_size": ((0,), "use no_repeat_ngram_size, which counts the prompt too"),
    "encoder_repetition_penalty": ((1.0,), "use repetition_penalty, which counts the prompt too"),
    "epsilon_cutoff": ((0.0,), _FILTERS),
    "eta_cutoff": ((0.0,), _FILTERS),
    "exponential_decay_length_penalty": ((), "use max_new_tokens, or a sequence_bias of the end of sequence"),
    "force_words_ids": ((), _FORM),
    "forced_eos_token_id": ((), "append the token to an answer that was cut"),
    "guidance_scale": ((1.0, 1), "say in the prompt what is not wanted"),
    "logits_processor": (([], ()), f"{_BIAS}; {_FORM}"),
    "negative_prompt_ids": ((), "say in the prompt what is not wanted"),
    "num_beam_groups": ((1,), _BEAMS),
    "num_beams": ((1,), _BEAMS),
    "penalty_alpha": ((0.0,), f"contrastive search is not supported; {_FILTERS}"),
    "prefix_allowed_tokens_fn": ((), _FORM),
    "stopping_criteria": (([], ()), "use stop_strings, eos_token_id, max_new_tokens or max_time"),
    "token_healing": ((False,), "end the prompt at the end of a word"),
    "top_h": ((), _FILTERS),
    "watermarking_config": ((), "mark the text when it is shown"),
}
