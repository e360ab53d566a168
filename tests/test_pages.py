"""README.md and docs/*.md as GitHub's own parser renders them: no cut paragraph, no raw Markdown, no dead relative link
or anchor, no image without a sentence about it."""

from __future__ import annotations

import html.parser
import itertools
import re
import shlex
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cmarkgfm
import pytest
from cmarkgfm.cmark import Options

import visualize_capsule_attacks
import visualize_conv_matrix_capsules
import visualize_multimnist_capsnet
from helpers import ROOT
from support.statistics import read_comparison

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {"p", "pre", "table", "ul", "ol", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "hr"}
RAW_MARKDOWN = re.compile(r"\*\*|`|\]\(|!\[|<!--|^\s*#+ |\|\s*:?-+:?\s*\||\\[a-zA-Z]+|^\s*\|.*\|\s*$", re.MULTILINE)


class Block:
    """An element that stands by itself on a page."""

    def __init__(self, tag: str, lines: tuple[int, int] | None) -> None:
        self.tag, self.lines = tag, lines  # first and last line of the source
        self.text = ""  # without code
        self.images: list[str] = []

    @property
    def has_sentence(self) -> bool:
        return self.tag == "p" and len(self.text.split()) > 3 and self.text.rstrip()[-1:] in tuple(".:)!?")


