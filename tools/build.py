"""Join each entry in src/ and the rooms it uses into the single file at the top, which is fetched by URL and run alone.

    python3 tools/build.py            write the files
    python3 tools/build.py --check    write nothing; exit 1 where a file is not what src/ says

An entry is read together with the rooms that it imports (`from .pages import Page`), each RULE looks at each room, and
what passes is joined: the entry's header and docstring, all imports but the internal ones, the rooms, the entry.
The source text of a room is kept as it stands. What would read or behave differently once joined is refused, with
the line and the next step; so the rules below are also the rules for writing a room.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import difflib
import io
import itertools
import re
import symtable
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

TABLE = {
    "server": "lighton-ocr-server.py",
    "offline": "lighton-ocr.py",
    "saturate": "lighton-ocr3-saturate.py",
    "parity": "lighton-ocr-parity.py",
}
"""Entry (its name in src/) → the file at the top. An entry that isn't written yet is not built."""

WIDTH = 120
BUILTINS = frozenset(dir(builtins))
GUARD = "__name__ == '__main__'"
MODULE_NAMES = {"__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__path__", "__dict__"}
DIRECTIVE = re.compile(r"(///|noqa|(type|ruff|flake8|mypy|isort|fmt):)")
FILE_WIDE = re.compile(r"# ///|#\s*((ruff|flake8|mypy|isort):|fmt: o)")

# What may be called while a module is imported: it makes a constant, and asks nothing of the machine.
CONSTANT_CALLS = """
    bool bytes dict dict.fromkeys float frozenset int len list max min object range reversed set sorted str
    str.maketrans sum tuple zip collections.namedtuple contextvars.ContextVar dataclasses.field dataclasses.replace
    datetime.timedelta decimal.Decimal enum.auto enum.member enum.nonmember fractions.Fraction functools.partial
    logging.getLogger operator.attrgetter operator.itemgetter pathlib.Path pathlib.PurePosixPath re.compile re.escape
    string.Template struct.Struct textwrap.dedent threading.Event threading.local threading.Lock types.MappingProxyType
    types.SimpleNamespace typing.NamedTuple typing.NewType typing.ParamSpec typing.TypedDict typing.TypeVar
    typing.TypeVarTuple typing.cast
"""
CONSTANT_METHODS = """
    decode encode format get items join keys lower removeprefix removesuffix replace split splitlines strip union upper
    values
"""
CONSTANT_NODES = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Subscript, ast.Slice),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.JoinedStr, ast.FormattedValue, ast.Starred),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension, ast.keyword),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


@dataclass(frozen=True)
class Problem:
    """One thing that stands in the way of joining, and what to do about it."""

    path: str
    line: int
    what: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}. {self.next_step}."


