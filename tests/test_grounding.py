"""Grounding markers are read and written back; no text is lost, whatever the markers look like."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.grounding import GROUNDING_LABELS, Block, Grounded, parse_grounding, plain_text, render_grounding

PAGE = """![header](60,20,940,44)
THE MARSH GAZETTE

![title](120,80,880,140)
# A mill burns

![text](60,160,480,900)
The mill at Upper Marsh burnt
![text+](520,160,940,400)
down on Sunday, with $5 in the till.

![table](520,420,940,600)
| loss | £ |
|---|---|
| mill | 300 |

![list](520,620,940,800)
- no one was hurt
- one cat is missing

![image](520,810,940,900)

![page_number](480,960,520,980)
4
"""

numbers = st.integers(0, 1000)
pieces = st.sampled_from(
    [
        "![text](1,2,3)",
        "![alt](a.png)",
        "![",
        "](1,2,3,4)",
        "![text+](1,2,3,4)",
        "![image](0,0,9,9)",
        "\n",
        "\n\n",
        " ",
        "$5",
    ]
)
texts = st.lists(pieces | st.text(max_size=8), max_size=8).map("".join)


def is_normal(text: str) -> bool:
    """Whether a text can stand in a block as it is."""
    return text == text.strip() and not parse_grounding(text).blocks


normal_texts = texts.map(str.strip).filter(is_normal)


@st.composite
def normal_blocks(draw: st.DrawFn) -> Block:
    x1, x2 = sorted((draw(numbers), draw(numbers)))
    y1, y2 = sorted((draw(numbers), draw(numbers)))
    return Block(draw(st.sampled_from(sorted(GROUNDING_LABELS))), (x1, y1, x2, y2), draw(normal_texts))


def without_white_space(text: str) -> str:
    return "".join(text.split())


def test_a_page_is_read_block_by_block() -> None:
    page = parse_grounding(PAGE)
    assert page.malformed == 0
    assert page.before == ""
    labels = ["header", "title", "text", "table", "list", "image", "page_number"]
    assert [block.label for block in page.blocks] == labels
    assert page.blocks[3] == Block("table", (520, 420, 940, 600), "| loss | £ |\n|---|---|\n| mill | 300 |")
    assert page.blocks[5].text == ""


def test_a_continuation_is_joined_to_the_block_before_with_a_box_around_both() -> None:
    text = parse_grounding(PAGE).blocks[2]
    assert text.text == "The mill at Upper Marsh burnt\ndown on Sunday, with $5 in the till."
    assert text.bbox == (60, 160, 940, 900)


@pytest.mark.parametrize(
    "before", ["", "![footer](1,2,3,4)\nfoot\n", "![image](1,2,3,4)\n", "![table](1,2,3,4)\n| a |\n"]
)
def test_a_continuation_of_nothing_that_runs_on_is_a_text_of_its_own(before: str) -> None:
    page = parse_grounding(before + "![text+](5,6,7,8)\nand so on")
    assert page.blocks[-1] == Block("text", (5, 6, 7, 8), "and so on")


def test_a_page_round_trips() -> None:
    page = parse_grounding(PAGE)
    assert parse_grounding(render_grounding(page.blocks)) == page


@given(st.lists(normal_blocks(), max_size=6))
def test_blocks_that_are_written_are_read_again(blocks: list[Block]) -> None:
    assert list(parse_grounding(render_grounding(blocks)).blocks) == blocks


@given(st.lists(normal_blocks(), max_size=4), normal_texts)
def test_text_before_the_first_marker_is_kept(blocks: list[Block], before: str) -> None:
    page = parse_grounding(render_grounding(blocks, before))
    assert (page.before, list(page.blocks)) == (before, blocks)


@given(texts)
def test_what_is_read_is_in_normal_form(text: str) -> None:
    page = parse_grounding(text)
    again = parse_grounding(render_grounding(page.blocks, page.before))
    assert (again.before, again.blocks) == (page.before, page.blocks)
    assert all(block.label in GROUNDING_LABELS and is_normal(block.text) for block in page.blocks)


@given(texts)
def test_no_text_is_lost_and_none_invented(text: str) -> None:
    markers = r"!\[(text\+?|image)\]\((1,2,3,4|0,0,9,9)\)"
    assert without_white_space(plain_text(parse_grounding(text))) == without_white_space(re.sub(markers, "", text))


@pytest.mark.parametrize(
    "marker",
    [
        "![banner](1,2,3,4)",
        "![Text](1,2,3,4)",
        "![table+](1,2,3,4)",
        "![](1,2,3,4)",
        "![text](1,2,3)",
        "![text](1,2,3,4,5)",
        "![text](1,2,3,1001)",
        "![text](5,2,3,4)",
        "![text](1,5,3,4)",
        "![text](-1,2,3,4)",
        "![text](0.1,0.2,0.3,0.4)",
        "![text](1;2;3;4)",
        "![text](1 2 3 4)",
        "![text](12345,2,3,4)",
        "![text](1,2,3,",
    ],
)
def test_a_malformed_marker_is_kept_as_text_and_counted(marker: str) -> None:
    page = parse_grounding(f"![text](1,2,3,4)\nthe mill\n{marker}")
    assert page == Grounded((Block("text", (1, 2, 3, 4), f"the mill\n{marker}"),), malformed=1)


@pytest.mark.parametrize(
    "picture",
    [
        "![a mill](mill.png)",
        "![](https://x.org/a(1).png)",
        "![text](figures/1.png)",
        "![image](image_1.png)",
        "![a](<>)",
    ],
)
def test_an_ordinary_picture_is_text(picture: str) -> None:
    assert parse_grounding(f"see {picture} here") == Grounded((), 0, f"see {picture} here")


def test_spaces_in_a_marker_do_no_harm() -> None:
    assert parse_grounding("![text](1, 2, 3, 4) the mill").blocks == (Block("text", (1, 2, 3, 4), "the mill"),)


def test_the_edges_of_the_page_are_on_the_page() -> None:
    assert parse_grounding("![image](0,0,1000,1000)").blocks == (Block("image", (0, 0, 1000, 1000), ""),)


def test_plain_text_has_no_markers_and_blocks_apart() -> None:
    assert plain_text(parse_grounding(PAGE)).startswith("THE MARSH GAZETTE\n\n# A mill burns\n\nThe mill")
    assert "![" not in plain_text(parse_grounding(PAGE))


def test_dropped_labels_are_left_out() -> None:
    text = plain_text(parse_grounding(PAGE), {"header", "footer", "page_number"})
    assert text.startswith("# A mill burns")
    assert text.endswith("- one cat is missing")


@given(st.lists(normal_blocks(), max_size=6), normal_texts, st.sets(st.sampled_from(sorted(GROUNDING_LABELS))))
def test_dropping_labels_drops_their_blocks_and_nothing_else(
    blocks: list[Block], before: str, labels: set[str]
) -> None:
    text = plain_text(Grounded(tuple(blocks), before=before), labels)
    kept = [block.text for block in blocks if block.label not in labels]
    assert text == "\n\n".join(filter(None, [before, *kept]))
