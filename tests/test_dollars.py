r"""Escaped math delimiters are repaired; prices, code and what is math already are left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.dollars import fix_dollars

# As the model wrote it → as it should be.
REPAIRED = {
    r"where \$x\$ is the load": r"where $x$ is the load",
    r"\$x\$": r"$x$",
    r"\$E = mc^2\$.": r"$E = mc^2$.",
    r"(\$n\$)": r"($n$)",
    r"the \$n\$th term": r"the $n$th term",
    r"\$\alpha\$ and \$\beta\$": r"$\alpha$ and $\beta$",
    r"\$a\$, \$b\$, \$c\$": r"$a$, $b$, $c$",
    r"\$x\$-\$y\$ plane": r"$x$-$y$ plane",
    r"angle of \$90^\circ\$": r"angle of $90^\circ$",
    r"a power of \$10^{5}\$ W": r"a power of $10^{5}$ W",
    r"\$5\$ apples": r"$5$ apples",
    r"\$0.5\$": r"$0.5$",
    r"\$2n\$ times": r"$2n$ times",
    r"\$f(x)\$": r"$f(x)$",
    r"\$(a, b)\$": r"$(a, b)$",
    r"\$[0, 1)\$": r"$[0, 1)$",
    r"\$AB\$ and \$ABC\$": r"$AB$ and $ABC$",
    r"\$a/b\$": r"$a/b$",
    r"the point \$(0, 1)\$": r"the point $(0, 1)$",
    r"\$n!\$": r"$n!$",
    r"\$|x|\$ is even": r"$|x|$ is even",
    r"\$P(A|B) = 0.5\$": r"$P(A|B) = 0.5$",
    r"\$x < y\$": r"$x < y$",
    r"\$\mathbb{R}^+\$": r"$\mathbb{R}^+$",
    r"\$x \text{ if it is so}\$": r"$x \text{ if it is so}$",
    r"\$v = s / t\$": r"$v = s / t$",
    r"\$speed = distance / time\$": r"$speed = distance / time$",
    r"\$ x = 2 \$": r"$x = 2$",
    r"\$ \sigma \$ is": r"$\sigma$ is",
    r"\$\{1, 2\}\$": r"$\{1, 2\}$",
    r"\$x_1, \ldots, x_n\$": r"$x_1, \ldots, x_n$",
    r"设\$x\$为": r"设$x$为",
    r"**\$x\$**": r"**$x$**",
    r"| \$x\$ | \$y^2\$ |": r"| $x$ | $y^2$ |",
    r"<td>\$x\$</td><td>\$5</td>": r"<td>$x$</td><td>\$5</td>",
    r"\$\$E = mc^2\$\$": r"$$E = mc^2$$",
    "\\$\\$\na = b \\\\\nc = d\n\\$\\$": "$$\na = b \\\\\nc = d\n$$",
    r"\$\$\int_0^1 x\,dx\$\$ (1)": r"$$\int_0^1 x\,dx$$ (1)",
    r"costs \$5 where \$x\$ is 2": r"costs \$5 where $x$ is 2",
    r"\$x\$ costs \$5": r"$x$ costs \$5",
    r"from \$5, so \$x = 5\$ and \$10 more": r"from \$5, so $x = 5$ and \$10 more",
    r"\$5=\$x\$": r"\$5=$x$",
    r"`\$a\$` is \$a\$": r"`\$a\$` is $a$",
    r"$a$ and \$b\$": r"$a$ and $b$",
    r"$\text{price} = \$5$ and \$x\$": r"$\text{price} = \$5$ and $x$",
    r"$5 for \$x\$ and $6 for \$y\$": r"$5 for $x$ and $6 for $y$",
    "```\n\\$a\\$\n```\n\\$a\\$": "```\n\\$a\\$\n```\n$a$",
}
UNTOUCHED = [
    "",
    "no dollar",
    r"\$5",
    r"costs \$5 and \$10",
    r"costs \$5 or \$10.",
    r"US\$ 1,000–\$2,000",
    r"US\$1,000–US\$2,000",
    r"A\$5 and NZ\$6",
    r"\$5-\$10",
    r"\$5–\$10",
    r"\$5/\$10",
    r"\$5+\$10",
    r"(\$5)(\$10)",
    r"\$1.50, \$2.00, \$3.25",
    r"\$1.50\$2.00",
    r"\$ 10 \$ 20",
    r"\$ 5 = \$ 10",
    r"\$5 = US\$ 7",
    r"\$5 US\$ 7",
    r"\$5 CAD\$ is not how it is written",
    r"5\$ et 10\$",
    r"5\$/10\$",
    r"5\$, 10\$",
    r"\$5 = 500 cents, \$1 = 100 cents",
    r"\$5 million and \$6 million",
    r"from \$5k (= \$5,000)",
    r"a \$5/\$a-month plan",
    r"paid \$5 per unit (= cost) and pay\$",
    r"| \$5 | \$10 |",
    r"|\$5|\$10|",
    r"| a | \$x | \$y |",
    "| item | price |\n|---|---|\n| mill | \\$300 |\n| barn | \\$40 |",
    "<td>\\$5</td><td>\\$10</td>",
    "<td>\\$a</td><td>\\$b</td>",
    r"\$HOME/\$USER",
    r"\$HOME:\$PATH",
    r"\$money\$",
    r"\$for every dollar\$",
    r"\$\$",
    r"\$\$\$",
    r"\$\$ – \$\$\$",
    r"\$\$ moderate, \$\$\$ dear",
    r"\$\$ is cheap, \$\$ is not",
    "\\$\\$\na = b\n\nc = d\n\\$\\$",
    "\\$x\n\\$",
    r"\$\$ \text{and \$",
    r"`\$x\$`",
    r"``a ` \$x\$``",
    "```\n\\$x\\$\n```",
    "~~~tex\n\\$x\\$\n~~~",
    "```\n\\$x\\$ not closed",
    r"<code>\$x\$</code>",
    "<pre>\n\\$x\\$\n</pre>",
    r"$x$",
    r"$\$5 + \$6$",
    r"$$\text{\$5} + \text{\$x}$$",
    r"\\\$x\\\$",
    r"\\$x$",
    r"\$x",
    r"x\$",
    r"\$",
    r"\$ \$",
    r"\${x\$",
]


def test_there_are_cases_enough() -> None:
    assert len(REPAIRED) + len(UNTOUCHED) >= 60


@pytest.mark.parametrize(("text", "repaired"), REPAIRED.items())
def test_escaped_math_is_repaired(text: str, repaired: str) -> None:
    assert fix_dollars(text) == repaired


@pytest.mark.parametrize("text", UNTOUCHED)
def test_everything_else_is_left_alone(text: str) -> None:
    assert fix_dollars(text) == text


texts = st.lists(
    st.sampled_from(
        [r"\$", r"\$\$", "$", "$$", "x", "5", " ", "\n", "|", "`", "```", "\\", "{", "}", "^", "=", ",", "word "]
    ),
    max_size=14,
).map("".join)


@given(texts)
def test_nothing_but_backslashes_and_white_space_goes_and_nothing_comes(text: str) -> None:
    fixed = fix_dollars(text)
    assert "".join(fixed.replace("\\$", "$").split()) == "".join(text.replace("\\$", "$").split())
    assert len(fixed) <= len(text)


@given(texts)
def test_what_is_repaired_stays_so(text: str) -> None:
    assert fix_dollars(fix_dollars(text)) == fix_dollars(text)


@given(
    st.lists(st.sampled_from([r"\$5", r"US\$ 1,000", r"\$0.99", r"\$12–\$15", "and", "or", "costs", ","]), max_size=12)
)
def test_prices_alone_are_never_touched(words: list[str]) -> None:
    assert fix_dollars(" ".join(words)) == " ".join(words)


@pytest.mark.parametrize(
    "text",
    [
        *(
            r"\$a " * 20_000,
            r"\$\$a " * 20_000,
            "$a " * 20_000 + r"\$",
            "$$a " * 20_000 + r"\$",
            "<code>" * 10_000 + r"\$",
        ),
        *("```py\n" * 10_000 + r"\$", r"\$x<td " * 10_000, "` `` " * 10_000 + r"\$", "\\" * 60_000 + "$"),
    ],
    ids=range(9),
)
@pytest.mark.timeout(20)
def test_texts_made_to_be_slow_are_not(text: str) -> None:
    fix_dollars(text)
