"""Tests the Ray Serve config and the Dockerfile in deploy/, and the autoscaling of replicas."""

import re
from pathlib import Path

import msgspec
import yaml

from mmengine_ray.scaling import wanted_replicas
from mmengine_ray.settings import RaySettings

DEPLOY = Path(__file__).parents[2] / "deploy"
KNOWN = {
    *(
        "FROM",
        "WORKDIR",
        "RUN",
        "COPY",
        "ARG",
        "ENV",
        "USER",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "STOPSIGNAL",
    ),
    *("ENTRYPOINT", "CMD"),
}


def test_serves_config_is_one_of_ours():
    # The file has only known keys, and its arguments are valid RaySettings.
    config = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())
    assert set(config) == {"proxy_location", "http_options", "applications"}
    (application,) = config["applications"]
    assert set(application) == {"name", "route_prefix", "import_path", "args"}
    assert application["import_path"] == "mmengine_ray:app_of"
    settings = RaySettings.of(application["args"])
    assert settings.replicas == 4 and settings.engine.batch_invariant
    assert RaySettings.decoded(settings.encoded()) == settings


def instructions(text):
    """Return a Dockerfile's instructions, each on a single line, without comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [re.sub(r"\s+", " ", line).strip() for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def test_the_container_file_is_one():
    """The Dockerfile has known instructions, copies existing files, and does not run as root."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    found = [line.split(" ", 1) for line in instructions(text)]
    assert {name for name, _ in found} <= KNOWN and found[0][0] == "FROM"
    stages = [rest.split(" AS ")[-1] for name, rest in found if name == "FROM" and " AS " in rest]
    root = DEPLOY.parent
    for name, rest in found:
        if name == "COPY" and "--from=" in rest:
            assert re.match(r"--from=(\w+)", rest)[1] in stages
        elif name == "COPY":
            assert all((root / path).exists() for path in rest.split(" ")[:-1]), rest
        elif name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in msgspec.json.decode(rest))
        elif name == "RUN":
            assert "apt-get install" not in rest or (
                "--no-install-recommends" in rest and "rm -rf /var/lib/apt" in rest
            )
            assert "pip install" not in rest or "--no-cache-dir" in rest
        elif name == "FROM":
            assert ":" in rest, "an image without a tag may change"
    last = dict(found)
    assert last["USER"] not in ("root", "0")
    assert last["ENTRYPOINT"] == '["mmengine"]'


def test_replicas_are_wanted_by_the_tokens_that_wait():
    assert wanted_replicas(0, 0, 1, 1000, 64) == 1
    assert wanted_replicas(900, 10, 1, 1000, 64) == 1
    assert wanted_replicas(3500, 10, 1, 1000, 64) == 4
    assert wanted_replicas(0, 10, 4, 1000, 64) == 3
    assert wanted_replicas(0, 200, 4, 1000, 64) == 4, "the others have no room"
    assert wanted_replicas(10, 0, 4, 1000, 64) == 4, "something waits"
