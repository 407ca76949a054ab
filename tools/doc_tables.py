"""The tables of the docs: each a function from models.json to Markdown, under the name that a region gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Catalogue = Mapping[str, Any]
Fact = Mapping[str, Any]


def make_tables(catalogue: Catalogue) -> dict[str, str]:
    """Every table, by name."""
    tables = {name: make(catalogue) for name, make in TABLES.items()}
    for platform in catalogue["platforms"]:
        tables[f"platform-{platform['id']}"] = platform_facts(platform)
    for group in dict.fromkeys(fact["group"] for fact in catalogue["measurements"]):
        tables[f"measured-{group}"] = measured(fact for fact in catalogue["measurements"] if fact["group"] == group)
    return tables


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns that are empty throughout are left out."""
    cells = [[_cell(value) for value in row] for row in rows]
    kept = [column for column in range(len(header)) if any(row[column] for row in cells)]
    head, *body = ["| " + " | ".join(row[column] for column in kept) + " |" for row in (header, *cells)]
    return "\n".join([head, "|" + "---|" * len(kept), *body])


def _cell(value: object) -> str:
    """A value as a cell: bars escaped everywhere, angle brackets outside of code."""
    parts = re.split(r"(`[^`]*`)", str(value).replace("|", r"\|"))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def _evidence(fact: Fact) -> str:
    """How well a fact is known, with what it was measured under and by."""
    command = f"`{fact['command']}`" if fact.get("command") else ""
    return "; ".join(filter(None, [fact["evidence"], fact.get("conditions"), fact.get("note"), command]))


def _evidence_in_short(fact: Fact) -> str:
    """The level alone, with a mark where the catalogue has more to say."""
    return f"{fact['evidence']} ({fact['conditions']})" if fact.get("conditions") else str(fact["evidence"])


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _number(value: float) -> str:
    return f"{value:,}"


# --- the models -------------------------------------------------------------------------------------------------------


def _short(model_id: str) -> str:
    return model_id.partition("/")[2]


def _score(family: Fact) -> str:
    score = family["scores"]["olmocr_bench"]
    return f"{score['value']} ({score['note']})" if "post-processed" in score.get("note", "") else str(score["value"])


def models(catalogue: Catalogue) -> str:
    """A family a row: what it reads, the vendor's score, the image."""
    rows = [
        [
            _code(family["variants"][0]["model_id"]),
            " and ".join(["text", "layout"][: len(family["facts"]["modes"]["value"])]),
            ", ".join(family["facts"]["languages"]["value"]) or "not stated",
            _score(family),
            _code(family["facts"]["image_tag"]["value"]),
            _evidence_in_short(family["facts"]["image_tag"]),
        ]
        for family in catalogue["models"]
    ]
    header = ["model", "reads", "languages", "olmOCR-bench, by the vendor", "image tag", "evidence for the image"]
    return table(header, rows)


def variants(catalogue: Catalogue) -> str:
    """A variant a row, with what sets it apart."""
    rows = [
        [_code(variant["model_id"]), variant["about"]["value"] or ("not stated" if place else "the model itself")]
        for family in catalogue["models"]
        for place, variant in enumerate(family["variants"])
    ]
    return table(["model", "what sets it apart"], rows)


def profiles(catalogue: Catalogue) -> str:
    """A family a row: what the scripts do for it."""
    rows = []
    for family in catalogue["models"]:
        facts = family["facts"]
        sampling = {name: fact["value"] for name, fact in facts["sampling"].items()}
        side = facts["pixels_per_token_side"]["value"]
        rows.append(
            [
                family["family"],
                f"{facts['longest_edge_px']['value']} px",
                f"{side}×{side} px",
                f"{sampling['temperature']} / {sampling['top_p']}",
                sampling["max_tokens"] or "what is left",
                facts["serve_args"][0]["value"][1],
            ]
        )
    header = ["model", "longest edge", "an image token is", "temperature / top_p", "most tokens", "context"]
    return table(header, rows)


@dataclass
class _Gathered:
    """One value that several families have: which, how well it is known, and what is said of it."""

    families: list[str] = field(default_factory=list)
    evidence: dict[str, None] = field(default_factory=dict)  # a dict as a set that keeps its order
    notes: dict[str, None] = field(default_factory=dict)


