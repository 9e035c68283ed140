"""Tests the background thread that syncs the log."""

import threading

from mmengine.serve.requests import log_sync


def test_an_idle_log_is_tidied(monkeypatch):
    """Without commits, the thread calls `tidy` and not `sync`."""
    monkeypatch.setattr(log_sync, "IDLE_S", 0.001)
    tidied, synced = threading.Semaphore(0), threading.Event()
    syncer = log_sync.LogSyncer(synced.set, tidied.release)
    assert all(tidied.acquire(timeout=10) for _ in range(3)) and not synced.is_set()
    syncer.notify()
    assert synced.wait(10)
    syncer.close()
