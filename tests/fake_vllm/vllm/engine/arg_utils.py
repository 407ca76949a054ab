"""The engine's arguments: those that the profiles and the scripts' options set."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any


@dataclasses.dataclass
class EngineArgs:
    """What the engine is started with."""

    revision: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    limit_mm_per_prompt: dict[str, int] = dataclasses.field(default_factory=dict)
    mm_processor_cache_gb: float = 4.0
    enable_prefix_caching: bool = True

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add them to a parser."""
        options: dict[str, Any] = {"--revision": str, "--max-model-len": int, "--gpu-memory-utilization": float}
        for flag, kind in (options | {"--limit-mm-per-prompt": json.loads, "--mm-processor-cache-gb": float}).items():
            parser.add_argument(flag, type=kind)
        parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
        return parser
