"""What `bench/endpoint.py` reports: figures of a level, a table, a plot, and what fell behind a baseline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.closed_loop import Level

PERCENTILES = (50, 90, 99)
BUSY_CLIENT_SHARE = 0.7  # of the one core that an event loop has
MORE_ERRORS = 0.01  # so much more of all requests may fail than in the baseline
# What is compared with a baseline, and whether more is better. p99 is left out: it is made of a few answers.
COMPARED = {
    "pages_per_s": True,
    "tokens_per_s": True,
    "latency_s.p50": False,
    "latency_s.p90": False,
    "first_token_s.p50": False,
}


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the value that so many percent do not exceed (nearest rank); None where there are too few to tell.

    At least one value has to lie above it: p99 needs 100 values.
    """
    if len(values) * (100 - percent) < 100:
        return None
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return percentiles, mean and extreme of seconds; None where they can't be told."""
    found = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    found |= {"mean": sum(values) / len(values) if values else None, "max": max(values, default=None)}
    return {name: None if value is None else round(value, 4) for name, value in found.items()}


def figures(level: Level) -> dict[str, Any]:
    """Return what is said of a level, as it stands in the JSON."""
    answered = [sample for sample in level.samples if sample.answer]
    in_time = [sample for sample in answered if sample.ended_s <= level.stopped_s]
    window_s = max((sample.ended_s for sample in in_time), default=0.0)
    errors = Counter(sample.error for sample in level.samples if sample.error)
    tokens = [sample.answer.tokens for sample in in_time if sample.answer]
    known = [count for count in tokens if count is not None]
    return {
        "concurrency": level.concurrency,
        "requests": len(level.samples),
        "answered": len(answered),
        "errors": dict(errors.most_common()),
        "error_share": round(errors.total() / len(level.samples), 4),
        "finish_reasons": dict(Counter(str(sample.answer.finish_reason) for sample in answered if sample.answer)),
        "latency_s": spread([sample.ended_s - sample.started_s for sample in answered]),
        "first_token_s": spread([one.first_token_s for one in answered if one.first_token_s is not None]),
        "window_s": round(window_s, 3),
        "pages_per_s": _rate(len(in_time), window_s),
        "tokens_per_s": _rate(sum(known), window_s) if len(known) == len(tokens) else None,
        "client_cpu_share": round(level.client_cpu_s / max(1e-9, level.wall_s), 3),
        "died": level.died,
    }


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 4) if seconds else 0.0


def warnings(level: Mapping[str, Any]) -> list[str]:
    """Say what makes the figures of a level doubtful."""
    found = []
    if level["client_cpu_share"] > BUSY_CLIENT_SHARE:
        found.append(
            f"at {level['concurrency']} in flight this client used {level['client_cpu_share']:.0%} of a core: it may "
            "be what limits; start it on another machine, or with --no-stream"
        )
    cut = level["finish_reasons"].get("length", 0)
    if cut > level["answered"] / 10:
        found.append(
            f"at {level['concurrency']} in flight {cut} of {level['answered']} texts were cut off by --max-tokens: "
            "tokens/s is right, pages/s is that of shorter texts"
        )
    if level["died"]:
        found.append(
            f"at {level['concurrency']} in flight the endpoint did nothing but fail in the end "
            f"({_counts(level['errors'])}): no further level was run"
        )
    return found


