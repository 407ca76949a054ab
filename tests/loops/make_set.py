"""Texts that end in a loop and texts that repeat themselves honestly, as a page's OCR looks; the same on every machine.

    python -m tests.loops.make_set > set.jsonl       to look at them: a JSON object a line

An item is {"text", "label": "loop" or "honest", "kind", "finish_reason", "half": "tuned" or "held out"}. The made ones
come from this file, those written by hand stand in `handwritten.jsonl`, where "repeat" may hold (unit, count, rest)
that stand after the text. The bars in `src/loops.py` were set while looking at the tuned half alone.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HANDWRITTEN = Path(__file__).with_name("handwritten.jsonl")
NAMES = (  # noqa: SIM905
    "Agnes Baldric Cuthbert Dunstan Edith Felix Gertrude Hilda Ives Jutta Kilian Leocadia Maurus Notburga Odilia "
    "Pancras Quirin Roland Swithun Thecla Ursula Vitus Walburga Xenia Zita"
).split()
NOUNS = (  # noqa: SIM905
    "harbour ledger chimney orchard turbine parish copper barley sluice foundry carriage meadow lantern tannery "
    "customs bridge quarry vestry granary canal beacon cellar timber mill"
).split()
VERBS = "holds follows crosses supplies borders replaces carries measures joins overlooks".split()  # noqa: SIM905
ADJECTIVES = "narrow upper disused northern second wooden older common heavy remaining".split()  # noqa: SIM905


@dataclass(frozen=True)
class Item:
    text: str
    label: str
    kind: str
    finish_reason: str
    half: str

    @property
    def finished(self) -> bool:
        return self.finish_reason == "stop"


def sentence(rng: random.Random) -> str:
    adjective, noun, verb, other = (rng.choice(words) for words in (ADJECTIVES, NOUNS, VERBS, NOUNS))
    place = rng.choice(
        ["since the survey", "at low water", "near the old road", "by order of the board", "in dry years"]
    )
    return f"The {adjective} {noun} {verb} the {other} {place}."


def paragraph(rng: random.Random, sentences: int = 5) -> str:
    return " ".join(sentence(rng) for _ in range(sentences))


def page_before(rng: random.Random) -> str:
    """What was read well before the loop or the honest repetition begins."""
    title = f"# {rng.choice(NOUNS).title()} and {rng.choice(NOUNS)}\n\n"
    return title + "".join(paragraph(rng, rng.randint(2, 6)) + "\n\n" for _ in range(rng.randint(0, 4)))


def cut(rng: random.Random, unit: Callable[[int], str], least: int = 3_500, most: int = 14_000) -> str:
    """Units until max_tokens, the last one anywhere."""
    wanted = rng.randint(least, most)
    text, number = "", 0
    while len(text) < wanted:
        text += unit(number)
        number += 1
    return text[:wanted]


# Loops


def loop_character(rng: random.Random) -> str:
    return cut(rng, lambda _: rng_unit, 2_000, 9_000) if (rng_unit := rng.choice("0.-_=1IlaM")) else ""


def loop_word(rng: random.Random) -> str:
    word = rng.choice([*NOUNS, "the", "I", "ha ha", "de la", "und", "1 000", "\\quad", "et"])
    return cut(rng, lambda _: word + " ")


def loop_phrase(rng: random.Random) -> str:
    phrase = f"{rng.choice(['of the', 'and the', 'in the'])} {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    return cut(rng, lambda _: phrase + rng_mark) if (rng_mark := rng.choice([", ", " ", "; "])) else ""


def loop_sentence(rng: random.Random) -> str:
    repeated = sentence(rng)
    return cut(rng, lambda _: repeated + " ")


def loop_line(rng: random.Random) -> str:
    line = rng.choice(
        [
            sentence(rng),
            f"- {rng.choice(NOUNS)} of {rng.choice(NAMES)}",
            f"{rng.choice(NAMES)}, {rng.choice(NOUNS)} keeper",
            f"**{rng.choice(NOUNS).title()}** {rng.choice(ADJECTIVES)}",
        ]
    )
    return cut(rng, lambda _: line + "\n")


def loop_two_lines(rng: random.Random) -> str:
    lines = [sentence(rng), f"({rng.choice(NAMES)})", f"{rng.choice(NOUNS)} and {rng.choice(NOUNS)}"]
    return cut(rng, lambda number: lines[number % len(lines)] + "\n")


def loop_paragraph(rng: random.Random) -> str:
    repeated = paragraph(rng, rng.randint(3, 7))
    return cut(rng, lambda _: repeated + "\n\n", 5_000)


def loop_page(rng: random.Random) -> str:
    """The whole page read again and again."""
    page = page_before(rng) + paragraph(rng, 8)
    return cut(rng, lambda _: page + "\n\n", 7_000, 16_000)


def loop_table_row(rng: random.Random) -> str:
    row = rng.choice(
        ["| 0 | 0 | 0 | 0 |", f"| {rng.choice(NOUNS)} | 12 | – |", "|  |  |  |  |  |", "| ditto | do. | 4s. |"]
    )
    return f"| {rng.choice(NOUNS)} | b | c |\n|---|---|---|\n" + cut(rng, lambda _: row + "\n", 4_000)


def loop_table_cell(rng: random.Random) -> str:
    cell = rng.choice([" |", " 0 |", " - |", "---|", " x |"])
    return f"| {rng.choice(NOUNS)} | b |\n|" + cut(rng, lambda _: cell)


def loop_html_cell(rng: random.Random) -> str:
    cell = rng.choice(["<td></td>", "<td>0</td>", "<td> </td>\n", '<td colspan="2"></td>', "<th></th>"])
    return "<table><tr>" + cut(rng, lambda _: cell)


def loop_html_row(rng: random.Random) -> str:
    cells = "".join(f"<td>{rng.choice(['', '0', rng.choice(NOUNS)])}</td>" for _ in range(rng.randint(2, 5)))
    line_break = rng.choice(["", "\n"])
    return "<table>\n" + cut(rng, lambda _: f"<tr>{cells}</tr>{line_break}", 9_000, 15_000)


def loop_latex(rng: random.Random) -> str:
    unit = rng.choice(
        [
            "\\left( ",
            "0 & ",
            "\\quad ",
            "x + ",
            "{",
            "\\frac{1}{2} + ",
            "\\begin{array}{c} ",
            "\\\\ 0 & 0 \n",
            "\\alpha, ",
            "_{1}",
        ]
    )
    return "$$\n\\begin{aligned}\n" + cut(rng, lambda _: unit)


def loop_counter_line(rng: random.Random) -> str:
    start, step = rng.randint(1, 60), rng.choice([1, 1, 1, 2, 5])
    form = rng.choice(
        ["{}. The {noun} of {name}\n", "Figure {}: {noun}\n", "- [ ] {noun} {}\n", "§ {} ({noun} repealed)\n"]
    )
    noun, name = rng.choice(NOUNS), rng.choice(NAMES)
    return cut(rng, lambda number: form.format(start + step * number, noun=noun, name=name), 5_000)


def loop_counter(rng: random.Random) -> str:
    form = rng.choice(["{}. ", "{}\n", "{}.\n", "[{}] ", "x_{{{}}} + ", "{}, "])
    return cut(rng, lambda number: form.format(number + 1), 4_000)


def loop_counter_row(rng: random.Random) -> str:
    noun = rng.choice(NOUNS)
    return "| no. | item |\n|---|---|\n" + cut(rng, lambda number: f"| {number + 1} | {noun} | 0 |\n", 4_500)


def loop_year(rng: random.Random) -> str:
    name, noun = rng.choice(NAMES), rng.choice(NOUNS)
    return cut(rng, lambda number: f"In {1701 + number}, {name} sold the {noun}. ", 4_000)


def loop_varied_word(rng: random.Random) -> str:
    """A sentence over and over with one word changing among a few."""
    few = rng.sample(NOUNS, 5)
    start, end = (
        f"{rng.choice(NAMES)} says that the",
        f"is to be kept by the {rng.choice(NOUNS)} until the next meeting. ",
    )
    return cut(rng, lambda _: f"{start} {rng.choice(few)} {end}", 5_000)


def loop_varied_order(rng: random.Random) -> str:
    """A few sentences again and again in any order."""
    few = [sentence(rng) for _ in range(4)]
    return cut(rng, lambda _: rng.choice(few) + " ", 5_000)


def loop_varied_lines(rng: random.Random) -> str:
    few = [f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} near the {rng.choice(NOUNS)}" for _ in range(5)]
    return cut(rng, lambda _: f"- {rng.choice(few)}\n", 5_000)


def loop_script(rng: random.Random) -> str:
    """Loops in other scripts."""
    unit = rng.choice(
        ["同治三年正月初一日記", "の報告書による", "и так далее, ", "της πόλεως ", "و هكذا ", "中華民國", "的"]
    )
    return cut(rng, lambda _: unit, 2_500, 6_000)


def loop_white_space(rng: random.Random) -> str:
    unit = rng.choice(["\n", " ", "&nbsp;", "\n\n", "<br>", "\t"])
    return cut(rng, lambda _: unit, 2_500, 6_000)


def loop_late(rng: random.Random) -> str:
    """The context ends soon after the loop has begun."""
    repeated = sentence(rng)
    return "".join(paragraph(rng, 7) + "\n\n" for _ in range(8)) + cut(rng, lambda _: repeated + " ", 700, 1_800)


def loop_then_stop(rng: random.Random) -> str:
    """A loop that the model came out of."""
    repeated = rng.choice([sentence(rng), paragraph(rng, 3)])
    return cut(rng, lambda _: repeated + "\n", 3_000, 12_000).rpartition("\n")[0] + "\n"


def loop_rows_then_stop(rng: random.Random) -> str:
    row = rng.choice(["<tr><td></td><td>0</td></tr>", "<tr><td>ditto</td></tr>"])
    return f"<table>{row * rng.randint(150, 700)}</table>\n"


# Honest repetition


def honest_zeros(rng: random.Random) -> str:
    columns, rows = rng.randint(3, 12), rng.randint(20, 60)
    row = "| " + " | ".join(["0"] * columns) + " |\n"
    return "|" + " a |" * columns + "\n|" + "---|" * columns + "\n" + row * rows


def honest_equal_cells(rng: random.Random) -> str:
    cell = rng.choice(["Yes", "Not reported", "n/a", "ditto", "Satisfactory"])
    row = "| " + " | ".join([cell] * rng.randint(2, 7)) + " |\n"
    return "| a | b |\n|---|---|\n" + row * rng.randint(15, 45)


def honest_empty_html(rng: random.Random) -> str:
    cells = rng.choice(["<td></td>", "<td> </td>", "\n<td></td>"]) * rng.randint(3, 31)
    return f"<table>\n{f'<tr>{cells}</tr>' * rng.randint(12, 45)}\n</table>\n"


def honest_numbers_table(rng: random.Random) -> str:
    rows = [f"| {1850 + n} | {rng.randint(1, 99)}.{rng.randint(0, 9)} | {rng.randint(0, 4)} | 0 |" for n in range(60)]
    return "| year | yield | frost | hail |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def honest_leaders(rng: random.Random) -> str:
    dots = rng.choice([".", " .", "…", "_"])
    return "".join(
        f"{rng.choice(ADJECTIVES).title()} {rng.choice(NOUNS)} {dots * rng.randint(20, 70)} {n * 3 + 1}\n"
        for n in range(rng.randint(20, 60))
    )


def honest_blank_lines(rng: random.Random) -> str:
    rule = rng.choice(["_", ".", "-", ". "]) * rng.randint(40, 90)
    return f"Remarks:\n{(rule + chr(10)) * rng.randint(8, 40)}"


def honest_form(rng: random.Random) -> str:
    line = rng.choice(
        ["Name: ____________ Date: ________\n", "Signature ..................... Place ............\n", "☐ yes ☐ no\n"]
    )
    return (
        "".join(line if rng.random() < 0.9 else f"{rng.choice(NOUNS).title()}: ______\n" for _ in range(30)) + line * 15
    )


def honest_litany(rng: random.Random) -> str:
    response = rng.choice(["pray for us.", "ora pro nobis.", "have mercy on us.", "bitte für uns."])
    names = [f"{rng.choice(['Saint', 'Holy', 'Blessed'])} {rng.choice(NAMES)}" for _ in range(50)]
    return "".join(f"{name}, {response}\n" for name in names)


def honest_response(rng: random.Random) -> str:
    return "".join(
        f"For the {rng.choice(NOUNS)} of {rng.choice(NAMES)}:\n**Lord, hear our prayer.**\n" for _ in range(30)
    )


def honest_refrain(rng: random.Random) -> str:
    refrain = f"{sentence(rng)}\n{sentence(rng)}\n{sentence(rng)}\n{sentence(rng)}\n"
    return "".join(f"{paragraph(rng, 4)}\n\n{refrain}\n" for _ in range(8))


def honest_latex_array(rng: random.Random) -> str:
    size = rng.randint(4, 16)
    row = " & ".join(["0"] * size) + " \\\\\n"
    return f"$$\n\\begin{{pmatrix}}\n{row * rng.randint(4, 20)}\\end{{pmatrix}}\n$$\n"


def honest_latex_identity(rng: random.Random) -> str:
    size = rng.randint(5, 20)
    rows = (" & ".join("1" if column == row else "0" for column in range(size)) for row in range(size))
    return "\\[\\begin{bmatrix}\n" + " \\\\\n".join(rows) + "\n\\end{bmatrix}\\]\n"


def honest_number_list(rng: random.Random) -> str:
    mark, between = rng.choice([".", ")", ""]), rng.choice(["\n", " ", "\n\n"])
    return between.join(f"{number}{mark}" for number in range(1, rng.randint(30, 120)))


def honest_number_column(rng: random.Random) -> str:
    return "\n".join(str(rng.choice([0, 0, 0, 1, 2, 10])) for _ in range(rng.randint(30, 120))) + "\n"


def honest_ruler(rng: random.Random) -> str:
    return " | ".join(str(number) for number in range(rng.randint(15, 60))) + "\n" + "'" * 120


def honest_school_words(rng: random.Random) -> str:
    word = rng.choice(NOUNS)
    return "".join(" ".join([word] * rng.randint(4, 6)) + "\n" for _ in range(rng.randint(15, 30)))


def honest_school_one_line(rng: random.Random) -> str:
    return " ".join([rng.choice(NOUNS)] * rng.randint(40, 160)) + "\n"


def honest_punishment(rng: random.Random) -> str:
    return f"I must not {rng.choice(VERBS)[:-1]} the {rng.choice(NOUNS)}.\n" * rng.randint(20, 60)


def honest_labels(rng: random.Random) -> str:
    name, street = f"{rng.choice(NAMES)} {rng.choice(NOUNS).title()}", f"{rng.choice(NOUNS).title()} Lane"
    return f"{name}\n{rng.randint(2, 99)} {street}\nUpper Marsh\n\n" * rng.choice([10, 14, 21, 30])


def honest_copies(rng: random.Random) -> str:
    return (paragraph(rng, 8) + "\n\nSigned ________\n\n") * rng.choice([2, 2, 3])


def honest_statement(rng: random.Random) -> str:
    def line(number: int) -> str:
        day, spent, left = number % 28 + 1, f"{rng.randint(1, 90)}.{rng.randint(10, 99)}", rng.randint(900, 4000)
        return f"{day:02}/06 CARD PAYMENT {rng.choice(NOUNS).upper()} {spent} {left}.10\n"

    return "".join(map(line, range(60)))


def honest_index(rng: random.Random) -> str:
    def line(_: int) -> str:
        pages = f"{rng.randint(1, 400)}, {rng.randint(1, 400)}–{rng.randint(1, 400)}"
        return f"{rng.choice(NOUNS).title()}, {rng.choice(NAMES)}, {pages}\n"

    return "".join(map(line, range(90)))


def honest_reserved(rng: random.Random) -> str:
    return "".join(f"§ {rng.randint(2, 9)}.{n + 10} [Reserved]\n" for n in range(rng.randint(15, 45)))


def honest_checks(rng: random.Random) -> str:
    return "".join("| " + " | ".join(rng.choice(["x", " ", "x", "✓"]) for _ in range(9)) + " |\n" for _ in range(50))


def honest_hex(rng: random.Random) -> str:
    return "".join(f"{n * 16:08x}: {'0000 ' * 8}................\n" for n in range(rng.randint(20, 64)))


def honest_headers(rng: random.Random) -> str:
    header = f"{rng.choice(NOUNS).upper()} GAZETTE\n\n"
    return "".join(header + paragraph(rng, 6) + "\n\n" for _ in range(5))


def honest_prose(rng: random.Random) -> str:
    return "\n\n".join(paragraph(rng, 7) for _ in range(rng.randint(4, 20)))


def honest_script(rng: random.Random) -> str:
    return rng.choice(["大 " * 150, "一二三四五六七八九十\n" * 20, "南無阿彌陀佛 " * 60, "да " * 120])


LOOPS = {name[5:]: make for name, make in list(globals().items()) if name.startswith("loop_")}
HONEST = {name[7:]: make for name, make in list(globals().items()) if name.startswith("honest_")}
BY_ITSELF = {"then_stop", "rows_then_stop"}
EACH = 6


def made() -> Iterator[Item]:
    """Six of each kind: the even ones to tune by, the odd ones held out. Of the honest ones every third is cut off."""
    for label, makers in (("loop", LOOPS), ("honest", HONEST)):
        for kind, make in makers.items():
            for number in range(EACH):
                rng = random.Random(f"{label} {kind} {number}")
                text = page_before(rng) + make(rng)
                is_cut = label == "honest" and number % 3 == 2
                if is_cut:
                    text = text[: len(text) - rng.randint(2, 30)]
                stopped = kind in BY_ITSELF or (label == "honest" and not is_cut)
                yield Item(text, label, kind, "stop" if stopped else "length", ("tuned", "held out")[number % 2])


def handwritten() -> Iterator[Item]:
    for number, line in enumerate(HANDWRITTEN.read_text(encoding="utf-8").splitlines()):
        fields = json.loads(line)
        unit, count, rest = fields.pop("repeat", ["", 0, ""])
        fields["text"] += unit * count + rest
        yield Item(**fields, half=("tuned", "held out")[number % 2])


def whole_set() -> list[Item]:
    return [*made(), *handwritten()]


if __name__ == "__main__":
    for item in whole_set():
        sys.stdout.write(json.dumps(item.__dict__, ensure_ascii=False) + "\n")
