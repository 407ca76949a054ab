"""What tools/build.py joins runs and reads as in src/; what would not is refused, with the line and the next step."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.build import TABLE, Refused, build, main

ROOT = Path(__file__).parents[1]
BUILT = sorted(name for name in TABLE.values() if (ROOT / name).exists())

ENTRY = '''
# /// script
# requires-python = ">=3.11"
# dependencies = []
# ///
"""Say what the rooms say.

A second paragraph, and a [bracket].
"""

from __future__ import annotations

import sys

from .words import Word, greet

# The entry's own comment.
NAMES = ("Ada", "Bo")


def main() -> int:
    """Greet all."""
    lines = [greet(Word(name)) for name in NAMES]
    sys.stdout.write("\\n".join([*lines, (__doc__ or "")[:3], *sys.argv[1:]]) + "\\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''

WORDS = '''
"""What is said. It has a second sentence.

    indented = "kept"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .numbers import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL import Image

    from .numbers import Count

VOWELS = re.compile(r"[aeiou]")


@dataclass(frozen=True)
class Word:
    """A word."""

    text: str

    def parts(self, image: Image.Image | None = None) -> Iterator[str]:
        """Its letters."""
        yield from self.text


def greet(word: Word) -> str:
    """Greet; `total` is only a local name here."""
    total: Count = count(word.text)
    return f"{word.text}: {total.n} letters, {len(VOWELS.findall(word.text))} vowels"  # as it is
'''

NUMBERS = '''
"""How many."""

from __future__ import annotations

import os.path
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

HERE = Path("x")
SEPARATOR = os.path.sep
DIGITS = {str(n): n for n in range(10)}
_SPACE = re.compile(r"\\s")

# A comment above a class.


class Count(NamedTuple):
    """A count."""

    n: int


def count(text: str) -> Count:
    """Count letters."""
    return Count(len(_SPACE.sub("", str(PurePosixPath(text)))))
