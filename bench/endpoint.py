# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "aiohttp>=3.14.5",
#     "matplotlib>=3.11.2",
#     "numpy>=2.0",
#     "pillow>=13.0.0",
# ]
# ///
"""Load a running endpoint with pages, one concurrency after the other, and tell what it delivers.

    uv run bench/endpoint.py http://gpu-box:8000
    uv run bench/endpoint.py http://gpu-box:8000 --pages scans/ --concurrency 1..128 --json before.json --plot load.svg
    uv run bench/endpoint.py http://gpu-box:8000 --pages scans/ --concurrency 1..128 --check-against before.json

The loop is closed: N requests are in flight, and where one is answered the next is sent. Pages are scaled and encoded
before the clock runs, and asked about as the scripts do it (prompt, sampling, a seed each), with a stream to see the
first token come. They repeat: a server that caches prefixes or pictures looks faster than it is.

The table goes to stderr, the same as JSON to stdout or --json FILE. Percentiles are answers that were measured (nearest
rank), and "–" where there are too few of them: p99 needs 100. Exit code 0; 1 where the endpoint died, nothing was
answered, or a figure fell behind the baseline; 2 for options that don't fit.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from bench.closed_loop import EncodedPage, Endpoint, Enough, Questions, RequestFailedError, run_level  # noqa: E402
from bench.endpoint_report import draw_plot, fallen, figures, head, line, unlike, warnings  # noqa: E402
from bench.pages import scan  # noqa: E402
from src.errors import EngineError, JobError, UsageError  # noqa: E402
from src.models import ModelProfile, find_profile, prompt_words  # noqa: E402
from src.pages import PageLimits, Refusal, data_url, make_page  # noqa: E402
from src.question import Question  # noqa: E402
from src.ready import engine_name, served_id  # noqa: E402
from src.report import say  # noqa: E402
from src.web import base_url, fetch  # noqa: E402

PICTURES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp", ".gif"})
PLOTS = frozenset({".pdf", ".png", ".svg"})
DRAWN_PAGES = 8
REQUESTS_A_LEVEL = 100  # as many as p99 needs
GENERATIONS_A_LEVEL = 4  # but so many for each in flight


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load test; return its exit code."""
    options = make_parser().parse_args(argv)
    try:
        check_targets(options)
        baseline = read_baseline(options.check_against, options.concurrency)
        result = measure(options, baseline)
    except JobError as error:
        say(f"endpoint.py: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("endpoint.py: interrupted; nothing was written")
        return 130
    complaints = fallen(result, baseline, options.tolerance) if baseline else []
    result["fallen"] = complaints if baseline else None
    written = give(result, options, baseline)
    for words in (*result["warnings"], *complaints):
        say(words)
    if baseline and not complaints:
        say(f"nothing fell behind {options.check_against} by more than {options.tolerance:.0%}")
    nothing = not any(level["answered"] for level in result["levels"])
    return int(not written or bool(complaints) or nothing or any(level["died"] for level in result["levels"]))


def make_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="endpoint.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("url", help="where the endpoint answers, with or without /v1")
    add = parser.add_argument
    add("--model", metavar="ID", help="model to ask (default: the first that the endpoint lists)")
    add("--api-key-env", default="VLLM_API_KEY", metavar="VAR", help="variable that holds the key (%(default)s)")
    add("--pages", type=Path, metavar="DIR", help=f"folder of pictures (default: {DRAWN_PAGES} drawn A4 scans)")
    add(
        "--concurrency",
        type=concurrencies,
        default=concurrencies("1..32"),
        metavar="N,N…",
        help="requests in flight, level by level; 1..32 doubles from 1 to 32 (default: 1..32)",
    )
    add("--requests", type=at_least_one, metavar="N", help="requests a level (default: 100, or 4 for each in flight)")
    add("--seconds", type=seconds, metavar="S", help="seconds a level; with --requests what comes first")
    add(
        "--warm-up",
        type=at_least_one,
        default=4,
        metavar="N",
        help="requests before the first level (default: %(default)s)",
    )
    add("--max-tokens", type=at_least_one, metavar="N", help="most tokens of a text (default: the model's own)")
    add("--no-stream", action="store_true", help="ask as the scripts do: no first token is seen")
    add("--request-timeout", type=seconds, default=600.0, metavar="S", help="for one request (default: %(default)g)")
    add("--json", type=Path, metavar="FILE", help="write the result there instead of stdout")
    add("--plot", type=Path, metavar="FILE", help="draw it: a .png, .svg or .pdf file")
    add("--check-against", type=Path, metavar="FILE", help="an earlier --json: fail where a figure has fallen")
    add("--tolerance", type=share, default=0.1, metavar="SHARE", help="what is no fall (default: %(default)g)")
    return parser


def concurrencies(text: str) -> list[int]:
    """Read `1,2,4` or `1..32`."""
    first, dots, last = text.partition("..")
    if not dots:
        return sorted({at_least_one(word) for word in text.split(",")})
    levels, most = [at_least_one(first)], at_least_one(last)
    while levels[-1] * 2 <= most:
        levels.append(levels[-1] * 2)
    return sorted({*levels, most}) if levels[0] <= most else _no_number(text, "the first is the larger one")


def at_least_one(text: str) -> int:
    """Read a whole number."""
    return int(text) if text.strip().isdecimal() and int(text) >= 1 else _no_number(text, "a whole number from 1 on")


def seconds(text: str) -> float:
    """Read a time."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    return value if 0 < value < float("inf") else _no_number(text, "seconds above 0 are wanted")


def share(text: str) -> float:
    """Read a share."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    return value if 0 <= value < 1 else _no_number(text, "a share from 0 to below 1 is wanted")


def _no_number(text: str, wanted: str) -> Any:
    raise argparse.ArgumentTypeError(f"{text!r}: {wanted}")


# ------------------------------------------------------------------------------------------------------- what is asked


def choose_model(url: str, key: str, wanted: str | None) -> tuple[str, str]:
    """Return the model to ask, and the engine that serves it."""
    try:
        status, body = fetch(f"{url}/v1/models", key)
    except OSError as error:
        raise EngineError(f"{url} does not answer: {getattr(error, 'reason', error)}; start the server first") from None
    if status in {401, 403}:
        raise EngineError(f"{url} refuses our key (HTTP {status}); set the variable that --api-key-env names")
    try:
        models = [dict(model) for model in json.loads(body)["data"]]
        first = str(models[0]["id"])
    except (ValueError, LookupError, TypeError):
        raise EngineError(f"{url}/v1/models (HTTP {status}) is no list of models: {body[:100]!r}") from None
    return served_id(models, wanted, url) if wanted else first, engine_name(url, models)


def encoded_pages(folder: Path | None, profile: ModelProfile) -> list[EncodedPage]:
    """Return the pages of a folder, or drawn ones, as the scripts would send them."""
    if folder is None:
        pictures = {f"drawn {number}": scan(number) for number in range(DRAWN_PAGES)}
    else:
        files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in PICTURES and file.is_file())
        pictures = {str(file): file.read_bytes() for file in files}
    found = []
    for name, content in pictures.items():
        page = make_page(content, PageLimits(profile.longest_edge_px))
        if isinstance(page, Refusal):
            say(f"{name} is left out: {page.reason}")
        else:
            found.append(EncodedPage(page, data_url(page).encode()))
    if not found:
        raise UsageError(f"--pages {folder}: no picture in it can be asked about; give a folder of page images")
    return found