class Refused(Exception):  # noqa: N818 - a verdict, and it reads as one
    """The rooms can't be joined as they stand."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(frozen=True)
class Import:
    """One name brought in by an import statement; `name` is None for `import module`."""

    module: str  # leading dots as written: ".pages" is the room `pages`
    name: str | None
    asname: str | None
    type_only: bool
    line: int

    @property
    def internal(self) -> bool:
        """Whether it is meant for another room, well-formed or not."""
        return self.module.split(".")[0] in ("", "src")

    @property
    def room(self) -> str | None:
        """The room that it names, if it does so in the one form that there is."""
        well_formed = self.name is not None and self.asname is None and re.fullmatch(r"\.\w+", self.module)
        return self.module[1:] if well_formed else None

    @property
    def bound(self) -> str:
        """The name that it makes at the top level."""
        return self.asname or self.name or self.module.split(".")[0]

    @property
    def target(self) -> str:
        """The thing that the name then stands for."""
        if self.name:
            return f"{self.module}.{self.name}"
        return self.module if self.asname else self.bound


@dataclass(frozen=True)
class Room:
    """A module in src/, parsed."""

    name: str
    source: str
    tree: ast.Module
    is_entry: bool

    @property
    def path(self) -> str:
        """Where it is written, as messages name it."""
        return f"src/{self.name}.py"

    @cached_property
    def docstring(self) -> str:
        """Its docstring, or nothing."""
        return (ast.get_docstring(self.tree, clean=False) or "").strip()

    @cached_property
    def head(self) -> list[ast.stmt]:
        """The statements before its code: docstring and imports."""
        after_docstring = self.tree.body[bool(self.docstring) :]
        imports = list(itertools.takewhile(lambda s: is_import(s) or is_types_block(s), after_docstring))
        return [*self.tree.body[: bool(self.docstring)], *imports]

    @cached_property
    def code(self) -> list[ast.stmt]:
        """The statements after the imports."""
        return self.tree.body[len(self.head) :]

    @cached_property
    def imports(self) -> list[Import]:
        """What is imported before the code, internal or not, in order."""
        found: list[Import] = []
        for statement in self.head:
            if is_types_block(statement):
                found += [i for inner in statement.body for i in imports_of(inner, type_only=True)]
            else:
                found += imports_of(statement, type_only=False)
        return found

    def lines(self, first: int, last: int | None) -> str:
        """The source text of some lines, counted from 1, without blank lines around it."""
        return "\n".join(self.source.split("\n")[first - 1 : last]).strip("\n")

    @property
    def header(self) -> str:
        """The comment lines before the docstring."""
        return self.lines(1, self.tree.body[0].lineno - 1)

    @property
    def body(self) -> str:
        """The source text after the imports."""
        return self.lines((self.head[-1].end_lineno or 0) + 1, None)

    @cached_property
    def comments(self) -> list[tuple[int, str]]:
        """All comments, with their lines."""
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]

    @cached_property
    def tables(self) -> list[symtable.SymbolTable]:
        """The scopes of the module, the module itself first."""
        tables = [symtable.symtable(self.source, self.path, "exec")]
        for table in tables:
            tables += [child for child in table.get_children() if "annotation" not in str(child.get_type()).lower()]
        return tables

    @cached_property
    def rebound(self) -> set[str]:
        """The top-level names that a function assigns, by `global`."""
        symbols = [symbol for table in self.tables[1:] for symbol in table.get_symbols()]
        return {s.get_name() for s in symbols if s.is_declared_global() and s.is_assigned()}

    @cached_property
    def defined(self) -> dict[str, int]:
        """The top-level names that it makes itself, with their lines."""
        assigned = {s.get_name() for s in self.tables[0].get_symbols() if s.is_assigned()}
        return {name: self.line_of(name) for name in sorted(assigned | self.rebound)}

    @cached_property
    def runtime_reads(self) -> dict[str, int]:
        """The global names that running it reads, annotations aside."""
        reads: dict[str, int] = {}
        for table in self.tables:
            for symbol in table.get_symbols():
                if symbol.is_referenced() and (table is self.tables[0] or symbol.is_global()):
                    reads.setdefault(symbol.get_name(), self.line_of(symbol.get_name(), table.get_lineno()))
        return reads

    @cached_property
    def annotation_reads(self) -> dict[str, int]:
        """The names in annotations that are not bound somewhere inside it."""
        slots = ("annotation", "returns")
        annotations = [getattr(node, slot, None) for node in ast.walk(self.tree) for slot in slots]
        names = [n for a in annotations if a for n in ast.walk(a) if isinstance(n, ast.Name)]
        inner = {s.get_name() for t in self.tables[1:] for s in t.get_symbols() if s.is_assigned()}
        return {n.id: n.lineno for n in names if n.id not in inner}

    def line_of(self, name: str, after: int = 0) -> int:
        """The first line from `after` on where a name stands, definitions before uses."""
        named = (node for node in ast.walk(self.tree) if isinstance(node, Named))
        lines = (node.lineno for node in named if name == (node.id if isinstance(node, ast.Name) else node.name))
        return next((line for line in lines if line >= after), after or 1)

    def problem(self, where: int | ast.AST, what: str, next_step: str) -> Problem:
        """A problem at a line or a node of this room."""
        line = where if isinstance(where, int) else getattr(where, "lineno", 1)
        return Problem(self.path, line, what, next_step)


Named = ast.Name | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Rooms = Mapping[str, Room]
Rule = Callable[[Room, Rooms], Iterator[Problem]]


# --- reading ----------------------------------------------------------------------------------------------------------


def is_import(statement: ast.AST) -> bool:
    """Whether a statement is an import."""
    return isinstance(statement, ast.Import | ast.ImportFrom)


def is_types_block(statement: ast.stmt) -> TypeGuard[ast.If]:
    """Whether a statement is `if TYPE_CHECKING:` with nothing but imports in it."""
    if not isinstance(statement, ast.If) or ast.unparse(statement.test) != "TYPE_CHECKING":
        return False
    return not statement.orelse and all(map(is_import, statement.body))


def imports_of(statement: ast.AST, type_only: bool) -> Iterator[Import]:
    """The names that an import statement brings in; nothing for any other statement."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield Import(alias.name, None, alias.asname, type_only, statement.lineno)
    elif isinstance(statement, ast.ImportFrom):
        module = "." * statement.level + (statement.module or "")
        for alias in statement.names:
            yield Import(module, alias.name, alias.asname, type_only, statement.lineno)