def _gather(catalogue: Catalogue, name: str) -> dict[tuple[str, ...], _Gathered]:
    """The values of a list of facts over all families, in the order of their first appearance."""
    found: dict[tuple[str, ...], _Gathered] = {}
    for family in catalogue["models"]:
        for fact in family["facts"][name]:
            value = fact["value"].values() if isinstance(fact["value"], dict) else fact["value"]
            gathered = found.setdefault(tuple(value), _Gathered())
            gathered.families.append(family["family"])
            gathered.evidence[fact["evidence"]] = None
            if "note" in fact:
                gathered.notes[fact["note"]] = None
    for gathered in found.values():
        if len(gathered.families) == len(catalogue["models"]):
            gathered.families = ["all"]
    return found


def serve_args(catalogue: Catalogue) -> str:
    """A flag of the profiles a row, with what it buys; one whose value differs between models stands once a value."""
    rows = [
        [
            _code(" ".join([flag, *(f"'{value}'" if value.startswith("{") else value for value in values)])),
            *(", ".join(it.families), "; ".join(it.notes), ", ".join(it.evidence)),
        ]
        for (flag, *values), it in _gather(catalogue, "serve_args").items()
    ]
    return table(["flag", "models", "why", "evidence"], rows)


def known_bad(catalogue: Catalogue) -> str:
    """An engine that is bad for some model a row."""
    rows = [
        [vllm, transformers or "any", ", ".join(it.families), "; ".join([reason, *it.notes]), ", ".join(it.evidence)]
        for (vllm, transformers, reason), it in _gather(catalogue, "known_bad_engines").items()
    ]
    return table(["vLLM", "transformers", "models", "what happens", "evidence"], rows)


# --- scripts and runners ----------------------------------------------------------------------------------------------


def scripts(catalogue: Catalogue) -> str:
    """A script a row."""
    rows = [
        [
            _code(script["script"]),
            script["for"],
            script["runs"],
            _code(_short(script["model"] or "")),
            _code((script["image"] or "").partition(":")[2]),
        ]
        for script in catalogue["scripts"]
    ]
    return table(["script", "for", "runs", "model, unless told otherwise", "image tag"], rows)


def scripts_in_and_out(catalogue: Catalogue) -> str:
    """A script a row: what goes in, what comes out, and the flavour of its header."""
    rows = [[_code(s["script"]), s["inputs"], s["outputs"], _code(s["flavor"] or "")] for s in catalogue["scripts"]]
    return table(["script", "in", "out", "flavour of its header"], rows)


def _price(dollars: float) -> str:
    return f"{dollars:.2f}"


def runners(catalogue: Catalogue) -> str:
    """A flavour a row."""
    rows = [
        [
            _code(runner["flavor"]),
            (f"{runner['gpus']}× " if runner["gpus"] > 1 else "") + (runner["gpu"] or "–"),
            runner["vram_gb"] or "–",
            runner["vcpus"],
            runner["ram_gb"],
            _price(runner["dollars_per_hour"]),
            "; ".join(
                [*filter(None, [runner["note"]]), *(f"{a['value']} ({a['evidence']})" for a in runner["advice"])]
            ),
        ]
        for runner in catalogue["runners"]
    ]
    return table(["flavour", "GPU", "VRAM, GB", "vCPU", "RAM, GB", "$/h", "notes"], rows)


def dollars_per_1000_pages(catalogue: Catalogue, row: Fact) -> float:
    """What a thousand pages cost at a measured speed, start-up not counted."""
    prices = {runner["flavor"]: runner["dollars_per_hour"] for runner in catalogue["runners"]}
    return float(prices[row["flavor"]] / row["pages_per_s"] / 3600 * 1000)


def throughput(catalogue: Catalogue) -> str:
    """A measured speed a row, with what a thousand pages cost at it."""
    rows = [
        [
            _short(row["model"]),
            _code(row["flavor"]),
            row["shape"],
            row["pages_per_s"],
            _price(dollars_per_1000_pages(catalogue, row)),
            row["conditions"],
            row["evidence"],
        ]
        for row in catalogue["throughput"]
    ]
    return table(["model", "flavour", "shape", "pages/s", "$ a 1,000 pages", "conditions", "evidence"], rows)