def _counts(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {kind}" for kind, count in errors.items())


# ---------------------------------------------------------------------------------------------------------- for people

COLUMNS = {
    "in flight": "concurrency",
    "answered": "answered",
    "failed": "error_share",
    "pages/s": "pages_per_s",
    "tokens/s": "tokens_per_s",
    "p50 s": "latency_s.p50",
    "p90 s": "latency_s.p90",
    "p99 s": "latency_s.p99",
    "max s": "latency_s.max",
    "1st token p50": "first_token_s.p50",
    "p90": "first_token_s.p90",
    "client CPU": "client_cpu_share",
}


def value_of(level: Mapping[str, Any], name: str) -> Any:
    """Look up `latency_s.p50` and the like."""
    found: Any = level
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def head() -> str:
    """Return the head of the table."""
    return "  ".join(f"{title:>{_width(title)}}" for title in COLUMNS)


def line(level: Mapping[str, Any]) -> str:
    """Return a level's line of the table; "–" is what can't be told, as p99 of less than 100 answers."""
    cells = [f"{_cell(name, value_of(level, name)):>{_width(title)}}" for title, name in COLUMNS.items()]
    errors = f"  {_counts(level['errors'])}" if level["errors"] else ""
    return "  ".join(cells) + errors


def _width(title: str) -> int:
    return max(8, len(title))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name.endswith("share"):
        return f"{value:.1%}"
    return str(value) if isinstance(value, int) else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def draw_plot(path: Path, result: Mapping[str, Any], baseline: Mapping[str, Any] | None = None) -> None:
    """Draw throughput and seconds over the number in flight; a baseline is dashed."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 8), layout="constrained")
    curves = (
        (above, "pages_per_s", "pages/s", "tab:blue"),
        (below, "latency_s.p50", "answer, p50", "tab:blue"),
        (below, "latency_s.p90", "answer, p90", "tab:orange"),
        (below, "latency_s.p99", "answer, p99", "tab:red"),
        (below, "first_token_s.p50", "first token, p50", "tab:green"),
    )
    for axes, name, label, colour in curves:
        for shown, style, words in ((baseline, "--", f"{label} (baseline)"), (result, "o-", label)):
            points = [(level["concurrency"], value_of(level, name)) for level in (shown or {}).get("levels", ())]
            known = [(at, value) for at, value in points if value]
            if known:
                axes.plot(
                    *zip(*known, strict=True), style, label=words, color=colour, alpha=1.0 if shown is result else 0.5
                )
    for level in result["levels"]:
        if level["error_share"]:
            above.annotate(
                f"{level['error_share']:.0%} failed",
                (level["concurrency"], 0),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                color="tab:red",
            )
    in_flight = [level["concurrency"] for level in result["levels"]]
    above.set(title=f"{result['engine']} with {result['model']}", ylabel="pages/s", ylim=(0, None))
    below.set(xlabel="requests in flight", ylabel="seconds")
    below.set_xscale("log", base=2)
    below.set_yscale("log")
    below.set_xticks(in_flight, [str(number) for number in in_flight])
    below.xaxis.set_minor_locator(NullLocator())
    for set_formatter in (below.yaxis.set_major_formatter, below.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
        axes.margins(x=0.08)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# -------------------------------------------------------------------------------------------------------- the baseline


def unlike(result_settings: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """Say in what the baseline was measured differently: then there is nothing to compare."""
    before = baseline["settings"]
    names = [*result_settings, *(name for name in before if name not in result_settings)]
    return [
        f"{name} was {before.get(name)!r} and is {result_settings.get(name)!r}"
        for name in names
        if before.get(name) != result_settings.get(name)
    ]


def fallen(result: Mapping[str, Any], baseline: Mapping[str, Any], tolerance: float) -> list[str]:
    """Say which figures are worse than in the baseline by more than the tolerance, level by level."""
    ours = {level["concurrency"]: level for level in result["levels"]}
    found = []
    for before in baseline["levels"]:
        level = ours.get(before["concurrency"])
        if level is None:
            continue
        at = f"at {level['concurrency']} in flight"
        found += [f"{at} {words}" for words in _fallen_figures(level, before, tolerance)]
        if level["error_share"] > before["error_share"] + MORE_ERRORS:
            found.append(f"{at} error_share rose from {before['error_share']:.1%} to {level['error_share']:.1%}")
    return found


def _fallen_figures(level: Mapping[str, Any], before: Mapping[str, Any], tolerance: float) -> list[str]:
    found = []
    for name, more_is_better in COMPARED.items():
        was, now = value_of(before, name), value_of(level, name)
        if not was:
            continue
        if now is None:
            found.append(f"{name} was {was:g} and can't be told any more")
        elif more_is_better and now < was * (1 - tolerance):
            found.append(f"{name} fell from {was:g} to {now:g} ({now / was - 1:+.0%})")
        elif not more_is_better and now > was * (1 + tolerance):
            found.append(f"{name} rose from {was:g} to {now:g} ({now / was - 1:+.0%})")
    return found
