"""Many runs of the scripts in one process of their own: what the libraries cost to import is paid once.

A process of its own is needed where the scripts talk to the stand-in for the Hub: the clients read its address when
they are imported. For runs that may influence each other by what the clients keep in memory, `Running` is better.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.runs import ROOT, SCRIPT, Ended, run_here

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FAKE_VLLM = ROOT / "tests" / "fake_vllm"


@dataclass(frozen=True)
class Words:
    """A command line, the script that it is for, and what is set in the environment beside."""

    words: Sequence[str | Path]
    script: Path = SCRIPT
    env: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it goes to the other process."""
        return {"words": list(map(str, self.words)), "script": str(self.script), "env": dict(self.env)}


def many_runs(runs: Sequence[Words], env: Mapping[str, str], timeout_s: float = 200.0) -> list[Ended]:
    """Run them one after the other in one new process; what they say and how they end."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.many_runs"],
        env=dict(env),
        cwd=ROOT,
        input=json.dumps([run.to_json() for run in runs]),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Ended(**ended) for ended in json.loads(done.stdout.splitlines()[-1])]


def with_fake_vllm(env: Mapping[str, str], server: str) -> dict[str, str]:
    """The environment in which lighton-ocr.py finds a `vllm` that has a server answer."""
    return {**env, "PYTHONPATH": str(FAKE_VLLM), "FAKE_VLLM_SERVER": server}


def main() -> None:
    ends = []
    own = dict(os.environ)
    for run in json.load(sys.stdin):
        os.environ.clear()
        os.environ.update(own | run["env"])
        ends.append(vars(run_here(*run["words"], script=Path(run["script"]))))
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
