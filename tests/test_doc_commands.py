"""Every command in README.md and SERVING.md is understood by the program that it is for; what can run here is run.

A command of a kind that is not known here fails: add its kind, and with it the parser that judges it, or the test that
runs it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from src.models import catalogue
from src.offline import OfflineOptions
from src.options import CommonOptions, parse_options
from src.saturate import SaturateOptions
from src.server import ServerOptions
from src.startup import CAUSES, find_cause
from tests.runs import ROOT
from tests.system_tools import system_tool
from tests.vllm_cpu import CpuVllm, cpu_engine_env
from tools.doc_options import PARSERS

PAGES = ("README.md", "SERVING.md")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = "bash"
# Fenced blocks in other languages hold no commands.
NO_COMMANDS = {"text", "python", "json", "yaml"}
VARIABLE = re.compile(r"[A-Z_]+=\S*")
SUBSTITUTION = re.compile(r"\$\([^()]*\)")
OPTIONS: dict[str, type[CommonOptions]] = {
    "lighton-ocr-server.py": ServerOptions,
    "lighton-ocr3-saturate.py": SaturateOptions,
    "lighton-ocr.py": OfflineOptions,
}


@dataclass(frozen=True)
class Command:
    """A command of a page, its words as the shell gives them; variables that stand before it are left out."""

    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {' '.join(self.words)[:60]}"

    @property
    def program(self) -> str:
        """The program, `uv` of a clone being uv."""
        return self.words[0].removeprefix(".uv/bin/")


def fenced_blocks(page: str) -> Iterator[tuple[int, str, str]]:
    """The line, the language and the text of each fenced block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield text.count("\n", 0, match.start(2)) + 1, match[1], match[2]


def commands_of(page: str, line: int, block: str) -> Iterator[Command]:
    """The commands of a block: lines that go on after a backslash or && are joined, comments are dropped."""
    number, pending, begun = line, "", line
    for text in block.splitlines():
        begun = begun if pending else number
        pending += text.removesuffix("\\") + (" " if text.endswith(("\\", "&&")) else "")
        number += 1
        if not text.endswith(("\\", "&&")):
            for words in split_words(pending):
                yield Command(page, begun, words)
            pending = ""
    assert not pending, f"{page}:{begun}: the command goes on after its block"


def split_words(text: str) -> Iterator[tuple[str, ...]]:
    """The words of each command on a line."""
    words: list[str] = []
    for word in [*shlex.split(SUBSTITUTION.sub("…", text), comments=True), "&&"]:
        if word != "&&":
            words.append(word)
            continue
        while words and VARIABLE.fullmatch(words[0]):
            words.pop(0)
        if words:
            yield tuple(words)
        words = []


ALL = [
    command
    for page in PAGES
    for line, language, block in fenced_blocks(page)
    if language == SHELL
    for command in commands_of(page, line, block)
]


def of_kind(*programs: str) -> list[Command]:
    """The commands of these programs."""
    return [command for command in ALL if command.program in programs]


# --- what judges a command, by its program ---------------------------------------------------------------------------


def uv_command(words: Sequence[str]) -> None:
    """`uv run SCRIPT …` of ours, or pytest."""
    assert words[0] == "run", words
    script, *rest = words[1:]
    if script == "pytest":
        assert all(Path(ROOT, word).exists() for word in rest if word.endswith(".py"))
        return
    assert script in PARSERS, f"{script} is no script of ours"
    our_script(script, rest)


def our_script(script: str, words: Sequence[str]) -> None:
    """One of our scripts: its own parser takes the words, and what goes on to vLLM stands after --."""
    parser = PARSERS[script]()
    if script in OPTIONS:
        parse_options(parser, OPTIONS[script], words)
    else:
        parser.parse_args(words)


