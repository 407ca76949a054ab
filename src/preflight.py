"""What is checked before any GPU time, so that a run which can't end well does not begin.

The checks, in order, from the cheapest: the token, the input, its columns, what is in the output, the disk. None of
them creates anything: a name with a typo leaves no empty dataset behind.
"""

from __future__ import annotations

from .block_files import check_settings_are_ours
from .blocks import BlockFolder, BlockPlan, Shard
from .columns import check_columns
from .errors import UsageError, network_errors
from .job import Opened, Run, blocks_of, run_settings
from .patience import Patience
from .quality import extra_columns
from .report import say
from .rights import rights_of
from .room import STAGED_BLOCKS, bytes_of_row, check_room
from .source import Source, open_source

ASK_FOR_S = 30.0
MOST_FILES_IN_A_FOLDER = 10_000


def preflight(run: Run) -> None:
    """Open the input and check the output before any GPU time; raise `UsageError` where the run could not end well."""
    if run.output.on_hub and not _only_looks(run):
        is_bucket = run.output.bucket is not None
        check_token(run.output.on_hub, create_pr=run.output.create_pr, proposable=not is_bucket)
    source = _open_input(run)
    check_columns(
        source.rows.schema,
        run.options.output_column,
        results_only=run.way.results_only,
        extras=extra_columns(run.options),
    )
    plan = BlockPlan(run.way.target(source.split), len(source.order), run.options.block_rows)
    run.opened = Opened(source, plan, blocks_of(run, source, plan))
    if not run.options.overwrite:
        check_output_is_ours(run)
    if run.options.jobs is None:  # which are written elsewhere
        check_disk(run)
    if run.output.on_hub and len(plan) > MOST_FILES_IN_A_FOLDER:
        say(
            f"{len(plan)} block files are more than the Hub likes in a folder ({MOST_FILES_IN_A_FOLDER}); "
            f"--block-rows {-(-plan.num_rows // MOST_FILES_IN_A_FOLDER)} or more makes fewer"
        )
    say(f"{run.options.input}: {plan.num_rows} rows of split {source.split!r} → {run.output}")


def _only_looks(run: Run) -> bool:
    """Whether this is only a look at what a run would take, which needs no token."""
    from huggingface_hub import get_token

    return run.options.dry_run and get_token() is None


def _open_input(run: Run) -> Source:
    options = run.options
    return open_source(
        options.input,
        config=options.config,
        split=options.split,
        revision=options.revision,
        image_column=options.image_column,
        max_samples=options.max_samples,
        shuffle=options.shuffle,
        seed=options.seed,
        streaming=run.streams,
    )


def check_token(repo_id: str, *, create_pr: bool = False, proposable: bool = True) -> None:
    """Raise `UsageError` where there is no token that may write to the output, or propose changes to it.

    To a bucket no changes can be proposed.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(f"output {repo_id!r} can't be the name of a dataset: {error}") from error
    if not get_token():
        raise UsageError(
            f"output {repo_id!r} needs a token that can write, and there is none. "
            "Set HF_TOKEN (in a job: -s HF_TOKEN), or `hf auth login`"
        )
    try:
        user = Patience(ASK_FOR_S).call(HfApi().whoami, "asking the Hub whose the token is")
    except network_errors() as error:
        raise UsageError(
            f"output {repo_id!r} needs a token that can write, and this one is of no use: {error}; "
            "set HF_TOKEN (in a job: -s HF_TOKEN), or `hf auth login`"
        ) from error
    rights = rights_of(user, repo_id)
    if not (rights.proposes if create_pr else rights.writes):
        otherwise = ", or open a pull request with --create-pr" if rights.proposes and proposable else ""
        raise UsageError(f"output {repo_id!r}: {rights.lacks}; {rights.advice}{otherwise}")


def check_output_is_ours(run: Run) -> None:
    """Raise `UsageError` where the output holds blocks that are not of this run."""
    settings, plan, blocks = run_settings(run), run.at.plan, run.at.blocks
    beyond = sorted(number for number in blocks.closed() if number >= len(plan))
    for stored in blocks.stored_settings():
        check_settings_are_ours(str(run.output), stored, settings)
    if beyond:
        raise UsageError(
            f"{blocks.where(beyond[0])} lies beyond this output's last block, {len(plan) - 1}; "
            "remove it, choose another output, or --overwrite"
        )


def check_disk(run: Run) -> None:
    """Raise `UsageError` where what is missing of the output does not fit on its disk: of a Hub output, what waits."""
    source, plan, blocks = run.at.source, run.at.plan, run.at.blocks
    row_bytes = bytes_of_row(source, source.image_column if run.way.results_only else None)
    if row_bytes is None or run.way.finishes:
        return
    closed = blocks.closed()
    rows = rows_missing(plan, run.way.shard, set() if run.options.overwrite else closed)
    if isinstance(blocks, BlockFolder):
        freed = sum(blocks.path(number).stat().st_size for number in closed) if run.options.overwrite else 0
        check_room(run.output.folder, rows, row_bytes, "name an output on another disk", freed)
    else:
        staged = min(rows, STAGED_BLOCKS * plan.block_rows)
        advice = "give a folder on another disk with --work-dir, or fewer rows a block with --block-rows"
        check_room(run.output.folder, staged, row_bytes, advice)


def rows_missing(plan: BlockPlan, shard: Shard, closed: set[int]) -> int:
    """Return how many rows a shard has yet to write."""
    missing = (number for number in range(len(plan)) if shard.holds(number) and number not in closed)
    return sum(len(plan.positions(number)) for number in missing)
