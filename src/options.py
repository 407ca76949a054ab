"""The command line: each option is spelled once, as a field of a frozen dataclass; the parser is made from those."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar


def argument(help_text: str) -> Any:
    """Declare a positional argument."""
    return field(metadata={"help": help_text, "group": None})


def option(
    default: Any,
    group: str,
    help_text: str,
    *,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare an option; its flag is the field's name in kebab-case, its type the field's."""
    return field(
        default=default,
        metadata={
            "help": help_text,
            "group": group,
            "metavar": metavar,
            "choices": choices,
            "minimum": minimum,
            "maximum": maximum,
        },
    )


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every script takes that turns a dataset of pages into a dataset with text."""

    input: str = argument(
        "Hub dataset id, hf://datasets/… or hf://buckets/… (a folder, file or pattern there), folder of images, "
        "parquet file or folder, or a folder that save_to_disk wrote"
    )
    output: str = argument(
        "local folder, Hub dataset id (namespace/name) to publish to, hf://datasets/…@branch, or hf://buckets/…"
    )

    config: str | None = option(None, "input", "dataset configuration (default: the only one)", metavar="NAME")
    split: str | None = option(None, "input", "split to read (default: the only one, or train)", metavar="NAME")
    revision: str | None = option(
        None, "input", "branch, tag or commit of the input dataset (default: main)", metavar="REV"
    )
    image_column: str | None = option(
        None, "input", "column that holds the pages (default: image, or the only column of images)", metavar="NAME"
    )
    max_samples: int | None = option(None, "input", "take this many rows (default: all)", metavar="N", minimum=1)
    shuffle: bool = option(
        False, "input", "take the rows in an order drawn by --seed, which is then the output's order"
    )

    frames: str = option(
        "first",
        "input",
        "frames of a picture that has several (TIFF, GIF …): the first, or all, their texts joined by a form feed",
        choices=("first", "all"),
    )
    max_pixels: int = option(
        178_956_970, "input", "pixels a picture may have before it is decoded", metavar="N", minimum=1
    )
    page_timeout: float = option(
        120.0, "input", "seconds one picture may take to be decoded and scaled", metavar="S", minimum=0.001
    )
    allow_truncated: bool = option(False, "input", "read pictures whose file breaks off, as far as they go")
    skip_blank: bool = option(True, "input", "pages without ink are `blank` and not asked about")

    output_column: str = option(
        "markdown",
        "output",
        "column for the text; _status, _error and _tokens columns are named after it",
        metavar="NAME",
    )
    output_config: str | None = option(
        None,
        "output",
        "configuration of the output, in a folder of that name (default: default, in data/)",
        metavar="NAME",
    )
    output_split: str | None = option(None, "output", "split of the output (default: the input's name)", metavar="NAME")
    output_revision: str | None = option(
        None, "output", "branch of the Hub output, created from main where it is missing (default: main)", metavar="REV"
    )
    create_pr: bool = option(
        False, "output", "publish by a pull request: a draft while blocks come in, marked as ready when all are there"
    )
    results_only: bool = option(
        False, "output", "leave the pictures out; row_index says which row of the input a text belongs to"
    )
    block_rows: int = option(
        256,
        "output",
        "rows a block file; a killed run asks again at most for the blocks that were open",
        metavar="N",
        minimum=1,
    )
    drop_labels: str | None = option(
        None,
        "output",
        "with --mode grounding: blocks to leave out of the text, such as header,footer,page_number",
        metavar="LABELS",
    )
    fix_dollars: bool = option(True, "output", r"repair escaped math delimiters (`\$x\$`) and leave prices alone")
    keep_raw: bool = option(False, "output", "keep the text as the engine gave it, in a _raw column")
    confidence: bool = option(
        False, "output", "mean and lowest token probability of a page, in a _confidence column; engines with logprobs"
    )
    overwrite: bool = option(False, "output", "remove the blocks that are there and start anew")
    resume: bool = option(False, "output", "go on where a run with the same settings stopped; this is the default")
    retry_failed: bool = option(False, "output", "ask again about the rows that failed, and write their blocks anew")
    finish: bool = option(False, "output", "ask about nothing: check that all blocks are there, and publish them")
    commit_minutes: float | None = option(
        None,
        "output",
        "minutes between two commits to a Hub output (default: 10; with shards 5 for each of them, if that is more)",
        metavar="M",
        minimum=0.0,
    )
    private: bool = option(
        False, "output", "make a new Hub dataset private (default: as the input; private for local input)"
    )
    public: bool = option(False, "output", "make a new Hub dataset public")
    work_dir: str | None = option(
        None,
        "output",
        "where blocks lie until they are published (default: a folder of the user's cache)",
        metavar="DIR",
    )

    model: str = option("", "model", "model id or local checkpoint", metavar="ID")
    model_revision: str | None = option(
        None, "model", "branch, tag or commit of the model (default: main)", metavar="REV"
    )

    mode: str = option(
        "text",
        "model",
        "text, or grounding: the layout too, in a _blocks column (LightOnOCR-3)",
        choices=("text", "grounding"),
    )

    temperature: float | None = option(
        None, "sampling", "sampling temperature (default: the model's own)", metavar="T", minimum=0.0, maximum=2.0
    )
    top_p: float | None = option(
        None, "sampling", "nucleus sampling (default: the model's own)", metavar="P", minimum=1e-9, maximum=1.0
    )
    max_tokens: int | None = option(
        None, "sampling", "most tokens generated a page (default: the model's own)", metavar="N", minimum=1
    )
    seed: int = option(0, "sampling", "seed from which each page's own is derived", metavar="N", minimum=0)
    retries_quality: int = option(
        2,
        "sampling",
        "how often a page is asked again, warmer, whose text was cut off or loops; the best text is kept",
        metavar="N",
        minimum=0,
    )

    max_model_len: int | None = option(
        None, "engine", "most tokens of a page and its text together (default: the model's own)", metavar="N", minimum=1
    )
    gpu_memory_utilization: float | None = option(
        None,
        "engine",
        "share of the GPU's memory for the engine, 0 to 1 (default: vLLM's)",
        metavar="SHARE",
        maximum=1.0,
    )

    allow_bad_engine: bool = option(False, "engine", "go on with a vLLM version that is known to be bad for the model")
    no_canary: bool = option(
        False, "engine", "trust the engine without having it read a page of known text before the first real one"
    )
    canary_page: str | None = option(
        None, "engine", "picture to use as that page, with --canary-text (default: we draw one)", metavar="FILE"
    )
    canary_text: str | None = option(None, "engine", "file with the text on --canary-page", metavar="FILE")

    max_failure_rate: float = option(
        0.05,
        "run",
        "share of pages, 0 to 1, that may fail before the exit code is 1",
        metavar="SHARE",
        minimum=0.0,
        maximum=1.0,
    )
    num_shards: int | None = option(
        None, "run", "how many runs share the output (default: SLURM_ARRAY_TASK_COUNT, or 1)", metavar="N", minimum=1
    )
    shard_index: int | None = option(
        None, "run", "number of this one, from 0 (default: from SLURM_ARRAY_TASK_ID, or 0)", metavar="I", minimum=0
    )
    show: int = option(0, "run", "print the text of the first N pages at the end", metavar="N", minimum=0)
    verbose: bool = option(False, "run", "say why requests are made again, and more")
    dollars_per_hour: float | None = option(
        None, "run", "price of an hour of this machine (default: of the job's flavour)", metavar="D", minimum=0.0
    )

    jobs: int | None = option(
        None, "jobs", "submit this run as N Hugging Face Jobs that share the output, and end", metavar="N", minimum=1
    )
    flavor: str | None = option(
        None, "jobs", "hardware of a job, as `hf jobs hardware` names it (default: the script's own)", metavar="NAME"
    )
    timeout: str | None = option(
        None, "jobs", "when a job is stopped: 90m, 4h, 2d (default: from the estimate, or 4h)", metavar="TIME"
    )
    attempts: int | None = option(
        None,
        "jobs",
        "how often a job is started in all, where it is stopped or fails (default: 3)",
        metavar="N",
        minimum=1,
    )
    jobs_namespace: str | None = option(
        None, "jobs", "user or organisation that the jobs run for (default: the token's user)", metavar="NS"
    )
    pages_per_second: float | None = option(
        None, "jobs", "speed of one job, for the estimate (default: a stored figure)", metavar="X", minimum=1e-9
    )
    dry_run: bool = option(False, "jobs", "print what --jobs would submit, and submit nothing")

    vllm_args: tuple[str, ...] = ()


OptionsT = TypeVar("OptionsT", bound=CommonOptions)


def make_parser(
    options_type: type[OptionsT], *, prog: str, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """Make the parser of an options dataclass."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [OPTIONS] INPUT OUTPUT [-- WORDS FOR THE ENGINE]",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = typing.get_type_hints(options_type)
    groups: dict[str, Any] = {}
    for item in fields(options_type):
        if not item.metadata:
            continue
        meta, kind = item.metadata, _scalar(hints[item.name])
        if meta["group"] is None:
            parser.add_argument(item.name, metavar=item.name.upper(), help=meta["help"])
            continue
        group = groups.setdefault(meta["group"], None) or parser.add_argument_group(meta["group"])
        groups[meta["group"]] = group
        flag = f"--{item.name.replace('_', '-')}"
        if kind is bool and item.default:
            group.add_argument(
                flag, default=True, action=argparse.BooleanOptionalAction, help=f"{meta['help']} (default: yes)"
            )
        elif kind is bool:
            group.add_argument(flag, action="store_true", help=meta["help"])
        else:
            group.add_argument(
                flag,
                default=item.default,
                type=_converter(kind, meta["minimum"], meta["maximum"]),
                metavar=meta["metavar"],
                choices=meta["choices"],
                help=meta["help"] + _default_words(item.default, meta["help"]),
            )
    return parser


def parse_options(parser: argparse.ArgumentParser, options_type: type[OptionsT], argv: Sequence[str]) -> OptionsT:
    """Parse the command line; what follows `--` is for `vllm serve`, unchanged."""
    own, vllm_args = _split_at_dashes(argv)
    return options_type(**vars(parser.parse_args(own)), vllm_args=vllm_args)


def _split_at_dashes(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], tuple(words[place + 1 :])


def _scalar(hint: Any) -> type:
    """Return `int` for `int | None`, and so on."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return typing.cast("type", hint)


def _converter(kind: type, minimum: float | None, maximum: float | None) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {'whole number' if kind is int else 'number'}") from None
        # not (a <= b), so that nan is refused too
        if minimum is not None and not value >= minimum:
            raise argparse.ArgumentTypeError(f"{text} is too small: {minimum:g} is the least")
        if maximum is not None and not value <= maximum:
            raise argparse.ArgumentTypeError(f"{text} is too large: {maximum:g} is the most")
        return value

    return convert


def _default_words(default: Any, help_text: str) -> str:
    return "" if default in (None, "") or "default:" in help_text else f" (default: {default})"
