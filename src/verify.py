"""What was published, looked at as a reader does: the files, their features, and a row of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .blocks import Whole
from .errors import PublishError, network_errors
from .patience import Patience
from .publish import Published, blocks_at
from .work_ref import Destination

if TYPE_CHECKING:
    import datasets

VERIFY_RETRY_S = 120.0


def verify(
    place: Destination, published: Published, whole: Whole, first_rows: Sequence[Mapping[str, Any]], kept: str
) -> None:
    """Raise `PublishError` where a reader of the published revision would not find what is expected."""

    def other_blocks() -> list[int]:
        there = {number: block.oid for number, block in blocks_at(place, published.commit).items()}
        return numbers_that_differ(published.oids, there)

    load = {"path": place.repo_id, "revision": published.commit}
    check_as_reader(str(place), load, other_blocks, whole, first_rows, kept)


def check_as_reader(
    name: str,
    load: Mapping[str, Any],
    other_blocks: Callable[[], Sequence[int]],
    whole: Whole,
    first_rows: Sequence[Mapping[str, Any]],
    kept: str,
) -> None:
    """Raise `PublishError` where a reader, who loads it by `load`, would not find what is expected.

    `other_blocks` are those whose files are not as they were written; `first_rows` has the text columns of the first
    row, as it was written, and nothing where there is no row.
    """
    target = whole.plan.target

    def look() -> list[str]:
        others = [f"{target.block_name(number)} is missing, another, or too many" for number in other_blocks()[:5]]
        return [*others, *_other_features_and_rows(load, whole, first_rows)]

    try:
        differences = Patience(VERIFY_RETRY_S).call(look, f"looking at what is in {name}")
    except network_errors() as error:
        raise PublishError(f"{name} is published, but can't be looked at: {error}; {kept}") from error
    if differences:
        raise PublishError(
            f"{name} is published, but a reader of it does not find what was written:\n  "
            + "\n  ".join(differences)
            + f"\n{kept}"
        )


def numbers_that_differ(expected: Mapping[int, str], found: Mapping[int, str]) -> list[int]:
    """Return the blocks that are not there with the content that is expected, or not expected at all."""
    return sorted(number for number in {*found, *expected} if found.get(number) != expected.get(number))


def _other_features_and_rows(
    load: Mapping[str, Any], whole: Whole, first_rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    import datasets

    expected, target = datasets.Features.from_arrow_schema(whole.schema), whole.plan.target
    try:
        stream = datasets.load_dataset(name=target.config, split=target.split, streaming=True, **load)
        features = stream.features or stream._resolve_features().features
        found = features_that_differ(expected, features or {})
        if found:
            return found
        rows = [
            {name: row.get(name) for name in whole.text_columns} for row in itertools.islice(stream.decode(False), 1)
        ]
    except network_errors():
        raise
    except Exception as error:  # noqa: BLE001 - whatever keeps a reader from reading it is what we look for
        return [f"load_dataset fails: {type(error).__name__}: {error}"]
    return [] if rows == list(first_rows) else [f"the first row is {rows}, and was written as {list(first_rows)}"]


def features_that_differ(expected: datasets.Features, found: Mapping[str, Any]) -> list[str]:
    """Say which columns a reader finds otherwise, or not at all."""
    return [
        f"column {name!r}: written as {expected.get(name)}, found as {found.get(name)}"
        for name in {**expected, **found}
        if expected.get(name) != found.get(name)
    ]