def parse(name: str, source: str, is_entry: bool) -> Room:
    """A room from its text."""
    try:
        room = Room(name, source, ast.parse(source), is_entry)
    except SyntaxError as error:
        raise Refused([Problem(f"src/{name}.py", error.lineno or 1, f"not Python: {error.msg}", "Mend it")]) from error
    if not room.docstring:
        raise Refused([room.problem(1, "no docstring", "Start with one sentence that says the one thing of the room")])
    return room


def load(sources: Mapping[str, str], entry: str) -> dict[str, Room]:
    """The entry and the rooms that it uses: each after those it imports, in order of first use, the entry last."""
    rooms: dict[str, Room] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        room = parse(name, sources[name], is_entry=name == entry)
        trail = (*trail, name)
        for item in room.imports:
            other = item.room or ""
            if other in trail:
                cycle = " → ".join([*trail[trail.index(other) :], other])
                raise Refused([room.problem(item.line, f"a cycle of imports: {cycle}", "Move what is shared down")])
            if other in sources and other not in rooms:
                visit(other, trail)
        rooms[name] = room

    visit(entry, ())
    return rooms


# --- the rules --------------------------------------------------------------------------------------------------------


def starts_and_ends_as_agreed(room: Room, rooms: Rooms) -> Iterator[Problem]:
    """Header (entry only), docstring, `from __future__ import annotations`; the entry ends with its guard."""
    header = room.header
    if room.is_entry and not re.match(r"(#!.*\n)?# /// script\n(#( .*)?\n)+# ///\n*\Z", header):
        yield room.problem(1, "no script header (PEP 723) above the docstring", "Start with `# /// script` … `# ///`")
    if not room.is_entry and header:
        yield room.problem(1, "something stands above the docstring", "Start the room with its docstring")
    for number, line in enumerate(room.docstring.split("\n"), start=room.tree.body[0].lineno):
        if len(line) > WIDTH - 2 and not room.is_entry:
            what = f"a docstring line of {len(line)} columns, which becomes a comment two columns longer"
            yield room.problem(number, what, f"Wrap it at {WIDTH - 2}")
        if DIRECTIVE.match(line) and not room.is_entry:
            yield room.problem(number, f"the docstring line `{line}` would become a directive", "Put a word before it")
    if "__future__.annotations" not in {item.target for item in room.imports}:
        yield room.problem(1, "no `from __future__ import annotations`", "Add it: the joined file has it for all rooms")
    if room.is_entry and not (room.code and is_guard(room.code[-1])):
        yield room.problem(room.tree.body[-1], "no guard at the end", f"End with `if {GUARD}: …`")


