"""OPTIONS.md: every option of every script, from the parsers themselves."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from src.offline import OfflineOptions
from src.options import make_parser
from src.parity_options import build_parity_parser
from src.saturate import SaturateOptions
from src.server import ServerOptions
from tools.doc_tables import table

ROOT = Path(__file__).parents[1]
HEAD = """\
# Options

Written from the scripts' own parsers by `tools/docs.py`; `--help` says the same.
Columns, exit codes and the last line on stdout: [CONTRACT.md](CONTRACT.md).
"""
DASHES = "Everything after `--` goes to `vllm serve` unchanged."
DEFAULT = re.compile(r" ?\(default(?: here)?: (?P<value>(?:[^()]|\([^()]*\))*)\)")


def _rapidocr_parser() -> argparse.ArgumentParser:
    """The parser of the script that stands alone; its name is none that could be imported."""
    spec = importlib.util.spec_from_file_location("rapidocr_server", ROOT / "rapidocr-server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    parser: argparse.ArgumentParser = module.make_parser()
    return parser


PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "lighton-ocr-server.py": lambda: make_parser(ServerOptions, prog="lighton-ocr-server.py", description=""),
    "lighton-ocr3-saturate.py": lambda: make_parser(SaturateOptions, prog="lighton-ocr3-saturate.py", description=""),
    "lighton-ocr.py": lambda: make_parser(OfflineOptions, prog="lighton-ocr.py", description=""),
    "lighton-ocr-parity.py": build_parity_parser,
    "rapidocr-server.py": _rapidocr_parser,
}
"""A script → how its parser is made."""

AFTER_DASHES = {
    "lighton-ocr-server.py": DASHES,
    "lighton-ocr3-saturate.py": DASHES,
    "lighton-ocr.py": "Everything after `--` goes to the engine, as `vllm serve` takes it.",
}


def options_page(overview: str) -> str:
    """The whole page, a table of what goes into each script and what comes out at its head."""
    return "\n".join([HEAD, f"{overview}\n", *(part for script in PARSERS for part in _section(script))])


def _section(script: str) -> Iterator[str]:
    yield f"## `{script}`\n"
    for group in PARSERS[script]()._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if actions:
            rows = [[_words(action), *_default_and_help(action)] for action in actions]
            name = {"options": "", "positional arguments": "arguments"}.get(group.title or "", group.title or "")
            yield f"### {name}\n" if name else ""
            yield table(["option", "default", "meaning"], rows) + "\n"
    if script in AFTER_DASHES:
        yield AFTER_DASHES[script] + "\n"


def _words(action: argparse.Action) -> str:
    """The flag and what it takes, as one types it."""
    value = "{" + ",".join(action.choices) + "}" if action.choices else action.metavar or action.dest.upper()
    if not action.option_strings:
        return f"`{value}`"
    if action.nargs == 0:
        return ", ".join(f"`{flag}`" for flag in action.option_strings)
    value = f"[{value}]" if action.nargs == "?" else value
    return ", ".join(f"`{flag} {value}`" for flag in action.option_strings)


def _default_and_help(action: argparse.Action) -> tuple[str, str]:
    """The default and the meaning, taken apart where the help text has both."""
    told = action.help or ""
    told = told.replace("%%", "%").replace("%(default)s", str(action.default))
    if match := DEFAULT.search(told):
        return match["value"], told[: match.start()] + told[match.end() :]
    if not action.option_strings:
        return "", told
    return ("no" if action.nargs == 0 else str(action.default) if action.default is not None else ""), told
