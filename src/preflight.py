"""What is checked before any GPU time, so that a run which can't end well does not begin."""

from __future__ import annotations

from .blocks import BlockPlan, check_settings_are_ours
from .columns import check_columns
from .errors import UsageError, network_errors
from .job import Opened, Run, blocks_of, run_settings
from .publish import Output
from .quality import extra_columns
from .report import say
from .source import open_source

MOST_FILES_IN_A_FOLDER = 10_000


def preflight(run: Run) -> None:
    """Open the input and check the output before any GPU time; raise `UsageError` where the run could not end well."""
    options = run.options
    source = open_source(
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
    plan = BlockPlan(run.way.target(source.split), len(source.order), options.block_rows)
    check_columns(
        source.rows.schema,
        options.output_column,
        results_only=run.way.results_only,
        extras=extra_columns(options),
    )
    if not _only_looks(run):
        check_token(run.output)
    run.opened = Opened(source, plan, blocks_of(run, source, plan))
    settings = run_settings(run)
    if not options.overwrite:
        beyond = sorted(number for number in run.at.blocks.closed() if number >= len(plan))
        for stored in run.at.blocks.stored_settings():
            check_settings_are_ours(str(run.output), stored, settings)
        if beyond:
            raise UsageError(
                f"{run.at.blocks.where(beyond[0])} lies beyond this output's last block, {len(plan) - 1}; "
                "remove it, choose another output, or --overwrite"
            )
    if run.output.repo_id and len(plan) > MOST_FILES_IN_A_FOLDER:
        say(
            f"{len(plan)} block files are more than the Hub likes in a folder ({MOST_FILES_IN_A_FOLDER}); "
            f"--block-rows {-(-plan.num_rows // MOST_FILES_IN_A_FOLDER)} or more makes fewer"
        )
    say(f"{options.input}: {plan.num_rows} rows of split {source.split!r} → {run.output}")


def _only_looks(run: Run) -> bool:
    """Whether this is only a look at what a run would take, which needs no token."""
    from huggingface_hub import get_token

    return run.options.dry_run and get_token() is None


def check_token(output: Output) -> None:
    """Raise `UsageError` before any GPU time where there is no token that could publish the output."""
    if output.repo_id is None:
        return
    from huggingface_hub import HfApi

    try:
        user = HfApi().whoami()
    except network_errors() as error:
        raise UsageError(
            f"output {output.repo_id!r} needs a token that can write, and there is none that works: {error}. "
            "Set HF_TOKEN (in a job: -s HF_TOKEN), or `hf auth login`"
        ) from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UsageError(f"the token can only read; publishing to {output.repo_id!r} needs one that can write")
