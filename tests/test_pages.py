"""The pages as GitHub's own parser renders them: no raw Markdown, no dead relative link or anchor."""

from __future__ import annotations

import contextlib
import functools
import html
import io
import itertools
import json
import re
import shlex
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cmarkgfm
import pytest
from cmarkgfm.cmark import Options

import visualize_multimnist_capsnet
from evidence.claims import CLAIMS, REGISTERED, Condition
from helpers import ROOT, Capture, Patch, load
from more import visualize_capsule_attacks, visualize_conv_matrix_capsules
from smallnorb_novel_viewpoint import parse
from support.experiment import load_script, script_path
from support.results import read_result
from support.statistics import read_comparison

PAGES = [ROOT / "README.md", *(page for room in ("docs", "lesson") for page in sorted((ROOT / room).glob("*.md")))]
RAW_MARKDOWN = re.compile(r"\*\*|`|\]\(|\]: http|!\[|^\s*#+ |\|\s*:?-+:?\s*\||\\[a-zA-Z]+|^\s*\|.*\|\s*$", re.MULTILINE)


def rendered(source: str) -> str:
    return cmarkgfm.github_flavored_markdown_to_html(source, Options.CMARK_OPT_UNSAFE)


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<!--.*?-->|<[^>]+>", "", page, flags=re.DOTALL))


def anchors_of(page: str) -> set[str]:
    """Those that are written, and GitHub's own of the headings: of equal ones the second has -1."""
    found = set(re.findall(r'<[^>]* (?:id|name)="([^"]*)"', page))
    for heading in re.findall(r"<h[1-6]>(.*?)</h[1-6]>", page, re.DOTALL):
        anchor = re.sub(r"[^\w\- ]", "", text_of(heading).strip().lower()).replace(" ", "-")
        numbered = (f"{anchor}-{n}" for n in itertools.count(1))
        found.add(next(name for name in itertools.chain([anchor], numbered) if name not in found))
    return found


def faults(path: Path, source: str | None = None) -> Iterator[str]:
    """What is wrong with a page, in words."""
    page = rendered(path.read_text(encoding="utf-8") if source is None else source)
    prose = text_of(re.sub(r"<(pre|code)\b.*?</\1>", "", page, flags=re.DOTALL))
    if raw := RAW_MARKDOWN.search(prose):
        yield f"raw Markdown {raw[0]!r}"
    for link in map(html.unescape, re.findall(r'<[^>]* (?:href|src)="([^"]*)"', page)):
        parts = urllib.parse.urlsplit(link)
        if parts.scheme in ("http", "https", "mailto"):
            continue
        target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
        if not target.exists() or not target.is_relative_to(ROOT):
            yield f"dead link {link}"
        elif parts.fragment and target.suffix == ".md":
            other = page if target == path else rendered(target.read_text(encoding="utf-8"))
            if parts.fragment not in anchors_of(other):
                yield f"dead anchor {link}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page(path: Path) -> None:
    assert list(faults(path)) == []


@pytest.mark.parametrize(("source", "fault"), [
    ("<details>\n**bold**\n</details>", "raw Markdown '**'"),
    ("The formula \\frac{a}{b} is raw.", "raw Markdown '\\\\frac'"),
    ("| a | b |\n| 1 | 2 |", "raw Markdown '| a | b |'"),
    ("#Heading [a] (b)\n\n[a](no_such_file.md)", "dead link no_such_file.md"),
    ("[a](../../etc)", "dead link ../../etc"),
    ("# One\n\n[a](#two)", "dead anchor #two"),
    ("[a](docs/how_capsules_work.md#9-nothing)", "dead anchor docs/how_capsules_work.md#9-nothing"),
    ("![a](viz/none.png)", "dead link viz/none.png"),
    ("# Two  words, `code`\n\n[a](#two--words-code) and $`\\frac{a}{b}`$.", None),
    ("# Same\n\n# Same\n\n[a](#same) and [b](#same-1)", None),
])
def test_planted_faults_are_found(source: str, fault: str | None) -> None:
    assert next(faults(ROOT / "README.md", source), None) == fault


def test_the_first_page_prints_what_it_says(capsys: Capture) -> None:
    """Its Python runs as it stands, and the block below is its output."""
    source = (ROOT / "README.md").read_text(encoding="utf-8")
    before_it_runs = source.partition("## Run it\n")[2].partition("<!-- command: run -->")[0]
    assert all(word in before_it_runs for word in ("Clone this repository", "Python 3.10", "seconds"))
    (code, output), *others = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", source, re.DOTALL)
    assert not others
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == output


COMMAND = re.compile(r"\bpython3? (?:-m )?([\w./]+)((?:[ \t]|\\\n)[^`#\n]*(?:\\\n[^`#\n]*)*)?")