def imports_come_first_and_bare(room: Room, rooms: Rooms) -> Iterator[Problem]:
    """Imports stand between docstring and code, one statement a line, without comments: they are written anew."""
    last = room.head[-1].end_lineno or 0
    for line, text in room.comments:
        if (room.tree.body[0].end_lineno or 0) <= line <= last:
            yield room.problem(line, f"`{text}` is among the imports, where it would be lost", "Put it below them")
        elif FILE_WIDE.match(text) and not (room.is_entry and line < room.tree.body[0].lineno):
            yield room.problem(line, f"`{text}` would hold for the whole joined file", "Use one that holds for a line")
    for statement in room.code:
        if isinstance(statement, ast.If | ast.Try) and any(map(is_import, ast.walk(statement))):
            yield room.problem(statement, "a conditional import", "Import it inside the function that needs it")
        elif is_import(statement):
            yield room.problem(statement, "an import below the code", "Move it up to the others")
    for one, two in itertools.pairwise(room.tree.body):
        if two.lineno <= (one.end_lineno or 0):
            yield room.problem(two, "two statements on one line", "Give each its own")


def imports_have_one_form(room: Room, rooms: Rooms) -> Iterator[Problem]:
    """Internal: `from .pages import Page`, at the top level. Never a star; of the future only annotations."""
    for item in room.imports:
        if item.name == "*":
            yield room.problem(item.line, f"a star import from {item.module}", "Name what is needed")
        elif item.module == "__future__" and item.name != "annotations":
            what = f"`from __future__ import {item.name}` would hold for all rooms"
            yield room.problem(item.line, what, "Do without it")
        elif item.internal and item.asname:
            what = (
                f"`{item.name or item.module}` is imported as `{item.asname}`, a name that the joined file won't have"
            )
            yield room.problem(item.line, what, "Import it by its own name")
        elif item.internal and not item.room:
            what = f"`{item.module}` is imported in a form that can't be joined"
            yield room.problem(item.line, what, "Write `from .room import name`")
    for statement in room.code:
        for node in ast.walk(statement):
            if node is not statement and any(item.internal for item in imports_of(node, type_only=False)):
                yield room.problem(node, "an internal import inside other code", "Move it to the top of the room")


def imported_names_exist(room: Room, rooms: Rooms) -> Iterator[Problem]:
    """What is imported from a room is made there, and stays what it was."""
    for item in room.imports:
        if not item.room or not item.name or item.name == "*":
            continue
        if item.room not in rooms:
            yield room.problem(item.line, f"there is no src/{item.room}.py", "Write it, or mend the name")
        elif item.name not in rooms[item.room].defined:
            what = f"`{item.name}` is not made at the top level of src/{item.room}.py"
            yield room.problem(item.line, what, "Import it from where it is made")
        elif item.name in rooms[item.room].rebound:
            what = (
                f"`{item.name}` is rebound by `global` in src/{item.room}.py, which an importer sees only when joined"
            )
            yield room.problem(item.line, what, "Import a function that returns it")


def one_name_is_one_thing(room: Room, rooms: Rooms) -> Iterator[Problem]:
    """A top-level name stands for the same thing in each room that makes or imports it."""
    for name, target, line in bindings(room):
        earlier = itertools.takewhile(lambda other: other is not room, rooms.values())
        for other in [*earlier, room]:
            there = next((b for b in bindings(other) if b[0] == name and b[1] != target), None)
            if there and (other is not room or there[2] < line):
                what = f"`{name}` is already something else at {other.path}:{there[2]}"
                yield room.problem(line, what, "Rename one of them")


