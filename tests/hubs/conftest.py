"""Fixtures that point the clients of both hubs at a fake hub."""

import time

import pytest
from huggingface_hub import constants

from mmengine.hubs.names import HubName
from tests.hubs.fake_hub import REPO, FakeHub, running


@pytest.fixture(params=["hf", "modelscope"])
def name(request, tmp_path, monkeypatch):
    modelscope_hub = pytest.importorskip("modelscope_hub")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MMENGINE_HUB", raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    control = modelscope_hub._download_control._DownloadControl
    monkeypatch.setattr(control, "sleep", lambda self, seconds: None)
    return HubName(request.param, REPO)


@pytest.fixture
def empty_hub(name, tmp_path, monkeypatch):
    with running(FakeHub({"main": {}})) as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        # The client stores only whole chunks, so chunks must be small for a test of resuming.
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
        monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
        yield hub