'''


def house(**changes: str) -> dict[str, str]:
    """The texts of a small src/, with some rooms changed or added."""
    texts = {"server": ENTRY, "words": WORDS, "numbers": NUMBERS, **changes}
    return {name: text.lstrip("\n") for name, text in texts.items()}


def room(code: str) -> str:
    """A room with this code under its docstring."""
    return '"""A room."""\n\nfrom __future__ import annotations\n\n' + dedent(code).lstrip("\n")


def entry(code: str) -> str:
    """An entry with this code before its guard."""
    head = ENTRY.lstrip("\n").partition("import sys")[0]
    guard = ENTRY[ENTRY.index("if __name__") :]
    return f"{head}import sys\n{dedent(code)}\n\ndef main() -> int:\n    return 0\n\n\n{guard}"


def written(root: Path, sources: dict[str, str]) -> Path:
    """A tree with these rooms in src/."""
    (root / "src").mkdir(parents=True, exist_ok=True)
    for name, text in sources.items():
        (root / "src" / f"{name}.py").write_text(text, encoding="utf-8")
    return root


def output(*command: str | Path, cwd: Path) -> str:
    """What a command prints; it must succeed and say nothing else."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def ruff(*arguments: str, text: str) -> subprocess.CompletedProcess[str]:
    """Ruff with the repository's own settings, on a text, as if it stood at the top."""
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(ROOT / "joined.py"), "-"]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=60)


def assert_ruff_has_nothing_to_say(text: str) -> None:
    check = ruff("check", "--no-cache", text=text)
    assert check.returncode == 0, check.stdout
    assert ruff("format", "--no-cache", text=text).stdout == text


# --- what is joined ---------------------------------------------------------------------------------------------------


def test_the_joined_file_alone_does_what_the_package_does(tmp_path: Path) -> None:
    written(tmp_path / "tree", house())
    alone = tmp_path / "elsewhere" / "k3v9 w.py"
    alone.parent.mkdir()
    alone.write_text(build(house(), "server"), encoding="utf-8")
    package = output(sys.executable, "-m", "src.server", "x", "y", cwd=tmp_path / "tree")
    assert output(sys.executable, "-I", "-S", alone, "x", "y", cwd=alone.parent) == package
    assert package == "Ada: 3 letters, 1 vowels\nBo: 2 letters, 1 vowels\nSay\nx\ny\n"


def test_the_joined_file_reads_as_if_written_by_hand() -> None:
    text = build(house(), "server")
    before, _, rest = text.partition("\n# ---- numbers -")
    assert before == dedent(
        '''\
        # /// script
        # requires-python = ">=3.11"
        # dependencies = []
        # ///
        """Say what the rooms say.

        A second paragraph, and a [bracket].
        """

        # Built from src/server.py and the rooms below by tools/build.py: edit those, not this file.
        #
        #   numbers: How many.
        #   words: What is said.

        from __future__ import annotations

        import os.path
        import re
        import sys
        from dataclasses import dataclass
        from pathlib import Path, PurePosixPath
        from typing import TYPE_CHECKING, NamedTuple

        if TYPE_CHECKING:
            from collections.abc import Iterator

            from PIL import Image
        '''
    )
    assert [line.split()[2] for line in rest.split("\n") if line.startswith("# ---- ")] == ["words", "server"]
    assert '# What is said. It has a second sentence.\n#\n#     indented = "kept"\n\n\nVOWELS = ' in rest
    for source in house().values():
        code = source[source.index("\n\n", source.rindex("import ")) :].strip("\n")
        assert code in text


def test_ruff_leaves_the_joined_file_as_it_is() -> None:
    assert_ruff_has_nothing_to_say(build(house(), "server"))


@pytest.mark.parametrize("first", ["X = 1", "def f() -> int:\n    return X\n\n\nX = 1", "# why\nX = 1"])
@pytest.mark.parametrize("types", ["", "\nif TYPE_CHECKING:\n    from pathlib import Path\n"])
def test_blank_lines_are_right_whatever_a_room_begins_with(first: str, types: str) -> None:
    typing = "from typing import TYPE_CHECKING\n" if types else ""
    more = "\nY: Path | None = None\n" if types else ""
    rest = "\n\nclass Count:\n    n = X\n\n\ndef count(text: str) -> Count:\n    return Count()\n"
    text = build(house(numbers=room(f"{typing}{types}\n\n{first}\n{more}{rest}")), "server")
    assert ruff("check", "--select", "I", "--no-cache", text=text).returncode == 0
    assert ruff("format", "--no-cache", text=text).stdout == text


WORDS_TO_ORDER = "Image aB _x PNG x9 x10 X10 path Path OS_NAME b Ab utf8 UTF_8 e2e E1 A a"
MODULES_TO_ORDER = "os os.path re PIL PIL.Image numpy collections.abc datasets x9 x10 Zed _thread http2 http10"
NAMES = st.sampled_from(WORDS_TO_ORDER.split())
MODULES = st.sampled_from(MODULES_TO_ORDER.split())


@given(st.sets(st.tuples(MODULES, NAMES, st.booleans()), min_size=1, max_size=12), st.sets(MODULES))
@settings(max_examples=40, deadline=None)
def test_imports_are_in_ruffs_order(names: set[tuple[str, str, bool]], modules: set[str]) -> None:
    once = {name: (module, alias) for module, name, alias in sorted(names)}
    lines = [f"from {m} import {n}" + (f" as {n}_" if alias else "") for n, (m, alias) in once.items()]
    lines += [f"import {module} as m{n}" for n, module in enumerate(sorted(modules))]
    text = build({"server": entry("\n".join(lines) + "\n")}, "server")
    assert ruff("check", "--select", "I", "--diff", "--no-cache", text=text).stdout == ""


def test_a_long_import_has_a_line_for_each_name() -> None:
    names = sorted(f"a_rather_long_name_{n}" for n in range(8))
    code = f"from itertools import {', '.join(names)}\nX = ({', '.join(names)})\n"
    text = build({"server": entry(code)}, "server")
    assert "from itertools import (\n    a_rather_long_name_0,\n" in text
    assert ruff("check", "--select", "I", "--no-cache", text=text).returncode == 0


def test_type_checking_is_not_imported_when_only_rooms_were_under_it() -> None:
    words = room(
        """
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from .numbers import Count


        class Word:
            def __init__(self, text: str) -> None:
                self.text = text


        def greet(word: Word, count: Count | None = None) -> str:
            return word.text
        """
    )
    text = build(house(words=words), "server")
    assert "TYPE_CHECKING" not in text
    assert "# ---- numbers -" in text


def test_an_import_for_types_gives_way_to_the_same_one_at_run_time() -> None:
    numbers = NUMBERS.replace("import os.path", "import os.path\nfrom collections.abc import Iterator").replace(
        "HERE =", "LAZY = (Iterator,)\nHERE ="
    )
    text = build(house(numbers=numbers), "server")
    assert text.count("import Iterator") == 1


def test_rooms_come_after_those_they_use_in_order_of_first_use() -> None:
    rooms = {
        "server": entry("\nfrom .b import b\nfrom .a import a\n\nX = (a, b)\n"),
        "a": room("from .c import c\n\n\ndef a() -> int:\n    return c()\n"),
        "b": room("from .c import c\n\n\ndef b() -> int:\n    return c()\n"),
        "c": room("def c() -> int:\n    return 1\n"),
        "unused": room("X = open\n"),
    }
    text = build(rooms, "server")
    assert [line.split()[2] for line in text.split("\n") if line.startswith("# ---- ")] == ["c", "b", "a", "server"]


def test_an_entry_without_rooms_is_joined_too(tmp_path: Path) -> None:
    text = build({"server": entry("")}, "server")
    assert "# Built from src/server.py by tools/build.py: edit that, not this file.\n" in text
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    assert output(sys.executable, "-I", "-S", "a.py", cwd=tmp_path) == ""


def test_what_is_built_depends_on_the_texts_alone(tmp_path: Path) -> None:
    texts = set()
    for seed in "0", "1", "77":
        root = written(tmp_path / seed, dict(sorted(house().items(), reverse=seed == "1")))
        environment = {"PYTHONHASHSEED": seed, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run(
            [sys.executable, ROOT / "tools" / "build.py", "--root", root], env=environment, check=True, timeout=60
        )
        texts.add((root / TABLE["server"]).read_bytes())
    assert texts == {build(house(), "server").encode()}


GOOD = [
    "X: Final = object()\n",
    "A, (B, *C) = 1, (2, 3)\n",
    "X = frozenset('a b'.split()) | {'c'}\n",
    "X = {k: tuple(sorted(v)) for k, v in {'a': 'cb'}.items() if k}\n",
    "class P:\n    '''P.'''\n\n    x: int = 3\n\n\nX = (P(), P())\n",
    "class E(ValueError):\n    pass\n\n\nX = lambda: print(1)\n",
    "@dataclass\nclass D:\n    x: list[int] = field(default_factory=list)\n",
    "T = TypeVar('T')\n\n\ndef f(x: T) -> T:\n    return x\n",
    "X = Count(3)\n",
    "def f(x: int) -> object:\n    '''F.'''\n    return field(default=x)\n\n\n"
    "@dataclass\nclass D:\n    x: object = f(1)\n",
    "_n = 0\n\n\ndef f() -> None:\n    global _n\n    _n += 1\n",
    "def f(words: int) -> int:\n    Word = greet = words\n    return Word + greet\n",
    "def f() -> Inner:\n    class Inner:\n        pass\n\n    return Inner()\n",
    "def f() -> None:\n    from PIL import Image\n\n    print([Image for x in (1,) if (y := x)], y)\n",
    "class C:\n    a = 1\n    b = a\n\n    def m(self) -> object:\n        return super().__init__, __class__\n",
]


@pytest.mark.parametrize("code", GOOD)
def test_ordinary_code_is_let_through(code: str) -> None:
    head = (
        "from dataclasses import dataclass, field\nfrom typing import Final, TypeVar\n\nfrom .numbers import Count\n\n"
    )
    more = room(head + code + "\n\ndef more() -> int:\n    return 1\n")
    text = build(
        house(more=more, server=entry("\nfrom .more import more\nfrom .words import Word\n\nZ = (more, Word)\n")),
        "server",
    )
    assert code in text


# --- what is refused --------------------------------------------------------------------------------------------------

TYPES = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
BAD = {
    # one name, one thing
    "def count() -> int:\n    return 1\n": (
        "src/numbers.py:24: `count` is already something else at src/more.py:5. Rename one of them."
    ),
    "Count = 3\n": "`Count` is already something else at src/more.py:5",
    "_SPACE: int = 3\n": "`_SPACE` is already something else",
    "A, (_SPACE, *B) = 1, (2,)\n": "`_SPACE` is already something else",
    "class greet:\n    pass\n": "`greet` is already something else",
    "from os import path as re\n\nX = re\n": "`re` is already something else",
    "import collections as Path\n\nX = Path\n": "`Path` is already something else",
    "def f() -> None:\n    global _SPACE\n    _SPACE = 1\n": "`_SPACE` is already something else",
    # the form of imports
    "from .numbers import count as c\n\nX = c\n": (
        "src/more.py:5: `count` is imported as `c`, a name that the joined file won't have. Import it by its own name."
    ),
    "from . import numbers\n\nX = numbers\n": (
        "src/more.py:5: `.` is imported in a form that can't be joined. Write `from .room import name`."
    ),
    "from .. import numbers\n\nX = numbers\n": "`..` is imported in a form",
    "import src.numbers\n\nX = src\n": "`src.numbers` is imported in a form",
    "import src.numbers as n\n\nX = n\n": "`src.numbers` is imported as `n`, a name that the joined file won't have",
    "from src.numbers import count\n\nX = count\n": "`src.numbers` is imported in a form",
    "from src import numbers\n\nX = numbers\n": "`src` is imported in a form",
    "from re import *\n": "src/more.py:5: a star import from re. Name what is needed.",
    "from .numbers import *\n": "a star import from .numbers",
    "from __future__ import division\n": "`from __future__ import division` would hold for all rooms",
    "def f() -> None:\n    from .numbers import count\n\n    count('')\n": (
        "src/more.py:6: an internal import inside other code. Move it to the top of the room."
    ),
    "def f() -> None:\n    import src.numbers\n": "src/more.py:6: an internal import inside other code",
    "X = 1\n\nimport re\n": "src/more.py:7: an import below the code. Move it up to the others.",
    "try:\n    import re\nexcept ImportError:\n    pass\n": (
        "src/more.py:5: a conditional import. Import it inside the function that needs it."
    ),
    "import sys\n\nif sys.platform:\n    import re\n": "src/more.py:7: a conditional import",
    "import re  # why\n\nX = re\n": (
        "src/more.py:5: `# why` is among the imports, where it would be lost. Put it below them."
    ),
    "import re; X = re\n": "src/more.py:5: two statements on one line",
    # what is imported is there
    "from .nowhere import x\n\nX = x\n": "src/more.py:5: there is no src/nowhere.py. Write it, or mend the name.",
    "from .numbers import nothing\n\nX = nothing\n": (
        "src/more.py:5: `nothing` is not made at the top level of src/numbers.py."
    ),
    "from .numbers import re\n\nX = re\n": (
        "`re` is not made at the top level of src/numbers.py. Import it from where it is made."
    ),
    "from .words import state\n\nX = state\n": (
        "`state` is rebound by `global` in src/words.py, which an importer sees only when joined."
    ),
    "from .server import NAMES\n\nX = NAMES\n": "a cycle of imports: server → more → server. Move what is shared down.",
    # names are its own
    "def f() -> object:\n    return VOWELS\n": (
        "src/more.py:6: `VOWELS` is neither made nor imported here "
        "(src/words.py has it: this would work only when joined). Import it."
    ),
    "def f() -> object:\n    return re\n": "`re` is neither made nor imported here (src/",
    "def f() -> object:\n    return lambda: [unknown for _ in ()]\n": (
        "src/more.py:6: `unknown` is neither made nor imported here. Import it."
    ),
    "def f(x: Count) -> None: ...\n": "src/more.py:5: `Count` is neither made nor imported here",
    "def f() -> object:\n    return compile\n": (
        "src/more.py:6: the builtin `compile` would be the one of src/words.py. Rename that one."
    ),
    "def f(x: compile) -> None: ...\n": "the builtin `compile` would be the one of src/words.py",
    TYPES + "    from .numbers import Count\n\n\ndef f() -> object:\n    return Count\n": (
        "src/more.py:12: `Count` is imported for types only, but read when running. Import it outside of TYPE_CHECKING."
    ),
    # nothing happens at import
    "print(1)\n": "src/more.py:5: `print(1)` is work at import time. Move it into a function,",
    "for x in ():\n    pass\n": "`for x in ():` is work at import time",
    "while False:\n    pass\n": "`while False:` is work",
    "with memoryview(b''):\n    pass\n": "is work at import time",
    "try:\n    X = 1\nfinally:\n    pass\n": "`try:` is work",
    "if True:\n    X = 1\n": "`if True:` is work",
    "X = 1\nX += 1\n": "`X += 1` is work",
    "X = 1\ndel X\n": "`del X` is work",
    "X = open('x')\n": "`X = open('x')` is work",
    "import os\n\nX = os.environ.copy()\n": "`X = os.environ.copy()` is work",
    "import os\n\nX = [os.listdir(p) for p in ('.',)]\n": "is work at import time",
    "import time\n\nX: float = time.time()\n": "`X: float = time.time()` is work",
    "class C:\n    x = open('x')\n": "src/more.py:6: `x = open('x')` is work",
    "def f() -> int:\n    print()\n    return 1\n\n\nX = f()\n": "src/more.py:10: `X = f()` is work",
    "def f() -> object:\n    return open('x')\n\n\nX = f()\n": "src/more.py:9: `X = f()` is work",
    "X = (Y := 1)\n": "is work at import time",
    TYPES + "    X = 1\n": "`if TYPE_CHECKING:` is work",
    # nothing asks where it stands
    "X = __name__\n": "src/more.py:5: `__name__` is another one when joined. Say it in a constant.",
    "def f() -> str:\n    return __file__\n": "`__file__` is another one when joined",
    "def f() -> object:\n    return __doc__\n": "`__doc__` is another one when joined",
    "X = __package__\n": "`__package__` is another one when joined",
    "def f() -> object:\n    return globals()\n": "`globals` is another one when joined. Do without it.",
    "__all__ = ['x']\n": "src/more.py:5: `__all__` means nothing when joined. Leave it out.",
    "if __name__ == '__main__':\n    pass\n": "src/more.py:5: `__name__` is another one when joined",
    # comments that hold for a file
    "# ruff: noqa\n": (
        "src/more.py:5: `# ruff: noqa` would hold for the whole joined file. Use one that holds for a line."
    ),
    "# mypy: ignore-errors\n": "`# mypy: ignore-errors` would hold for the whole joined file",
    "# fmt: off\nX = 1\n": "`# fmt: off` would hold for the whole joined file",
    'X = """\n# /// script\n"""\n': "src/server.py:1: a second line that looks like the start of a script header",
}


@pytest.mark.parametrize("code", BAD)
def test_what_would_differ_when_joined_is_refused(code: str) -> None:
    words = WORDS + "\n\nstate = 0\n\n\ndef compile() -> None:\n    global state\n    state = 1\n"
    more = room(code + "\n\ndef more() -> int:\n    return 1\n")
    server = entry("\nfrom .more import more\nfrom .words import Word, greet\n\nNAMES = (more, Word, greet)\n")
    with pytest.raises(Refused) as refusal:
        build(house(more=more, server=server, words=words), "server")
    assert BAD[code] in str(refusal.value)


WHOLE_ROOMS = {
    "X = 1\n": "src/words.py:1: no docstring. Start with one sentence",
    '# a licence\n"""D."""\n\nfrom __future__ import annotations\n': (
        "src/words.py:1: something stands above the docstring."
    ),
    '"""D."""\n\nX = 1\n': "src/words.py:1: no `from __future__ import annotations`. Add it",
    f'"""D.\n\n{"x" * 119}\n"""\n\nfrom __future__ import annotations\n': (
        "src/words.py:3: a docstring line of 119 columns, which becomes a comment two columns longer. Wrap it at 118."
    ),
    '"""D.\n\nnoqa: all of it\n"""\n\nfrom __future__ import annotations\n': (
        "the docstring line `noqa: all of it` would become a directive. Put a word before it."
    ),
    '"""D."""\n\ndef\n': "src/words.py:3: not Python: invalid syntax. Mend it.",
}


@pytest.mark.parametrize("text", WHOLE_ROOMS)
def test_a_room_that_does_not_begin_as_agreed_is_refused(text: str) -> None:
    with pytest.raises(Refused) as refusal:
        build(house(words=text), "server")
    assert WHOLE_ROOMS[text] in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# /// script\n", "# script\n", "src/server.py:1: no script header (PEP 723) above the docstring."),
        ("# ///\n", "#\n", "src/server.py:1: no script header (PEP 723)"),
        ('if __name__ == "__main__":\n    sys.exit(main())\n', "", "no guard at the end. End with `if __name__ =="),
        ("# The entry's own comment.", "X = __name__", "`__name__` is another one when joined"),
    ],
)
def test_an_entry_that_is_not_framed_as_agreed_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(Refused) as refusal:
        build(house(server=ENTRY.replace(old, new)), "server")
    assert message in str(refusal.value)


def test_a_cycle_is_printed() -> None:
    rooms = house(
        words=WORDS.replace("from .numbers import count\n", "from .numbers import count\nfrom .more import more\n"),
        more=room("from .words import Word\n\n\ndef more() -> object:\n    return Word\n"),
    )
    with pytest.raises(Refused) as refusal:
        build(rooms, "server")
    message = str(refusal.value)
    assert message == "src/more.py:5: a cycle of imports: words → more → words. Move what is shared down."


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(Refused) as refusal:
        build(house(words=WORDS + "\nprint(1)\nX = __file__\n"), "server")
    assert [problem.line for problem in refusal.value.problems] == [40, 41]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_builds_what_has_an_entry_and_then_the_check_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, house())
    assert main(["--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "lighton-ocr-server.py: written from src/server.py\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lighton-ocr-server.py", "src"]
    assert main(["--root", str(tmp_path), "--check"]) == 0
    assert main(["--root", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")


def test_the_check_shows_what_differs_and_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, house())
    main(["--root", str(tmp_path)])
    target = tmp_path / TABLE["server"]
    target.write_text(target.read_text(encoding="utf-8").replace('("Ada", "Bo")', '("Cy",)'), encoding="utf-8")
    assert main(["--root", str(tmp_path), "--check"]) == 1
    errors = capsys.readouterr().err
    assert '-NAMES = ("Cy",)\n+NAMES = ("Ada", "Bo")' in errors
    assert errors.endswith("lighton-ocr-server.py is not what src/ says: run `python3 tools/build.py`\n")
    assert '("Cy",)' in target.read_text(encoding="utf-8")


def test_the_check_fails_where_a_file_has_lost_its_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, house())
    main(["--root", str(tmp_path)])
    (tmp_path / "src" / "server.py").unlink()
    assert main(["--root", str(tmp_path), "--check"]) == 1
    assert "src/server.py is gone: delete lighton-ocr-server.py" in capsys.readouterr().err


def test_a_refusal_ends_with_1_and_leaves_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, house())
    main(["--root", str(tmp_path)])
    before = (tmp_path / TABLE["server"]).read_bytes()
    written(tmp_path, house(words=WORDS + "\nprint(1)\n"))
    assert main(["--root", str(tmp_path)]) == 1
    assert "src/words.py:40: `print(1)` is work at import time" in capsys.readouterr().err
    assert (tmp_path / TABLE["server"]).read_bytes() == before


def test_the_mode_of_a_built_file_stays(tmp_path: Path) -> None:
    written(tmp_path, house())
    target = tmp_path / TABLE["server"]
    target.write_text("old", encoding="utf-8")
    target.chmod(0o640)
    main(["--root", str(tmp_path)])
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_the_command_needs_nothing_but_python() -> None:
    said = output(sys.executable, "-I", "-S", ROOT / "tools" / "build.py", "--help", cwd=ROOT)
    assert "--check" in said


# --- any house --------------------------------------------------------------------------------------------------------


@st.composite
def houses(draw: st.DrawFn) -> dict[str, str]:
    """Rooms r0 … rn whose functions add up constants, and call functions of the rooms before."""
    functions: list[tuple[str, str]] = []
    rooms: dict[str, str] = {}
    for number in range(draw(st.integers(1, 5))):
        code = "import math\n" if draw(st.booleans()) else ""
        calls = draw(st.lists(st.sampled_from(functions), max_size=3, unique=True)) if functions else []
        code += "".join(f"from .{there} import {name}\n" for there, name in calls)
        body = f"\nK{number} = {draw(st.integers(-9, 9))}\n\n"
        own = [f"f{number}_{n}" for n in range(draw(st.integers(1, 3)))]
        for name in own:
            chosen = draw(st.lists(st.sampled_from([name for _, name in calls]), max_size=3)) if calls else []
            local = draw(st.sampled_from(["x", "K99", "f0_0"]))
            floor = "math.floor" if "math" in code else "int"
            total = " + ".join([f"K{number}", floor + f"({draw(st.integers(0, 9))}.5)", *(f"{c}()" for c in chosen)])
            value = "total" if "f0_0" in chosen and local == "f0_0" else local
            body += f"\ndef {name}() -> int:\n    {value} = {total}\n    return {value}\n\n"
        rooms[f"r{number}"] = room(code + body)
        functions += [(f"r{number}", name) for name in own]
    used = draw(st.lists(st.sampled_from(functions), min_size=1, unique=True))
    imports = "\n" + "".join(f"from .{there} import {name}\n" for there, name in used)
    calls_text = ", ".join(f"{name}()" for _, name in used)
    rooms["server"] = entry(imports).replace("    return 0", f"    print({calls_text})\n    return 0")
    return rooms


@given(houses())
@settings(max_examples=20, deadline=None)
def test_any_house_joined_does_what_it_does_as_a_package(sources: dict[str, str]) -> None:
    text = build(sources, "server")
    assert ruff("check", "--select", "I", "--no-cache", text=text).returncode == 0
    with tempfile.TemporaryDirectory() as folder:
        root = written(Path(folder), sources)
        (root / "joined.py").write_text(text, encoding="utf-8")
        package = output(sys.executable, "-S", "-m", "src.server", cwd=root)
        assert output(sys.executable, "-I", "-S", "joined.py", cwd=root) == package


# --- this repository --------------------------------------------------------------------------------------------------


def test_the_built_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_the_table_covers_what_is_there() -> None:
    assert BUILT


@pytest.mark.parametrize("name", BUILT)
def test_help_is_there_at_once_and_needs_nothing_installed(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "q7 copy.py"
    shutil.copy(ROOT / name, copy)
    said = subprocess.run(
        [sys.executable, "-I", "-S", copy, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=10
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("usage: ")


@pytest.mark.parametrize("name", BUILT)
def test_ruff_leaves_the_built_files_as_they_are(name: str) -> None:
    assert_ruff_has_nothing_to_say((ROOT / name).read_text(encoding="utf-8"))