def names_are_its_own(room: Room, rooms: Rooms) -> Iterator[Problem]:
    """A global name that is read is made here, imported here, or a builtin that no other room hides."""
    own = {name for name, _, _ in bindings(room)}
    running = {name for name, _, _ in bindings(room, runtime=True)}
    elsewhere = {name: other.path for other in rooms.values() for name, _, _ in bindings(other)}
    for name, line in {**room.annotation_reads, **room.runtime_reads}.items():
        if name in own:
            if name in room.runtime_reads and name not in running:
                what = f"`{name}` is imported for types only, but read when running"
                yield room.problem(line, what, "Import it outside of TYPE_CHECKING")
        elif name in BUILTINS:
            if name in elsewhere:
                what = f"the builtin `{name}` would be the one of {elsewhere[name]}"
                yield room.problem(line, what, "Rename that one")
        elif name not in MODULE_NAMES:
            hint = f" ({elsewhere[name]} has it: this would work only when joined)" if name in elsewhere else ""
            yield room.problem(line, f"`{name}` is neither made nor imported here{hint}", "Import it")


def nothing_happens_at_import(room: Room, rooms: Rooms) -> Iterator[Problem]:
    """At the top level, and in class bodies: definitions and constants only."""
    next_step = "Move it into a function, or see CONSTANT_CALLS in tools/build.py"
    makers = constant_makers(rooms)
    for statement in without_guard(room):
        for node in work_in(statement, room, makers):
            text = ast.unparse(node).split("\n")[0]
            yield room.problem(node, f"`{text}` is work at import time", next_step)


def nothing_asks_where_it_stands(room: Room, rooms: Rooms) -> Iterator[Problem]:
    """No `__name__`, `__file__`, `globals()`, `__all__`: a joined file answers otherwise. `__doc__` is the entry's."""
    forbidden = {*MODULE_NAMES, "globals", "eval", "exec"} - {"__doc__" if room.is_entry else ""}
    for node in [n for statement in without_guard(room) for n in ast.walk(statement)]:
        if isinstance(node, ast.Name) and node.id in forbidden:
            next_step = "Say it in a constant" if node.id in MODULE_NAMES else "Do without it"
            yield room.problem(node, f"`{node.id}` is another one when joined", next_step)
    if "__all__" in room.defined:
        yield room.problem(room.defined["__all__"], "`__all__` means nothing when joined", "Leave it out")


RULES: tuple[Rule, ...] = (
    starts_and_ends_as_agreed,
    imports_come_first_and_bare,
    imports_have_one_form,
    imported_names_exist,
    one_name_is_one_thing,
    names_are_its_own,
    nothing_happens_at_import,
    nothing_asks_where_it_stands,
)


def bindings(room: Room, runtime: bool = False) -> Iterator[tuple[str, str, int]]:
    """The top-level names of a room: the name, what it stands for, the line."""
    for item in room.imports:
        if item.module != "__future__" and not (runtime and item.type_only):
            yield item.bound, item.target, item.line
    for name, line in room.defined.items():
        yield name, f".{room.name}.{name}", line


def is_guard(statement: ast.stmt) -> bool:
    """Whether a statement is the `if __name__ == "__main__":` of an entry."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == GUARD


def without_guard(room: Room) -> list[ast.stmt]:
    """The code, less the guard that ends an entry."""
    return [s for s in room.code if not (room.is_entry and s is room.code[-1] and is_guard(s))]


def constant_makers(rooms: Rooms) -> frozenset[str]:
    """What may be called at import: CONSTANT_CALLS, the rooms' classes, functions that only return such a call."""
    makers = set(CONSTANT_CALLS.split())
    for room in rooms.values():
        makers |= {f".{room.name}.{s.name}" for s in room.code if isinstance(s, ast.ClassDef)}
        for function in [s for s in room.code if isinstance(s, ast.FunctionDef) and not s.decorator_list]:
            *before, last = function.body
            only_docstring = all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in before)
            if only_docstring and isinstance(last, ast.Return) and last.value and is_constant(last.value, room, makers):
                makers.add(f".{room.name}.{function.name}")
    return frozenset(makers)


