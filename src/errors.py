"""The errors that end a run, and the exit code of each."""

from __future__ import annotations


class JobError(Exception):
    """Something that ends the run: the message says what, the value seen, and the next step."""

    exit_code = 1


class UsageError(JobError):
    """The command line, the input or the output does not fit: nothing was asked and nothing was written."""

    exit_code = 2


class EngineError(JobError):
    """The engine can't be started, can't be reached, refuses us, or serves something else. Closed blocks are kept."""


class SourceError(JobError):
    """The input stopped being readable in mid-run. Closed blocks are kept."""


class PublishError(JobError):
    """The blocks are all there, but the output could not be published. The same command publishes them."""


class SubmitError(JobError):
    """Not all jobs could be submitted. Those that were run on; the same command submits the rest."""


def network_errors() -> tuple[type[Exception], ...]:
    """Return what calls to the Hub raise where the network or the Hub fails: httpx's own errors are no `OSError`."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    return (OSError, httpx.HTTPError)
