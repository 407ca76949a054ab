"""The offline engine's feeding, against an `LLM` that is a fake: who is asked when, and whose fault an exception is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from src.engine import OfflineEngine
from src.errors import EngineError
from src.pages import Page
from src.question import Attempt, Question, page_seed
from src.result import PageResult

QUESTION = Question("", 0.2, 0.9, 100, 7, {"enable_thinking": False})


class DeadError(Exception):
    """The engine is gone."""


@dataclass
class Completion:
    text: str
    finish_reason: str = "stop"
    token_ids: Sequence[int] = (1, 2, 3)
    logprobs: list[dict[int, Any]] | None = None


@dataclass
class Output:
    request_id: str
    outputs: list[Completion]
    finished: bool = True
    prompt_token_ids: Sequence[int] = (0,) * 10


@dataclass
class ChatOnly:
    """An older engine: chunks only. A page is told by its width; `poison` widths make a whole chunk raise."""

    poison: set[int] = field(default_factory=set)
    dies_at: int | None = None
    chunks: list[list[int]] = field(default_factory=list)
    seeds: dict[int, int] = field(default_factory=dict)
    threads: set[str] = field(default_factory=set)
    kwargs: list[Any] = field(default_factory=list)

    def _look(self, messages: Sequence[Any], sampling: Sequence[dict[str, Any]]) -> list[int]:
        self.threads.add(threading.current_thread().name)
        widths = []
        for message, parameters in zip(messages, sampling, strict=True):
            (part,) = message[0]["content"]
            assert part["image_pil"].mode == "RGB"
            widths.append(part["image_pil"].width)
            self.seeds[widths[-1]] = parameters["seed"]
        return widths

    def chat(self, messages: Any, sampling: Any, *, use_tqdm: bool, chat_template_kwargs: Any) -> list[Output]:
        widths = self._look(messages, sampling)
        self.chunks.append(widths)
        self.kwargs.append(chat_template_kwargs)
        if self.dies_at in widths:
            raise DeadError("see above")
        if self.poison & set(widths):
            raise ValueError(f"can't process {sorted(self.poison & set(widths))}")
        return [Output(str(width), [Completion(f"page {width}")]) for width in widths]


@dataclass
class Stepping(ChatOnly):
    """A newer engine: pages one by one. `refused` widths are refused when added; `breaks_step` makes a step raise."""

    refused: set[int] = field(default_factory=set)
    breaks_step: bool = False
    running: dict[str, int] = field(default_factory=dict)
    most_running: int = 0
    added: int = 0
    aborted: list[str] = field(default_factory=list)

    @property
    def llm_engine(self) -> Stepping:
        return self

    def enqueue_chat(self, messages: Any, sampling: Any, *, use_tqdm: bool, chat_template_kwargs: Any) -> list[str]:
        (width,) = self._look(messages, sampling)
        if width in self.refused:
            raise ValueError("the prompt is longer than the context")
        self.added += 1
        name = str(self.added)
        self.running[name] = width
        self.most_running = max(self.most_running, len(self.running))
        return [f"{name}-1a2b3c4d"]

    def step(self) -> list[Output]:
        widths = set(self.running.values())
        if self.dies_at in widths:
            raise DeadError("see above")
        if self.poison & widths or self.breaks_step:
            self.breaks_step = False
            raise RuntimeError("kernel failed")
        done = list(self.running)[:2]
        late = [Output(name, [], finished=False) for name in list(self.running)[2:]]
        return [*late, *(Output(name, [Completion(f"page {self.running.pop(name)}")]) for name in done)]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self.running.pop(name)


def answers(llm: Any, widths: Sequence[int], batch_size: int = 8) -> list[PageResult | BaseException]:
    """Ask about a page of each width at once."""

    async def ask_all() -> list[PageResult | BaseException]:
        engine = OfflineEngine(
            llm,
            QUESTION,
            dict,
            batch_size=batch_size,
            is_death=lambda error: isinstance(error, DeadError),
            is_gone=lambda: False,
        )
        try:
            tickets = [engine.encode(Page(Image.new("L", (width, 30)), None), width) for width in widths]
            return await asyncio.gather(*(engine.ask(ticket, None) for ticket in tickets), return_exceptions=True)  # type: ignore[arg-type]
        finally:
            engine.stop()

    return asyncio.run(asyncio.wait_for(ask_all(), 30))


@pytest.mark.parametrize("kind", [ChatOnly, Stepping])
def test_every_page_gets_its_own_answer_and_seed_from_one_thread(kind: type[ChatOnly]) -> None:
    llm = kind()
    widths = list(range(30, 60))
    results = answers(llm, widths)
    assert results == [
        PageResult(
            f"page {width}",
            "ok",
            tokens=3,
            prompt_tokens=10,
            finish_reason="stop",
            attempts=1,
            latency_s=result.latency_s,
        )
        for width, result in zip(widths, results, strict=True)
        if isinstance(result, PageResult)
    ]
    assert llm.seeds == {width: page_seed(7, width) for width in widths}
    assert llm.threads == {"engine"}


def test_pages_are_added_while_others_run() -> None:
    llm = Stepping()
    answers(llm, list(range(30, 60)))
    assert llm.chunks == []
    assert llm.most_running > 4


@pytest.mark.parametrize("kind", [ChatOnly, Stepping])
@settings(max_examples=30, deadline=None)
@given(
    widths=st.lists(st.integers(30, 60), min_size=1, max_size=20, unique=True),
    bad=st.sets(st.integers(30, 60), max_size=4),
)
def test_an_exception_is_narrowed_down_to_the_pages_that_cause_it(
    kind: type[ChatOnly], widths: list[int], bad: set[int]
) -> None:
    results = answers(kind(poison=bad), widths)
    for width, result in zip(widths, results, strict=True):
        assert isinstance(result, PageResult)
        if width in bad:
            assert result.status == "error"
            assert f"can't process [{width}]" in str(result.error)
        else:
            assert result.text == f"page {width}"


def test_a_page_refused_when_it_is_added_touches_no_other() -> None:
    llm = Stepping(refused={31})
    results = answers(llm, [30, 31, 32])
    assert [result.status for result in results if isinstance(result, PageResult)] == ["ok", "error", "ok"]
    assert llm.aborted == []


def test_a_step_that_fails_once_costs_no_page() -> None:
    results = answers(Stepping(breaks_step=True), list(range(30, 40)))
    assert [result.text for result in results if isinstance(result, PageResult)] == [f"page {w}" for w in range(30, 40)]


@pytest.mark.parametrize("kind", [ChatOnly, Stepping])
def test_a_dead_engine_ends_every_page_with_an_error_that_stops_the_run(kind: type[ChatOnly]) -> None:
    results = answers(kind(dies_at=33), list(range(30, 40)), batch_size=100)
    assert {type(result) for result in results} <= {EngineError, PageResult}
    died = [result for result in results if isinstance(result, EngineError)]
    assert died
    assert "the engine has died: DeadError: see above" in str(died[0])
    assert "the same command goes on" in str(died[0])


def test_after_its_death_the_engine_takes_no_page_and_its_watch_tells() -> None:
    async def ask_late() -> None:
        engine = OfflineEngine(
            Stepping(dies_at=30), QUESTION, dict, batch_size=8, is_death=lambda error: True, is_gone=lambda: False
        )
        ticket = engine.encode(Page(Image.new("RGB", (30, 30)), None), 0)
        with pytest.raises(EngineError):
            await engine.ask(ticket, None)  # type: ignore[arg-type]
        with pytest.raises(EngineError):
            await engine.ask(ticket, None)  # type: ignore[arg-type]
        with pytest.raises(EngineError):
            await engine.watch()
        engine.stop()

    asyncio.run(ask_late())


def test_an_engine_whose_process_is_gone_is_noticed_while_a_step_waits_for_ever() -> None:
    class Stuck(Stepping):
        def step(self) -> list[Output]:
            stuck.wait()
            return []

    async def ask_it() -> None:
        engine = OfflineEngine(
            Stuck(), QUESTION, dict, batch_size=8, is_death=lambda _: False, is_gone=stuck_since.is_set
        )
        ticket = engine.encode(Page(Image.new("RGB", (30, 30)), None), 0)
        asking = asyncio.create_task(engine.ask(ticket, None))  # type: ignore[arg-type]
        stuck_since.set()
        with pytest.raises(EngineError, match="its process is gone"):
            await engine.watch()
        engine.stop()
        asking.cancel()

    stuck, stuck_since = threading.Event(), threading.Event()
    asyncio.run(ask_it())
    stuck.set()


def test_the_template_gets_its_arguments() -> None:
    llm = ChatOnly()
    answers(llm, [30])
    assert llm.kwargs == [{"enable_thinking": False}]


@dataclass
class Sure:
    """What vLLM says of a token."""

    logprob: float


def test_log_probabilities_become_confidence_where_the_sampling_asks_for_them() -> None:
    @dataclass
    class Telling(ChatOnly):
        def chat(self, messages: Any, sampling: Any, **more: Any) -> list[Output]:
            outputs = super().chat(messages, sampling, **more)
            for output in outputs:
                output.outputs[0].logprobs = [{1: Sure(0.0)}, {2: Sure(0.0), 9: Sure(-5.0)}, {3: Sure(-50.0)}]
            return outputs

    (result,) = answers(Telling(), [30])
    assert isinstance(result, PageResult)
    assert result.confidence is not None
    assert result.confidence.mean == pytest.approx(2 / 3)
    (untold,) = answers(ChatOnly(), [30])
    assert isinstance(untold, PageResult)
    assert untold.confidence is None


@pytest.mark.parametrize("kind", [ChatOnly, Stepping])
def test_an_attempt_is_asked_with_its_own_sampling(kind: type[ChatOnly]) -> None:
    async def ask() -> PageResult:
        llm = kind()
        engine = OfflineEngine(llm, QUESTION, dict, batch_size=1, is_death=lambda error: False, is_gone=lambda: False)
        try:
            page = Page(Image.new("L", (40, 30)), None)
            ticket = engine.encode(page, 40, Attempt(0.6, 12345, 8000))
            assert ticket.sampling == {"temperature": 0.6, "top_p": 0.9, "seed": 12345, "max_tokens": 8000}
            result = await engine.ask(ticket, no_more)
            assert llm.seeds == {40: 12345}
            return result
        finally:
            engine.stop()

    async def no_more() -> Any:
        raise AssertionError

    assert asyncio.run(ask()).text == "page 40"
