"""Tests that the files in deploy/ use existing options, paths and limits, and equal the files in
docs/how-to/deploy.md.
"""

import re

import yaml
from typer.main import get_command

from mmengine.cli.main import app
from mmengine.server.settings import ServerSettings
from tests.project.doc_blocks import ROOT, blocks

DEPLOY = ROOT / "deploy"
OPTIONS = {name for each in get_command(app).commands["serve"].params for name in each.opts}
SETTINGS = ServerSettings()


def test_the_page_shows_the_manifest_and_it_names_options_that_exist():
    (shown,) = blocks("docs/how-to/deploy.md", "yaml")
    assert shown.text == (DEPLOY / "kubernetes" / "mmengine.yaml").read_text()
    claim, deployment, service = yaml.safe_load_all(shown.text)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > SETTINGS.drain_s
    flags = {word.partition("=")[0] for word in container["args"] if word.startswith("--")}
    assert flags and flags <= OPTIONS
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports["http"] == SETTINGS.port and f"--health-port={ports['health']}" in container["args"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"].startswith("/health/")
        assert container[probe]["httpGet"]["port"] in ports
    user = re.search(r"^USER (\d+)$", (DEPLOY / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == int(user[1])
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_the_page_shows_the_configuration_of_nginx_with_the_servers_limits():
    (shown,) = blocks("docs/how-to/deploy.md", "nginx")
    assert shown.text == (DEPLOY / "nginx" / "mmengine.conf").read_text()
    assert shown.text.count("{") == shown.text.count("}")
    sizes = [int(size) * 2**20 for size in re.findall(r"client_max_body_size (\d+)m;", shown.text)]
    assert sizes[0] == SETTINGS.max_body_bytes and sizes[1] > SETTINGS.max_file_bytes
    assert "proxy_buffering off;" in shown.text and f"127.0.0.1:{SETTINGS.port}" in shown.text


def test_the_container_is_run_with_volumes_that_its_file_declares():
    (shown,) = blocks("docs/how-to/deploy.md", "sh")
    declared = re.search(r"^VOLUME (.+)$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert set(re.findall(r"-v [\w-]+:(\S+)", shown.text)) == set(declared[1].split())
    assert set(re.findall(r"(?<=\s)(--(?:host|log))(?=\s)", shown.text)) <= OPTIONS
    (stop,) = map(int, re.findall(r"--stop-timeout (\d+)", shown.text))
    assert stop > SETTINGS.drain_s