class Page(html.parser.HTMLParser):
    """The blocks, headings and links of a rendered page, and the text that is in no block."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source.splitlines()
        self.open: list[str] = []
        self.blocks: list[Block] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loose = ""
        options = Options.CMARK_OPT_UNSAFE | Options.CMARK_OPT_SOURCEPOS
        self.feed(cmarkgfm.github_flavored_markdown_to_html(source, options))
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found: dict[str, Any] = dict(attributes)
        if tag in BLOCKS and not BLOCKS & {*self.open}:
            position = re.match(r"(\d+):\d+-(\d+):", found.get("data-sourcepos", ""))
            self.blocks.append(Block(tag, (int(position[1]), int(position[2])) if position else None))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "img":
            self.links.append(found["src"])
            if not self.blocks:
                self.blocks.append(Block("img", None))
            self.blocks[-1].images.append(found["src"])
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag not in ("img", "br", "hr", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while tag in self.open and self.open.pop() != tag:
            pass
        if re.fullmatch("h[1-6]", tag):
            anchor = re.sub(r"[^\w\- ]", "", self.heading.strip().lower()).replace(" ", "-")
            n = sum(other == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", other) is not None
                    for other in self.anchors)  # fmt: skip
            self.anchors.add(f"{anchor}-{n}" if n else anchor)

    def handle_data(self, data: str) -> None:
        if self.blocks and re.fullmatch("h[1-6]", self.blocks[-1].tag):
            self.heading = self.heading + data if {self.blocks[-1].tag} & {*self.open} else ""
        if not BLOCKS & {*self.open}:
            if "summary" not in self.open:
                self.loose += data
        elif not {"code", "pre"} & {*self.open}:
            self.blocks[-1].text += data

    heading = ""

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)


def faults(path: Path, source: str | None = None) -> Iterator[str]:
    """What is wrong with a page, in words."""
    page = Page(path.read_text(encoding="utf-8") if source is None else source)
    if page.loose.strip():
        yield f"text outside of any paragraph: {page.loose.strip()[:60]!r}"
    for k, block in enumerate(page.blocks):
        if block.tag == "p" and block.lines:
            before, after = (
                page.source[n] if 0 <= n < len(page.source) else "" for n in (block.lines[0] - 2, block.lines[1])
            )
            if after.lstrip().startswith("<") or re.match(r"\s*<(?!!--)|.*-->.*\S", before):
                yield f"a paragraph is cut by HTML at line {block.lines[0]}"
        if block.tag != "pre" and (raw := RAW_MARKDOWN.search(block.text)):
            yield f"raw Markdown {raw[0]!r} in {block.text[:60]!r}"
        if block.images and not block.has_sentence:
            neighbours = [page.blocks[n] for n in (k - 1, k + 1) if 0 <= n < len(page.blocks)]
            if not any(n.has_sentence and not n.images for n in neighbours):
                yield f"no sentence about {', '.join(block.images)}"
    for link in page.links:
        parts = urllib.parse.urlsplit(link)
        if parts.scheme in ("http", "https", "mailto"):
            continue
        target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
        if not target.exists() or not target.is_relative_to(ROOT):
            yield f"dead link {link}"
        elif parts.fragment and target.suffix == ".md":
            other = page if target == path else Page(target.read_text(encoding="utf-8"))
            if parts.fragment not in other.anchors:
                yield f"dead anchor {link}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page(path: Path) -> None:
    assert list(faults(path)) == []


SENTENCE = "This says what the image shows.\n\n"
IMAGE = "![a](viz/how_capsules_work/squash.png)\n"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("The mean is\n<!-- table: x -->0.3<!-- end --> of all.", "text outside of any paragraph: '0.3 of all.'"),
        ("The mean\n<!-- table: x -->\nis 0.3.", "a paragraph is cut by HTML at line 1"),
        ("One line\n<div>\n\nand text.\n\n</div>", "a paragraph is cut by HTML at line 1"),
        ("<details>\n**bold**\n</details>", "text outside of any paragraph: '**bold**'"),
        ("A **bold word.", "raw Markdown '**'"),
        ("A `code word.", "raw Markdown '`'"),
        ("The formula \\frac{a}{b} is raw.", "raw Markdown '\\\\frac'"),
        ("| a | b |\n| 1 | 2 |", "raw Markdown '| a | b |'"),
        ("#Heading [a] (b)\n\n[a](no_such_file.md)", "dead link no_such_file.md"),
        ("[a](../../etc)", "dead link ../../etc"),
        ("# One\n\n[a](#two)", "dead anchor #two"),
        ("[a](docs/how_capsules_work.md#9-nothing)", "dead anchor docs/how_capsules_work.md#9-nothing"),
        ("![a](viz/none.png)\n\n" + SENTENCE, "dead link viz/none.png"),
        (IMAGE, "no sentence about viz/how_capsules_work/squash.png"),
        (SENTENCE + "# Heading\n\n" + IMAGE + "\n# Heading", "no sentence about viz/how_capsules_work/squash.png"),
        (SENTENCE + IMAGE + "\n" + IMAGE + "\n" + IMAGE + "\n" + SENTENCE, "no sentence about"),
    ],
)
def test_a_planted_fault_is_found(source: str, fault: str) -> None:
    found = list(faults(ROOT / "README.md", source))
    assert found
    assert found[0].startswith(fault)


@pytest.mark.parametrize(
    "source",
    [
        SENTENCE + IMAGE,
        IMAGE + "\n" + SENTENCE,
        "<!-- table: x -->\n\n| a | b |\n|---|---|\n| 1 | `**` |\n\n<!-- end -->",
        "<details>\n<summary>All seeds</summary>\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n</details>",
        "# Two  words, `code`\n\n[a](#two--words-code) and $`\\frac{a}{b}`$.",
        "# Same\n\n# Same\n\n[a](#same) and [b](#same-1)",
        "```math\n\\frac{a}{b}\n```",
        "[a](docs/how_capsules_work.md#2-squash)",
    ],
)
def test_a_good_page_has_no_fault(source: str) -> None:
    assert list(faults(ROOT / "README.md", source)) == []


def seed_commands() -> list[tuple[str, list[str]]]:
    """Every compare_seeds.py command on a page that names a result which is there, as words."""
    found = []
    for page in PAGES:
        for line in page.read_text().replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if line.startswith("python compare_seeds.py ") else []
            flags = dict(itertools.pairwise(words))
            if path := flags.get("--out") or ("--name" in flags and f"results/{words[2]}/{flags['--name']}.json"):
                part = "#" + flags["--part"] if "--part" in flags else ""
                found += [(path + part, words)] if (ROOT / path).exists() else []
    return found


@pytest.mark.parametrize(("path", "words"), seed_commands(), ids=[path for path, _ in seed_commands()])
def test_the_command_of_a_page_is_that_of_the_result(path: str, words: list[str]) -> None:
    stored = shlex.split(read_comparison(ROOT / path)["command"])
    k = words.index("--jobs") if "--jobs" in words else len(words)
    assert [word for word in words[:k] + words[k + 2 :] if word != "--resume"] == stored


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        (visualize_multimnist_capsnet, "--figures=scaling"),
        (visualize_capsule_attacks, "--results=results/capsule_attacks"),
        (visualize_conv_matrix_capsules, "--figures=novel_viewpoints"),
        (visualize_conv_matrix_capsules, "--figures=table_2"),
    ],
)
def test_figures_of_committed_results_are_drawn(
    script: Any, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert script.main([flag, "--outdir", str(tmp_path)]) == 0
    assert len(list(tmp_path.rglob("*.png"))) == 1
