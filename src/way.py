"""How a run goes about its blocks: which are its own, what is asked again, and when the rest of the world sees them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .blocks import DEFAULT_CONFIG, DEFAULT_FOLDER, WHOLE, Shard, Target
from .errors import UsageError
from .options import CommonOptions
from .report import say

COMMIT_EVERY_S = 600.0
SHARD_COMMITS_EVERY_S = 300.0  # times the number of shards: all of them together commit twelve times an hour
SPLIT_NAME = re.compile(r"\w+(\.\w+)*")  # as `datasets` has it
CONFIG_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]*")  # the name of a folder, and a part of a branch's name


@dataclass(frozen=True)
class Way:
    """How a run goes about its blocks.

    `finishes`: no page is asked about; all blocks have to be there. `split` and `config` are those of the output, where
    they are named. Blocks of a Hub output are committed every `commit_every_s` seconds.
    """

    shard: Shard = WHOLE
    commit_every_s: float = COMMIT_EVERY_S
    results_only: bool = False
    retry_failed: bool = False
    finishes: bool = False
    split: str | None = None
    config: str = DEFAULT_CONFIG

    def target(self, split: str) -> Target:
        """Return what is written of this split of the input."""
        return Target(self.split or split, self.config)


def way_of(options: CommonOptions, environment: Mapping[str, str]) -> Way:
    """Say how the run goes about its blocks. Raises `UsageError` where options exclude each other."""
    chosen = [flag for flag in ("overwrite", "retry_failed", "finish") if getattr(options, flag)]
    if len(chosen) > 1:
        flags = " and ".join(f"--{flag.replace('_', '-')}" for flag in chosen)
        raise UsageError(f"{flags} exclude each other; give one of them")
    shard = shard_of(options.num_shards, options.shard_index, environment)
    if options.overwrite and shard.count > 1:
        raise UsageError("--overwrite would remove the blocks of other shards; run it once without shards first")
    _check_name("--output-split", options.output_split, SPLIT_NAME)
    _check_name("--output-config", options.output_config, CONFIG_NAME)
    if options.output_config == DEFAULT_FOLDER:
        raise UsageError(
            f"--output-config {DEFAULT_FOLDER}: the default configuration lies in that folder; choose another name"
        )
    return Way(
        shard=shard,
        commit_every_s=commit_every_s(options.commit_minutes, shard),
        results_only=options.results_only,
        retry_failed=options.retry_failed,
        finishes=options.finish,
        split=options.output_split,
        config=options.output_config or DEFAULT_CONFIG,
    )


def commit_every_s(minutes: float | None, shard: Shard) -> float:
    """Return the seconds between two commits: as asked for, or so that all shards together make twelve an hour."""
    if minutes is not None:
        return 60 * minutes
    return max(COMMIT_EVERY_S, SHARD_COMMITS_EVERY_S * shard.count)


def _check_name(flag: str, name: str | None, allowed: re.Pattern[str]) -> None:
    if name is not None and not allowed.fullmatch(name):
        raise UsageError(
            f"{flag} {name!r} can't be the name of files on the Hub; use letters, digits, _ and . (a configuration: "
            "single - too)"
        )


def shard_of(count: int | None, index: int | None, environment: Mapping[str, str]) -> Shard:
    """Return this run's shard: as the options say, or a Slurm array; one alone where neither does."""
    if index is None and "SLURM_ARRAY_TASK_ID" in environment:
        count, index = _slurm_shard(count, environment)
        say(f"shard {index} of {count}, as the Slurm array says")
    if (count is None) != (index is None):
        raise UsageError("--num-shards and --shard-index go together; give both")
    shard = Shard(index or 0, count or 1)
    if shard.index >= shard.count:
        raise UsageError(f"--shard-index {shard.index} is not below --num-shards {shard.count}; shards count from 0")
    return shard


def _slurm_shard(count: int | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (shards, index) of a Slurm array's task.

    Where --num-shards is given the task's number is the index: so a few tasks of an array can be run again.
    """
    try:
        task = int(environment["SLURM_ARRAY_TASK_ID"])
        if count is not None:
            return count, task
        first = int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
        step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
        return int(environment["SLURM_ARRAY_TASK_COUNT"]), (task - first) // step
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"the variables of the Slurm array make no shard ({error!r}); give --num-shards and --shard-index"
        ) from error
