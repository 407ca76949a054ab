"""Programs of the system that check what lies in serving/: prometheus, promtool, nginx, docker-compose.

A person's machine need not have them: their tests are skipped there, with what to install. `.ci/run` installs them and
sets ALL_TOOLS, so that a missing one fails.
"""

from __future__ import annotations

import os
import shutil

import pytest

# a program → the package of Debian that brings it
PACKAGES = {
    "curl": "curl",
    "docker-compose": "docker-compose",
    "nginx": "nginx-light",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}


def system_tool(name: str) -> str:
    """Find a program, in the folders of the administrator too; skip or fail the test where it is missing."""
    folders = [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found:
        return found
    reason = f"{name} is not installed: apt-get install --no-install-recommends {PACKAGES[name]}"
    if os.environ.get("ALL_TOOLS"):
        pytest.fail(f"{reason} (ALL_TOOLS is set, so this is no reason to skip)")
    pytest.skip(reason)