def work_in(statement: ast.stmt, room: Room, makers: AbstractSet[str]) -> Iterator[ast.AST]:
    """What a statement does beyond defining something or naming a constant."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Import() | ast.ImportFrom() | ast.Pass():
            pass
        case ast.ClassDef():
            for inner in statement.body:
                yield from work_in(inner, room, makers)
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            if value and not is_constant(value, room, makers):
                yield statement
        case ast.Expr(value=ast.Constant()):
            pass
        case _:
            yield statement


def is_constant(value: ast.AST, room: Room, makers: AbstractSet[str]) -> bool:
    """Whether an expression only makes a value of other constants."""
    match value:
        case ast.Lambda():
            return True
        case ast.Call(func=ast.Attribute(value=receiver, attr=method)) if method in CONSTANT_METHODS.split():
            parts = [receiver, *value.args, *value.keywords]
        case ast.Call():
            first, dot, rest = ast.unparse(value.func).partition(".")
            target = next((target for name, target, _ in bindings(room) if name == first), first)
            if target + dot + rest not in makers:
                return False
            parts = [*value.args, *value.keywords]
        case _ if isinstance(value, CONSTANT_NODES):
            parts = list(ast.iter_child_nodes(value))
        case _:
            return False
    return all(is_constant(part, room, makers) for part in parts)


# --- joining ----------------------------------------------------------------------------------------------------------


def join(rooms: Rooms) -> str:
    """The single file: rooms in the given order, the entry last."""
    *used, entry = rooms.values()
    docstring = entry.lines(entry.tree.body[0].lineno, entry.tree.body[0].end_lineno)
    below = " and the rooms below" if used else ""
    notice = f"# Built from {entry.path}{below} by tools/build.py: edit {'those' if used else 'that'}, not this file."
    contents = ["#", *(line for room in used for line in entry_in_contents(room))] if used else []
    sections = [f"{heading(room)}\n\n\n{room.body}" for room in used if room.body]
    sections.append(f"{title(entry.name, 'The script itself.')}\n\n\n{entry.body}")
    top = [entry.header + "\n" + docstring, "\n".join([notice, *contents]), merged_imports(rooms.values())]
    return "\n\n".join(top) + "\n\n" + "\n\n\n".join(sections) + "\n"


def title(name: str, subject: str) -> str:
    """A visible rule with a room's name, and what it is about."""
    return f"# ---- {name} ".ljust(WIDTH, "-") + f"\n# {subject}"


def heading(room: Room) -> str:
    """The rule of a room, and its docstring as comment lines."""
    first, *more = room.docstring.split("\n")
    return "\n".join([title(room.name, first.rstrip()), *(f"# {line}".rstrip() for line in more)])


