"""Computes a row in the table of architectures. Each cell shows the result from a test in the plugin
contract.
"""

import inspect
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import _pytest.outcomes
import transformers
from transformers import ProcessorMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from mmengine.errors import MMEngineError, in_one_line
from mmengine.models.registry import load_plugins
from mmengine_transformers.classes import text_config, why_never, why_not
from tests.any_model.exceptions import REASONS
from tests.any_model.hosted_contract import HostedContract, contract_of
from tests.any_model.shrunk import NoSmallModel, check_empty, run_shrunk, typical_config

# Table column -> (name of the contract's test, the test's parameter).
CHECKS: dict[str, tuple[str, str]] = {
    "prompts": ("test_prompts_are_transformers", ""),
    "log-probabilities": ("test_log_probabilities_are_transformers", "beside others"),
    "log-probabilities in chunks": ("test_log_probabilities_are_transformers", "in chunks"),
    "alone": ("test_tokens_are_transformers", "one by one"),
    "batched": ("test_tokens_are_transformers", "beside others"),
    "chunked": ("test_tokens_are_transformers", "in chunks"),
    "cached": ("test_tokens_are_transformers", "from the cache"),
    "preempted": ("test_tokens_are_transformers", "preempted"),
    "drafted": ("test_tokens_are_transformers", "drafted"),
    "killed": ("test_a_killed_process_continues_with_the_same_tokens", ""),
    "decoding processes": ("test_images_are_decoded_in_processes", ""),
    "any order": ("test_images_come_in_any_order", ""),
    "too long": ("test_an_item_above_the_token_budget_is_refused", ""),
    "bfloat16": ("test_bfloat16_chooses_what_is_likeliest_but_for_near_ties", ""),
}
# Columns in the table of videos.
VIDEO_CHECKS: dict[str, tuple[str, str]] = {
    "video prompts": ("test_video_prompts_are_transformers", ""),
    "video files": ("test_frames_of_files_are_chosen_as_transformers_does", ""),
    "video log-probabilities": ("test_video_log_probabilities_are_transformers", "beside others"),
    "video log-probabilities in chunks": ("test_video_log_probabilities_are_transformers", "in chunks"),
    "videos batched": ("test_video_tokens_are_transformers", "beside others"),
    "videos chunked": ("test_video_tokens_are_transformers", "in chunks"),
    "videos cached": ("test_video_tokens_are_transformers", "from the cache"),
    "videos preempted": ("test_video_tokens_are_transformers", "preempted"),
    "videos drafted": ("test_video_tokens_are_transformers", "drafted"),
    "videos killed": ("test_a_killed_process_continues_with_videos", ""),
    "video decoding processes": ("test_videos_are_decoded_in_processes", ""),
}
ALL_CHECKS = CHECKS | VIDEO_CHECKS
GOOD = frozenset({"equal", "-"})
WORKS, REFUSED, BROKEN, DESCRIBED, UNKNOWN = "works", "refused", "broken", "described", "not checked"

NO_PROCESSOR = "it takes media, and the contract has no checkpoint with a processor for it"


class Row(NamedTuple):
    """A row in the table: an architecture's verdict. `cells`: each check's result; {} if no checkpoint was
    run.
    """

    architecture: str
    kind: str
    verdict: str
    reason: str
    cells: dict[str, str]


def run_factory(kind: str, checks: Collection[str] = ALL_CHECKS) -> Row:
    """Return the row of an architecture with a factory (catalogue.py). Runs only `checks`."""
    suite = contract_of(kind)()
    with tempfile.TemporaryDirectory() as place:
        made = suite._make(Path(place) / "model")
        type(suite)._made = made
        name = type(made.reference).__name__
        cells = {}
        for check, (test, parameter) in ALL_CHECKS.items():
            if check not in checks:
                continue
            folder = Path(place) / check.replace(" ", "_")
            folder.mkdir()
            cells[check] = _cell(suite, getattr(suite, test), parameter, folder)
    good = all(cell in GOOD for cell in cells.values())
    return Row(name, kind, WORKS if good else BROKEN, REASONS.get(kind, ""), cells)


def _cell(suite: HostedContract, test: Callable | None, parameter: str, folder: Path) -> str:
    """Return "equal" if the test passes, "-" if it does not apply, or a text about the failure."""
    if test is None:
        return "-"
    made = type(suite)._made
    given = {"made": made, "tmp_path": folder, "name": parameter}
    taken = set(inspect.signature(test).parameters)
    if "processor" in taken:
        given["processor"] = suite.plugin.load_processor(made.folder)
    try:
        test(**{name: value for name, value in given.items() if name in taken})
    except _pytest.outcomes.Skipped:
        return "-"
    except AssertionError as error:
        return f"differs: {in_one_line(error, 100)}" if str(error) else "differs"
    except MMEngineError as error:
        return f"fails: {error.text[:160]}"
    except Exception as error:  # The table tells what broke.
        return f"fails: {in_one_line(error, 160)}"
    return "equal"


def _is_silent(kind: str) -> bool:
    """Return whether the architecture's processor does not tell which text stands for an image. The plugin
    refuses such an architecture when the processor is loaded.
    """
    found = getattr(transformers, str(PROCESSOR_MAPPING_NAMES.get(kind)), None)
    return found is not None and found.replace_image_token is ProcessorMixin.replace_image_token


def run_class(name: str, kind: str) -> Row:
    """Return the row of an architecture without a factory, from transformers' default config. A text model
    runs with small sizes; a model with media is only checked, without weights.
    """
    if name in load_plugins():
        return Row(name, kind, DESCRIBED, "", {})
    found = getattr(transformers, name, None)
    if found is None:
        return Row(name, kind, REFUSED, "this transformers has no such class", {})
    if reason := why_never(found):
        return Row(name, kind, REFUSED, reason, {})
    if isinstance(own := getattr(found.config_class, "model_type", None), str) and own in CONFIG_MAPPING:
        kind = own  # A text model's config class may have another model type than the whole model.
    try:
        config = typical_config(kind)
        reason = why_not(found, config)
    except Exception as error:  # A default config may be incomplete.
        return Row(name, kind, UNKNOWN, f"no default config: {type(error).__name__}", {})
    if reason:
        return Row(name, kind, REFUSED, reason, {})
    if _is_silent(kind):
        return Row(name, kind, REFUSED, "its processor does not tell which text stands for an image", {})
    try:
        if text_config(config) is not config or "vision_config" in config.sub_configs:
            reason = check_empty(found, config)
            return Row(name, kind, REFUSED if reason else UNKNOWN, reason or NO_PROCESSOR, {})
        return Row(name, kind, *run_shrunk(found, kind), {})
    except NoSmallModel as error:
        return Row(name, kind, UNKNOWN, f"no small model: {error}", {})