def make_question(profile: ModelProfile, max_tokens: int | None) -> Question:
    """Return the question that the scripts ask by default."""
    return Question(
        words=prompt_words(profile, "text"),
        temperature=profile.sampling.temperature,
        top_p=profile.sampling.top_p,
        max_tokens=max_tokens or profile.sampling.max_tokens,
        seed=0,
        chat_template_kwargs=dict(profile.chat_template_kwargs),
    )


# ------------------------------------------------------------------------------------------------------------- at work


def measure(options: argparse.Namespace, baseline: dict[str, Any] | None) -> dict[str, Any]:
    """Ask, level by level, and show each as it is done."""
    url, key = base_url(options.url), os.environ.get(options.api_key_env) or "EMPTY"
    model, engine = choose_model(url, key, options.model)
    profile = find_profile(model).profile
    questions = Questions(
        model, make_question(profile, options.max_tokens), encoded_pages(options.pages, profile), not options.no_stream
    )
    settings = settings_of(questions)
    differences = unlike(settings, baseline) if baseline else []
    if differences:
        raise UsageError(f"--check-against {options.check_against} is no baseline for this: {'; '.join(differences)}")
    say(f"{engine} serves {model} at {url}: {len(questions.pages)} pages, over and over")
    return {
        "version": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model,
        "engine": engine,
        "settings": settings,
        **asyncio.run(run_levels(options, url, key, questions)),
    }


