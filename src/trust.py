"""What an engine must pass before its first page: the version gate, the budget, and the canary."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .budget import check_budget
from .canary import CANARY_ROWS, Canary, make_canary, what_is_wrong
from .errors import EngineError
from .models import ModelProfile, known_bad_engine
from .options import CommonOptions
from .pages import PageLimits
from .question import Question
from .report import say
from .result import PageResult


@dataclass(frozen=True)
class Trust:
    """What is required of an engine. `canary` None: no page is asked about; `patience_s`: how long an answer may take.

    `allow_bad_engine`: versions known to be bad are taken all the same.
    """

    profile: ModelProfile
    question: Question
    canary: Canary | None
    allow_bad_engine: bool = False
    patience_s: float = 600.0


def required(profile: ModelProfile, question: Question, options: CommonOptions, patience_s: float = 600.0) -> Trust:
    """Say what the options require of an engine; raise `UsageError` where the canary page they name is none."""
    canary = make_canary(options.canary_page, options.canary_text, PageLimits(profile.longest_edge_px))
    return Trust(profile, question, None if options.no_canary else canary, options.allow_bad_engine, patience_s)


def check_version(trust: Trust, vllm: str, transformers: str | None = None, *, serves: bool = False) -> None:
    """Raise `EngineError` where the catalogue warns of this vLLM, or of this pair of it and transformers.

    `serves`: it serves the model already, so that it can't be a pair with which the model does not start.
    """
    bad = known_bad_engine(trust.profile, vllm, transformers)
    if bad is None or trust.allow_bad_engine or (bad.transformers and (serves or transformers is None)):
        return
    pair = f"vLLM {vllm}" + (f" with transformers {transformers}" if bad.transformers else "")
    raise EngineError(
        f"{pair} is known to be bad for {trust.profile.model_id}: {bad.reason}. "
        f"Use another version, such as the image {trust.profile.image}, or insist with --allow-bad-engine"
    )


def installed_versions(program: str, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the versions of vLLM and transformers behind a `vllm` command, asked of its own Python; None if unknown.

    It takes a blink, where `vllm --version` takes the seconds of its imports.
    """
    found = shutil.which(program)
    try:
        with Path(found or "").open("rb") as script:
            first = script.readline(500).decode(errors="replace")
        if not first.startswith("#!") or "python" not in first:
            return None
        ask = "from importlib.metadata import version as v; print(v('vllm'), v('transformers'))"
        command = [*first[2:].split(), "-c", ask]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=True)
        vllm, transformers = done.stdout.split()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return vllm, transformers


def check_context(trust: Trust, max_model_len: object) -> None:
    """Raise `UsageError` where the largest page does not fit what the engine says its context is."""
    check_budget(trust.profile, trust.question, max_model_len if isinstance(max_model_len, int) else None)


def check_canary(trust: Trust, ask: Callable[[Canary, int], PageResult], engine: str) -> float:
    """Have the canary page read, twice where the first answer is not readable; return the seconds an answer took.

    `ask` gets the canary and the row for its seed. Raises `EngineError` where the engine can't be trusted.
    """
    if trust.canary is None:
        return 0.0
    wrong: str | None = "it was not asked"
    for row in CANARY_ROWS:
        started = time.monotonic()
        wrong = what_is_wrong(trust.canary, ask(trust.canary, row))
        if wrong is None:
            took_s = time.monotonic() - started
            say(f"the canary page was read in {took_s:.1f} s")
            return took_s
    raise EngineError(
        f"{engine} can't be trusted with {trust.profile.model_id}: a page of known text (the canary) came back "
        f"unreadable: {wrong}. Most likely its version does not fit the model: use the image {trust.profile.image}. "
        "Another test page: --canary-page and --canary-text; none: --no-canary"
    )