def throughput_short(catalogue: Catalogue) -> str:
    """A flavour that was measured a row: its best speed."""
    gpus = {runner["flavor"]: runner for runner in catalogue["runners"]}
    best: dict[tuple[str, str], Fact] = {}
    for row in sorted(catalogue["throughput"], key=lambda row: -row["pages_per_s"]):
        best.setdefault((row["flavor"], row["model"]), row)
    rows = [
        [
            _code(flavor),
            gpus[flavor]["gpu"],
            _price(gpus[flavor]["dollars_per_hour"]),
            _short(model),
            row["pages_per_s"],
            _price(dollars_per_1000_pages(catalogue, row)),
            f"{row['evidence']}: {row['conditions']}",
        ]
        for (flavor, model), row in reversed(best.items())
    ]
    return table(["flavour", "GPU", "$/h", "model", "pages/s", "$ a 1,000 pages", "evidence"], rows)


def jobs(catalogue: Catalogue) -> str:
    """A fact about hosted jobs a row."""
    return measured(catalogue["jobs"])


# --- engines and platforms --------------------------------------------------------------------------------------------


def engine_versions(catalogue: Catalogue) -> str:
    """A version of vLLM a row."""
    rows = [[fact["version"], fact["value"], _evidence(fact)] for fact in catalogue["engines"]["versions"]]
    return table(["vLLM", "what is known", "evidence"], rows)


def engine_features(catalogue: Catalogue) -> str:
    """A thing that vLLM does a row."""
    return measured(catalogue["engines"]["features"])


def gauges(catalogue: Catalogue) -> str:
    """A gauge a row."""
    rows = [[_code(g["name"]), g["kind"], g["means"], _evidence(g)] for g in catalogue["engines"]["gauges"]]
    return table(["name", "kind", "means", "evidence"], rows)


def platforms(catalogue: Catalogue) -> str:
    """A platform a row: what is known of reading pages on it."""
    rows = [[p["name"], p["image_input"]["value"], _evidence(p["image_input"])] for p in catalogue["platforms"]]
    return table(["platform", "reading pages", "evidence"], rows)


def platform_facts(platform: Fact) -> str:
    """What is known of one platform, a fact a row."""
    rows = [["reading pages", platform["image_input"]["value"], _evidence(platform["image_input"])]]
    for fact in platform["environment"]:
        words = " ".join(f"{name}={value}" for name, value in fact["value"].items())
        rows.append(["environment", _code(words), _evidence(fact)])
    rows += [["flags", _code(fact["value"]), _evidence(fact)] for fact in platform["flags"]]
    rows += [["mind", fact["value"], _evidence(fact)] for fact in platform["caveats"]]
    return table(["", "what", "evidence"], rows)


def measured(facts: Iterable[Fact]) -> str:
    """Facts of one kind, one a row."""
    rows = [
        [fact["what"], _number(fact["value"]) if isinstance(fact["value"], int) else fact["value"], _evidence(fact)]
        for fact in facts
    ]
    return table(["what", "value", "evidence"], rows)


def survey(catalogue: Catalogue) -> str:
    """A surveyed model a row."""
    rows = [[row["model"], row["where"], row["how"], row["note"]] for row in catalogue["surveyed"]["models"]]
    return table(["model", "where", "how", "notes"], rows)


TABLES: dict[str, Callable[[Catalogue], str]] = {
    "models": models,
    "variants": variants,
    "profiles": profiles,
    "serve-args": serve_args,
    "known-bad": known_bad,
    "scripts": scripts,
    "scripts-in-and-out": scripts_in_and_out,
    "runners": runners,
    "throughput": throughput,
    "throughput-short": throughput_short,
    "jobs": jobs,
    "engine-versions": engine_versions,
    "engine-features": engine_features,
    "gauges": gauges,
    "platforms": platforms,
    "survey": survey,
}
"""Name → table. `platform-ID` and `measured-GROUP` are there besides, for each platform and each group."""
