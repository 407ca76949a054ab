"""The stand-in for the Hub, for runs and clients in this process: without the seconds that a process takes to start."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.hub_server import HubServer
from tests.hub_state import WRITE_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest


@contextlib.contextmanager
def hub_here(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[HubServer]:
    """Run a stand-in that the clients in this process take for the Hub; on leaving, it must know all they asked."""
    with HubServer() as hub:
        point_clients_at(hub, monkeypatch)
        be_on_machine(monkeypatch, home)
        yield hub
        assert not hub.unknown


def point_clients_at(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the clients in this process, which read HF_ENDPOINT when they were imported, talk to this Hub."""
    import datasets  # noqa: F401 - it is to be patched, too

    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    forget_files()


def be_on_machine(monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """Be on a machine of its own: with other caches and another staging folder. Return the latter's parent."""
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", home / "datasets")
    forget_files()
    return home / "cache" / "lighton-ocr"


def forget_files() -> None:
    """Forget what the filesystem of the Hub has listed in this process, as a new process would."""
    from huggingface_hub import HfFileSystem

    HfFileSystem.clear_instance_cache()
