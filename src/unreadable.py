"""Why an input can't be read, in words that list what there is and end with the next step."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Iterator

from .errors import UsageError, network_errors

CONFIG_ERRORS = ("Config name is missing", "BuilderConfig '")


def unreadable(
    name: str, error: Exception, *, repo_id: str | None, config: str | None, revision: str | None
) -> UsageError:
    """Return what to say where the Hub or `datasets` refuse an input; `repo_id` is its dataset on the Hub, if any."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    causes = list(_causes(error))
    # `datasets` drops the cause of this one
    if repo_id and (_has(causes, GatedRepoError) or "is a gated dataset" in str(error)):
        return UsageError(f"input {name!r} is gated{_how_to_be_let_in(repo_id)}")
    if repo_id and _has(causes, RevisionNotFoundError):
        return UsageError(
            f"input {name!r} has no revision {revision!r}; --revision takes a commit, or one of: {_revisions(repo_id)}"
        )
    if repo_id and _has(causes, RepositoryNotFoundError):
        return UsageError(f"input {name!r}: no such dataset on the Hub, or a private one{_how_to_see_it()}")
    if str(error).startswith(CONFIG_ERRORS) and (there := re.search(r"\[.*\]", str(error))):
        names = ", ".join(map(str, ast.literal_eval(there[0])))
        what = "which configuration? Name one" if config is None else f"no configuration {config!r}; choose one"
        return UsageError(f"input {name!r}: {what} with --config: {names}")
    cause = error.__cause__ or error  # `datasets` wraps what says most
    return UsageError(
        f"input {name!r} can't be read as a dataset: {type(cause).__name__}: {cause}; "
        "check the path, --config and --split"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _has(causes: Iterable[BaseException], kind: type[BaseException]) -> bool:
    return any(isinstance(cause, kind) for cause in causes)


def _how_to_be_let_in(repo_id: str) -> str:
    from huggingface_hub import HfApi

    page, asker = f"{HfApi().endpoint}/datasets/{repo_id}", _asker()
    if asker is None:
        return (
            f", and there is no token: ask for access at {page}, then set HF_TOKEN (in a job: -s HF_TOKEN) to a token "
            "of the account that was let in"
        )
    return (
        f", and {asker} was not let in, or has a token that may not read gated datasets: ask for access at {page}, or "
        "set HF_TOKEN to a token of the account that was let in"
    )


def _how_to_see_it() -> str:
    asker = _asker()
    if asker is None:
        return ", which nobody sees without a token: check the name, or set HF_TOKEN (in a job: -s HF_TOKEN)"
    return f" that {asker} can't see: check the name, and whose token HF_TOKEN is"


def _asker() -> str | None:
    """Name whose token it is that the Hub refuses; None where there is no token."""
    from huggingface_hub import HfApi, get_token

    if not get_token():
        return None
    with contextlib.suppress(*network_errors()):
        return repr(HfApi().whoami()["name"])
    return "the user of this token"


def _revisions(repo_id: str) -> str:
    from huggingface_hub import HfApi

    with contextlib.suppress(*network_errors()):
        refs = HfApi().list_repo_refs(repo_id, repo_type="dataset")
        return ", ".join(ref.name for ref in [*refs.branches, *refs.tags])
    return "main"
