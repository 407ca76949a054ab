"""The sampling parameters that are objects."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class RepetitionDetectionParams:
    """When a text counts as a loop."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0
