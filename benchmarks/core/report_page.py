"""Measures frame times of a long log's report page in headless Chromium, on one core without a GPU.

    python -m benchmarks report_page [STEPS]

The simulated run has at least STEPS steps (default 100,000). The program prints the frame times with all
steps in view, and while zooming, panning and scrubbing.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

from mmengine.config import EngineConfig  # noqa: E402
from mmengine.events.log import LogWriter  # noqa: E402
from mmengine.replay.report import write_report  # noqa: E402
from mmengine.simulation import Driver, Settings, SimRequest, Workload  # noqa: E402
from mmengine.simulation.simulated_executor import CostModel  # noqa: E402
from mmengine.simulation.workload import generated_tokens, image_item  # noqa: E402
from tests.replay.browser import Browser, chromium  # noqa: E402

STEPS_A_REQUEST = 21  # steps per request with the load below
CONFIG = EngineConfig(
    max_num_seqs=16,
    token_budget=256,
    max_model_len=1024,
    num_blocks=161,
    encoder_budget=512,
    encoder_cache_size=4096,
)
MEASURE = """(() => {
  const { view, draw, choose } = mmengineReport, times = [];
  view.showAll();
  %s
  for (let i = 0; i < 200; i++) {
    const begin = performance.now();
    %s
    draw();
    times.push(performance.now() - begin);
  }
  times.sort((a, b) => a - b);
  return [times[100], times[197], times[199]];
})()"""
VIEWS = {
    "all steps in view": ("", ""),
    "zooming in to a hundred": ("", "view.zoom(0.965, 500);"),
    "panning, 2,000 in view": ("view.zoom(2000 / view.data.numSteps, 0);", "view.pan(-300, 0);"),
    "scrubbing, with the panel": ("", "choose(Math.floor(i * view.data.numSteps / 200));"),
}


def write_log(folder: Path, num_steps: int) -> None:
    rng, requests, now = random.Random(1), [], 0
    for number in range(num_steps // STEPS_A_REQUEST):
        now += int(rng.expovariate(1 / 95e6))
        media = (image_item(48, 64 + 16 * (number % 12), f"image {number % 200}"),) if number % 3 else ()
        length = (media[0].end if media else 48) + rng.randint(16, 320)

        def prompt(number=number, length=length):
            return generated_tokens(f"prompt {number}", 0, length)

        requests.append(SimRequest(f"req-{number:05d}", length, prompt, rng.randint(8, 240), now, media))
    log = LogWriter(folder)
    Driver(Workload("long", requests, timed=True), Settings(CONFIG, CostModel(6_000_000)), log=log).run()
    log.close()


def main(num_steps: int) -> None:
    if chromium() is None:
        sys.exit("chromium is not installed (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder) / "log", Path(folder) / "page.html"
        write_log(log, num_steps)
        begin = time.perf_counter()
        steps, requests = write_report(log, page)
        seconds = time.perf_counter() - begin
        size = page.stat().st_size / 1e6
        print(f"{steps} steps, {requests} requests: page of {size:.1f} MB in {seconds:.1f} s")
        browser = Browser()
        try:
            begin = time.perf_counter()
            browser.open(page)
            print(f"opened in {time.perf_counter() - begin:.2f} s")
            print(f"{'ms a frame':<28}{'p50':>8}{'p99':>8}{'most':>8}")
            for name, (before, each) in VIEWS.items():
                times = browser.run(MEASURE % (before, each))
                print(f"{name:<28}" + "".join(f"{value:>8.1f}" for value in times))
        finally:
            browser.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
