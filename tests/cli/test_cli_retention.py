"""Tests the options that limit how much of the log is kept."""

import pytest

from mmengine.cli.run_options import Model
from mmengine.cli.serve_options import DEFAULT_LOG_BYTES
from mmengine.cli.settings import kept_of_log
from mmengine.config import EngineConfig
from mmengine.core.continuation import open_log
from mmengine.errors import ConfigError
from mmengine.events.log import LogReader
from mmengine.replay import verify
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request

DEFAULT = (f"log_retain_bytes={DEFAULT_LOG_BYTES}",)  # The default for mmengine serve.


def test_options_are_settings(tmp_path):
    kept = kept_of_log(tmp_path, 10**9, 1.5)
    config = Model().config(keeps_media=True, kept_of_log=kept, unless_set=DEFAULT)
    assert (config.log_retain_bytes, config.log_retain_s) == (10**9, 129_600)
    config = Model().config(keeps_media=True, kept_of_log=[], unless_set=DEFAULT)
    assert (config.log_retain_bytes, config.log_retain_s) == (16 * 2**30, 0)
    chosen = Model(setting=["log_retain_bytes=5"])
    config = chosen.config(keeps_media=True, kept_of_log=[], unless_set=DEFAULT)
    assert config.log_retain_bytes == 5, "--set overrides the default"
    assert Model().config(keeps_media=True, kept_of_log=kept_of_log(tmp_path, 0, None)).log_retain_bytes == 0


@pytest.mark.parametrize("days", [float("nan"), float("inf"), -1.0])
def test_invalid_days(tmp_path, days):
    with pytest.raises(ConfigError, match="--log-days is .*; it must be from 0 to 36500"):
        kept_of_log(tmp_path, None, days)


@pytest.mark.parametrize("words", [{"log_bytes": 5, "log_days": None}, {"log_bytes": None, "log_days": 1.0}])
def test_retention_needs_a_log(words):
    with pytest.raises(ConfigError, match="limits the log; give --log"):
        kept_of_log(None, **words)


def test_a_low_retention_gives_small_segments(tmp_path):
    """The writer deletes segments during the run. The log stays near its limit and still verifies."""
    values = {"max_num_seqs": 4, "max_model_len": 8192, "num_blocks": 2100, "encoder_cache_size": 64}
    config = EngineConfig(**values, token_budget=8192, log_retain_bytes=4 * 2**20)
    opened = open_log(tmp_path / "log", None, config, pack_full=False)
    core = opened.core(config, SimulatedExecutor(config), {})
    largest = 0
    for number in range(600):
        core.submit(request(f"r{number}", 8000, max_tokens=2))
        while core.has_work:
            for output in core.step():
                if output.finish_reason is not None:
                    core.delivered(output.request_id)
        core.sink._tidy_at = 0.0
        core.tidy()
        if number % 50 == 0:
            largest = max(largest, sum(path.stat().st_size for path in (tmp_path / "log").glob("*.mm*")))
    core.close()
    assert LogReader(tmp_path / "log").first_sequence > 0 and verify(tmp_path / "log").ok
    assert largest < 8 * 2**20 < 600 * 8000 * 4