def settings_of(questions: Questions) -> dict[str, Any]:
    """Return what has to be the same in a baseline."""
    return {
        "model": questions.model,
        "pages": len(questions.pages),
        "pages_sha256": hashlib.sha256(b"\0".join(page.url for page in questions.pages)).hexdigest()[:16],
        "temperature": questions.question.temperature,
        "max_tokens": questions.question.max_tokens,
        "stream": questions.stream,
    }


async def run_levels(options: argparse.Namespace, url: str, key: str, questions: Questions) -> dict[str, Any]:
    """Warm up, and run the levels; return them and what makes them doubtful."""
    levels: list[dict[str, Any]] = []
    async with Endpoint(url, key, questions, options.request_timeout) as endpoint:
        await warm_up(endpoint, options.warm_up, questions)
        say(head())
        for concurrency in options.concurrency:
            level = figures(await run_level(endpoint.ask, concurrency, enough_of(options, concurrency)))
            levels.append(level)
            say(line(level))
            if level["died"]:
                break
    return {"levels": levels, "warnings": [words for level in levels for words in warnings(level)]}


async def warm_up(endpoint: Endpoint, count: int, questions: Questions) -> None:
    """Ask some pages that are not counted; say so where the endpoint can't be asked like this at all."""
    failures = []
    for _ in range(count):
        try:
            await endpoint.ask()
        except RequestFailedError as failure:
            failures.append(str(failure))
    if failures and len(failures) == count:
        hint = "; does it stream? --no-stream asks without" if questions.stream else ""
        raise EngineError(f"none of {count} requests to warm up was answered, the last: {failures[-1]}{hint}")


def enough_of(options: argparse.Namespace, concurrency: int) -> Enough:
    """Say when a level is done; by default with whole generations of requests."""
    if options.requests or options.seconds:
        return Enough(options.requests, options.seconds)
    generations = max(GENERATIONS_A_LEVEL, -(-REQUESTS_A_LEVEL // concurrency))
    return Enough(generations * concurrency)


# -------------------------------------------------------------------------------------------------------- what is told


def check_targets(options: argparse.Namespace) -> None:
    """Raise `UsageError` where what is measured could not be written down."""
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{flag} {path} can't be written: give a file in a folder that is there")
    if options.plot and options.plot.suffix.lower() not in PLOTS:
        raise UsageError(f"--plot {options.plot}: give a name that ends in {', '.join(sorted(PLOTS))}")


def read_baseline(path: Path | None, levels: Sequence[int]) -> dict[str, Any] | None:
    """Read an earlier result; raise `UsageError` where it is none, or has no level of ours."""
    if path is None:
        return None
    try:
        baseline = json.loads(path.read_text())
        there = [int(level["concurrency"]) for level in baseline["levels"]]
        dict(baseline["settings"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"--check-against {path} is no result of an earlier --json: {error!r}") from None
    if not set(there) & set(levels):
        raise UsageError(f"--check-against {path} has the concurrencies {there}, of which --concurrency gives none")
    return dict(baseline)


def give(result: dict[str, Any], options: argparse.Namespace, baseline: dict[str, Any] | None) -> bool:
    """Write the JSON and the plot; return whether both could be. Where not, stdout has what was measured."""
    words = json.dumps(result)
    try:
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
        else:
            print(words, flush=True)
        if options.plot:
            draw_plot(options.plot, result, baseline)
    except OSError as error:
        say(f"endpoint.py: the result can't be written: {error}; here it is on stdout")
        print(words)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
