"""Fixtures around the real vLLM on CPU, shared by all tests marked `engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import vllm_cpu

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD_AND_START_TIMEOUT_S = 1800  # the first engine test pays for a download of 2 GB and a start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the engine's tests the time that building and starting it may take."""
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(BUILD_AND_START_TIMEOUT_S))


@pytest.fixture(scope="session")
def cpu_engine() -> vllm_cpu.CpuVllm:
    """vLLM for CPU, built when missing; skips where it can't be."""
    try:
        return vllm_cpu.cpu_vllm()
    except vllm_cpu.NoCpuEngineError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def vllm_server(
    cpu_engine: vllm_cpu.CpuVllm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[vllm_cpu.TinyServer]:
    """One `vllm serve` of the tiny LightOnOCR for the whole session."""
    with vllm_cpu.serve_tiny(tmp_path_factory.mktemp("vllm") / "serve.log") as server:
        yield server
