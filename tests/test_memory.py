"""Memory stays flat: it depends on the window, never on how many rows there are."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.pages import tiny, write_dataset
from tests.runs import SCRIPT, block_files
from tests.stub_vllm import StubVllm

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a run may take on between its first tenth and its end. Seen: 25 MiB at 10,000 rows, and no more at 100,000; a
# run that kept the pages or the results of 10,000 rows would take on more.
MOST_GROWTH_MIB = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[StubVllm]:
    with StubVllm("--max-num-seqs", "1000") as stub:
        yield stub