def hf_command(words: Sequence[str]) -> None:
    """The real `hf`: its dry run for what starts a job, its parser for the rest. The network is not asked."""
    if "run" not in words[:3]:
        parse_by_click(words)
        return
    end = words.index("run") + 1
    environment = os.environ | {"HF_TOKEN": "hf_not_a_token", "NO_COLOR": "1"}
    done = run([str(Path(sys.executable).parent / "hf"), *words[:end], "--dry-run", *words[end:]], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    # what looks like a flag and is none is taken for the script, or for a word of its
    resolved = dict(line.split(None, 1) for line in done.stdout.splitlines() if line.startswith("  "))
    if "--flavor" in words:
        assert resolved["flavor"] == words[words.index("--flavor") + 1]
    assert resolved["image"] in {profile.image for profile in catalogue()}
    if "uv" in words[:end]:
        our_script(resolved["script"], words[words.index(resolved["script"]) + 1 :])
    else:
        assert resolved["command"].startswith("vllm serve ")


def parse_by_click(words: Sequence[str]) -> None:
    """Walk down hf's commands to the one that is named, and have it parse the rest without running it."""
    import click
    from huggingface_hub.cli.hf import app

    command: click.Command = app
    context = click.Context(command, info_name="hf")
    rest = list(words)
    while isinstance(command, click.Group):
        found = command.get_command(context, rest[0])
        assert found is not None, f"hf has no {' '.join(words)}"
        context = click.Context(found, info_name=rest.pop(0), parent=context)
        command = found
    command.parse_args(context, rest)


@functools.cache
def compose_services(file: str) -> tuple[str, ...]:
    """The services of a file of Docker Compose, which finds nothing wrong with it."""
    environment = os.environ | {"VLLM_API_KEY": "x", "GRAFANA_PASSWORD": "x"}
    done = run([system_tool("docker-compose"), "-f", file, "config", "--services"], environment)
    assert done.returncode == 0, done.stderr
    return tuple(done.stdout.split())


def compose_command(words: Sequence[str]) -> None:
    """`docker compose -f FILE …`: the file is valid, and the subcommand has the options."""
    assert list(words[:2]) == ["compose", "-f"], words
    file, subcommand, *rest = words[2:]
    services = compose_services(file)
    offered = run([system_tool("docker-compose"), subcommand, "--help"]).stdout
    assert "Usage:" in offered, subcommand
    for word in rest:
        assert word in (offered if word.startswith("-") else services), word


def promtool_command(words: Sequence[str]) -> None:
    """Run here: it only reads."""
    done = run([system_tool("promtool"), *words])
    assert done.returncode == 0, done.stdout + done.stderr


def router_command(words: Sequence[str]) -> None:
    """The router's own parser."""
    launcher = pytest.importorskip("vllm_router.launch_router", reason="vllm-router is built for Linux on x86-64 only")
    launcher.parse_router_args(list(words))


def smoke_command(words: Sequence[str]) -> None:
    """serving/smoke.sh takes one URL here; tests/test_serving_proxy.py runs it."""
    assert re.fullmatch(r"https?://[\w.:-]+", words[0])
    assert len(words) == 1


def pip_command(words: Sequence[str]) -> None:
    """`python3 -m pip install --quiet --target .uv uv`: pip's own parser, by a dry run of nothing."""
    assert list(words) == ["-m", "pip", "install", "--quiet", "--target", ".uv", "uv"]


def export_command(words: Sequence[str]) -> None:
    """`export NAME=VALUE …`."""
    assert all(VARIABLE.fullmatch(word.partition("=")[0] + "=") for word in words)


def judged_by_vllm(words: Sequence[str]) -> None:
    """Flags go to vLLM's parser, which the tests marked `engine` ask for all commands at once."""
    assert words[0] == "serve"


def ascend_command(words: Sequence[str]) -> None:
    """Its words go to `vllm serve`; tests/test_serving.py runs it."""
    assert words


KINDS: dict[str, Callable[[Sequence[str]], None]] = {
    "uv": uv_command,
    "hf": hf_command,
    "docker": compose_command,
    "promtool": promtool_command,
    "vllm-router": router_command,
    "serving/smoke.sh": smoke_command,
    "serving/ascend.sh": ascend_command,
    "python3": pip_command,
    "export": export_command,
    "vllm": judged_by_vllm,
}


def run(command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program at the top of the repository, to its end."""
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120, check=False)


# --- the tests -------------------------------------------------------------------------------------------------------


def test_every_fenced_block_says_its_language() -> None:
    blocks = [(page, line, language) for page in PAGES for line, language, _ in fenced_blocks(page)]
    assert [block for block in blocks if block[2] not in {SHELL, *NO_COMMANDS}] == []
    assert len(blocks) >= 20


@pytest.mark.parametrize("command", ALL, ids=str)
def test_a_command_is_understood_by_its_program(command: Command) -> None:
    assert command.program in KINDS, (
        f"{command}: nobody judges commands of {command.program}; see this file's docstring"
    )
    KINDS[command.program](list(command.words[1:]))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("uv run lighton-ocr-server.py in out --concurency 4", SystemExit),
        ("uv run no-such-script.py in out", AssertionError),
        ("uv run lighton-ocr-parity.py a b --htlm x", SystemExit),
        ("uv run rapidocr-server.py --prot 1", SystemExit),
        ("hf jobs uv run --flavour l4x1 lighton-ocr-server.py a b", AssertionError),
        ("hf jobs pss", AssertionError),
        ("hf jobs logs", Exception),
        ("docker compose -f serving/docker-compose.yml up --detatch", AssertionError),
        ("promtool check config serving/alerts.yml", AssertionError),
        ("vllm-router --polcy round_robin", SystemExit),
        ("serving/smoke.sh 127.0.0.1:8000", AssertionError),
    ],
)
def test_a_wrong_command_would_be_found(
    text: str, wrong: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = commands_of("x.md", 1, text + "\n")
    with pytest.raises(wrong):
        KINDS[command.program](list(command.words[1:]))


def test_commands_are_found_behind_variables_ampersands_and_line_ends() -> None:
    block = "A=1 B=… vllm serve m \\\n    --x '{\"a\": 1}'  # why\npip a &&\nuv b\n"
    found = [(command.line, command.words) for command in commands_of("x.md", 7, block)]
    assert found == [(7, ("vllm", "serve", "m", "--x", '{"a": 1}')), (9, ("pip", "a")), (9, ("uv", "b"))]


@pytest.mark.engine
def test_vllm_takes_the_arguments_of_every_command_that_starts_it(cpu_engine: CpuVllm) -> None:
    """All in one process of vLLM's environment, as its parser takes seconds to be made."""
    serve = [list(command.words[1:]) for command in of_kind("vllm")]
    serve += [
        list(command.words)[command.words.index("vllm") + 1 :] for command in of_kind("hf") if "vllm" in command.words
    ]
    passed_on = [list(command.words) for command in of_kind("uv") if "--" in command.words]
    serve += [["serve", "model", *words[words.index("--") + 1 :]] for words in passed_on]
    serve += [["serve", "model", *command.words[1:]] for command in of_kind("serving/ascend.sh")]
    serve += [["serve", "model", *ascend_flags()]]
    assert len(serve) >= 10
    wrong = ["serve", "model", "--no-such-flag"]
    done = subprocess.run(
        [str(cpu_engine.python), "-c", PARSE_SERVE],
        input=json.dumps([*serve, wrong]),
        capture_output=True,
        text=True,
        env=cpu_engine_env(),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    refused = json.loads(done.stdout.splitlines()[-1])
    assert refused == [wrong], done.stderr[-3000:]


PARSE_SERVE = """
import json, sys
import vllm.entrypoints.cli.serve as serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(prog="vllm")
subparsers = parser.add_subparsers()
for command in serve.cmd_init():
    command.subparser_init(subparsers)
refused = []
for words in json.load(sys.stdin):
    try:
        parser.parse_args(words)
    except SystemExit:
        refused.append(words)
print(json.dumps(refused))
"""


def ascend_flags() -> list[str]:
    """The flags that serving/ascend.sh gives to vLLM."""
    text = (ROOT / "serving/ascend.sh").read_text().partition("exec vllm serve")[2].replace("\\\n", " ")
    return [word for word in shlex.split(text)[1:] if word != "$@"]


# --- the causes of a start that failed -------------------------------------------------------------------------------


def rows_of_causes() -> list[tuple[str, str, str]]:
    """Line of the log, cause and remedy, as SERVING.md has them in its section on starts."""
    section = (
        (ROOT / "SERVING.md").read_text(encoding="utf-8").partition("### It does not start")[2].partition("###")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [(log.strip("` "), cause, remedy) for log, cause, remedy in rows]


def test_each_cause_of_a_failed_start_stands_in_serving_md_with_a_log_line_that_shows_it() -> None:
    rows = rows_of_causes()
    assert [find_cause(log) for log, _, _ in rows] == list(CAUSES)
    for (_, what, remedy), cause in zip(rows, CAUSES, strict=True):
        assert without_code(what) == without_code(cause.what)
        assert without_code(remedy) == without_code(cause.remedy.replace(" {image}", ""))


def without_code(text: str) -> str:
    """A text without the marks of code."""
    return text.replace("`", "")