def entry_in_contents(room: Room) -> list[str]:
    """A room's line in the list at the top: its name and the first sentence of its docstring."""
    paragraph = " ".join(room.docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
    return textwrap.wrap(
        f"{room.name}: {sentence}",
        width=WIDTH,
        initial_indent="#   ",
        subsequent_indent="#       ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def merged_imports(rooms: Iterable[Room]) -> str:
    """The imports of all rooms but the internal ones, in ruff's order."""
    rooms = list(rooms)
    found = {(item.module, item.name, item.asname, item.type_only) for room in rooms for item in room.imports}
    items = [Import(*key, line=0) for key in found if not key[0].startswith(".")]
    running = {(item.bound, item.target) for item in items if not item.type_only}
    for_types = [item for item in items if item.type_only and (item.bound, item.target) not in running]
    if not for_types and not any("TYPE_CHECKING" in room.body for room in rooms):
        items = [item for item in items if item.target != "typing.TYPE_CHECKING"]
    text = "\n\n".join(import_sections([item for item in items if not item.type_only], indent=""))
    if for_types:
        text += "\n\nif TYPE_CHECKING:\n" + "\n\n".join(import_sections(for_types, indent="    "))
    return text


def import_sections(items: list[Import], indent: str) -> Iterator[str]:
    """The statements of the future, of the standard library, of third parties: whichever there are."""
    for _, section in itertools.groupby(sorted(items, key=section_of), key=section_of):
        statements: dict[tuple[str, str | None, str | None], list[Import]] = {}
        for item in sorted(section, key=name_order):
            apart = (item.name or "", item.asname) if item.asname or not item.name else (None, None)
            statements.setdefault((item.module, *apart), []).append(item)
        yield "\n".join(indent + import_statement(s, indent) for s in sorted(statements.values(), key=statement_order))


def import_statement(items: list[Import], indent: str) -> str:
    """One import statement; where it is too long, a name a line."""
    module = items[0].module
    names = [f"{i.name or module} as {i.asname}" if i.asname else i.name or module for i in items]
    if not items[0].name:
        return f"import {names[0]}"
    line = f"from {module} import {', '.join(names)}"
    if len(indent + line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"{indent}    {name},\n" for name in names) + f"{indent})"


def section_of(item: Import) -> int:
    """Which group of imports it belongs to."""
    package = item.module.split(".")[0]
    return 0 if package == "__future__" else 1 if package in sys.stdlib_module_names else 2


def name_order(item: Import) -> tuple[object, ...]:
    """Ruff's order within a statement: CONSTANTS, Classes, others; numbers by value; case last."""
    name = item.name or ""
    kind = 0 if len(name) > 1 and name.isupper() else 1 if name[:1].isupper() else 2
    return kind, natural(name.lower()), natural(name), natural(item.asname or "")


def statement_order(items: list[Import]) -> tuple[object, ...]:
    """Ruff's order within a section: `import x` before `from x import y`, each by module."""
    module = items[0].module
    return bool(items[0].name), natural(module.lower()), natural(module), name_order(items[0])


def natural(text: str) -> list[tuple[str, int]]:
    """A key by which `x9` comes before `x10`."""
    return [("0", int(part)) if part.isdigit() else (part, 0) for part in re.findall(r"\d+|\D", text)]


# --- files ------------------------------------------------------------------------------------------------------------


def build(sources: Mapping[str, str], entry: str) -> str:
    """The single file of an entry, from the texts in src/ by name; or Refused."""
    rooms = load(sources, entry)
    problems = [problem for room in rooms.values() for rule in RULES for problem in rule(room, rooms)]
    if problems:
        raise Refused(sorted(set(problems), key=lambda p: (p.path, p.line, p.what)))
    text = join(rooms)
    if len(re.findall(r"^# /// \w+$", text, re.MULTILINE)) != 1:
        what = "a second line that looks like the start of a script header would stand in the joined file"
        raise Refused([Problem(rooms[entry].path, 1, what, "Write it otherwise, for instance as '# ' + '/// script'")])
    return text


def difference(path: str, old: str, new: str) -> str:
    """The head of the difference between what is there and what should be."""
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), f"{path} (as it is)", f"{path} (from src/)", "", ""
    )
    return "\n".join(itertools.islice(lines, 20))


def main(argv: list[str] | None = None) -> int:
    """Build or check every file of the table; 1 if something is refused or differs."""
    parser = argparse.ArgumentParser(prog="tools/build.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write nothing")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the repository (default: this)")
    options = parser.parse_args(argv)
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(options.root.glob("src/*.py"))}
    failed = False
    for entry, path in TABLE.items():
        target = options.root / path
        there = target.read_text(encoding="utf-8") if target.exists() else ""
        try:
            text = build(sources, entry) if entry in sources else ""
        except Refused as refused:
            print(refused, file=sys.stderr)
            failed = True
            continue
        if text == there:
            continue
        if options.check:
            failed = True
            next_step = "run `python3 tools/build.py`" if text else f"src/{entry}.py is gone: delete {path}"
            print(f"{difference(path, there, text)}\n{path} is not what src/ says: {next_step}", file=sys.stderr)
        elif text:
            target.write_text(text, encoding="utf-8", newline="\n")
            print(f"{path}: written from src/{entry}.py")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