def flags_on_pages() -> list[tuple[str, str, str]]:
    """Script, flag and page of every flag of a command in the text, the tables and the blocks of the pages."""
    found = set()
    for page in PAGES:
        for name, rest in COMMAND.findall(page.read_text(encoding="utf-8")):
            script, *others = str(rest).split(" -- ")
            parts = [(name, script), *((word, other) for other in others for word in script.split()[:1])]
            found |= {(who, flag, page.name) for who, words in parts for flag in re.findall(r" (--[a-z][\w-]+)", words)}
    return sorted(found)


@functools.cache
def help_of(name: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
        raise SystemExit(load(name).main(["--help-all"]))
    return said.getvalue()


def test_every_flag_on_a_page_is_one_of_its_script() -> None:
    found = [(name, flag, page) for name, flag, page in flags_on_pages() if name != "pytest"]
    assert len(found) > 100
    assert [asked for asked in found if not re.search(rf"{asked[1]}\b(?!-)", help_of(asked[0]))] == []


def tables_of_errors() -> list[tuple[str, str, str]]:
    """Page, cell and command of every number in the column "here" of a table with a column of commands."""
    found = []
    for page in PAGES:
        tables = re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE)
        for table in (table for table in tables if "command for one seed" in table):
            head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines())
            here = next(k for k, cell in enumerate(head) if cell.startswith("here"))
            found += [(page.name, row[here], row[here + 1]) for row in rows if "%" in row[here]]
    return found


def errors_in(path: str) -> Iterator[float]:
    """Percent, of all models and metrics of a result."""
    document = read_result(ROOT / path)
    for part in document.get("parts", {"": document}).values():
        for entry in part["settings"].values():
            for metrics in entry["runs"][0]["models"].values() if len(entry["runs"]) == 1 else ():
                yield from (100 * value for name, value in metrics.items() if name.endswith("_error"))


def test_there_is_a_table_of_errors_on_every_page_of_an_experiment() -> None:
    assert len({page for page, *_ in tables_of_errors()}) == 7


OF_BOTH = ("dataset", "test_azimuths", "test_elevations", "n_test", "standardize")
OF_SIDE = {False: ("lr", "n_epochs", "weight_decay", "variance_floor"),
           True: ("cnn_lr", "cnn_epochs", "cnn_weight_decay")}  # whether it is a CNN
WHOLE = re.compile(r"`python (?:-m more\.)?(smallnorb_novel_viewpoint|conv_matrix_capsules)(?:\.py)? ([^`]+)`")


def differing_settings(condition: Condition, asked: Any) -> list[str]:
    """The settings of data and of either network in which a configuration is not that of a condition's runs."""
    found = []
    for side in (condition.first, condition.second):
        *part, model = side.split(":")
        config = read_comparison(ROOT / "results" / "#".join([condition.file, *part]))["config"]
        found += [f"{model}: {key}" for key in (*OF_BOTH, *OF_SIDE[model.startswith("cnn")])
                  if key in config and (getattr(asked, key) is not None or not key.startswith("test_"))
                  and json.loads(json.dumps(getattr(asked, key))) != config[key]]
    return found


@pytest.mark.parametrize(("page", "cell", "command"), tables_of_errors())
def test_errors_are_those_of_the_results(page: str, cell: str, command: str) -> None:
    """Each is a condition's of the claims with as many seeds, or of the single run in the file that it links to. A
    whole command that trains networks of views has the settings of the condition's runs."""
    errors, (n,) = tuple(re.findall(r"([\d.]+) %", cell)), re.findall(r"\((\d+) seeds?\)", cell)
    assert len(errors) == 2
    if link := re.search(r"\]\(\.\./(results/.*?)\)", cell):
        known = {f"{error:.{len(errors[0].partition('.')[2])}f}" for error in errors_in(link[1])}
        assert {*errors} <= known
        return
    document = read_result(ROOT / "results" / "claims.json")
    meant = [condition for key, claims in (("claims", CLAIMS), ("registered", REGISTERED))
             for claim, entry in zip(claims, document[key], strict=True)
             for condition, c in zip(claim.conditions, entry["conditions"], strict=True)
             if str(c.get("n")) == n and errors == tuple(f"{100 - 100 * c[side]:.1f}" for side in ("first", "second"))]
    assert meant
    if (whole := WHOLE.fullmatch(command)) and (script := script_path(whole[1])):
        module = load_script(script)
        asked = parse(module.Config, module.Options, shlex.split(whole[2]))[0]
        assert [] in [differing_settings(condition, asked) for condition in meant]


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


@pytest.mark.parametrize(("script", "figure"), [
    (visualize_multimnist_capsnet, "scaling"), (visualize_capsule_attacks, "attack_seeds"),
    (visualize_conv_matrix_capsules, "novel_viewpoints"), (visualize_conv_matrix_capsules, "table_2"),
])
def test_figures_of_committed_results_are_drawn(script: Any, figure: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(ROOT)
    assert script.main([f"--figures={figure}", f"--outdir={tmp_path}"]) == 0
    assert len(list(tmp_path.rglob("*.png"))) == 1
