"""The ground under all tests: no network, no token, and nothing in the home of who runs them."""

from __future__ import annotations

import os
import tempfile

pytest_plugins = ["tests.engine_fixtures"]

# Read by the libraries when they are imported, so it must stand before any test module is.
_home = tempfile.TemporaryDirectory(prefix="lighton-ocr-tests-")
for _name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "VLLM_API_KEY", "ACCELERATOR"):
    os.environ.pop(_name, None)
os.environ |= {
    "HF_HOME": _home.name,
    "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there: a test of the Hub brings its own
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
}


def pytest_unconfigure() -> None:
    _home.cleanup()
