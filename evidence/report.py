"""The tables of README.md and docs/*.md from the files in results/, and the proof that all of them are true.

    python -m evidence.report            # rewrite what stands between the markers of the pages
    python -m evidence.report --claims   # write results/claims.json first, from the list in claims.py
    python -m evidence.report --check    # exit status 1, with a line for each fault

Checked are the pages against the files, and each file by itself: its checksum, its commit, which is part of the
history, and its command, which is parsed by its own script and would write that very file. A result is older than the
code where git finds a difference between its commit and the files that its script imports; these are counted. The
experiment's flags in their commands are those of their commit; --out and --part name where the result stands today.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.files import read_text
from evidence import claims, search
from smallnorb_novel_viewpoint import Parser, UsageError, UserError, plain, print_message, script, write_file
from support.experiment import ROOT, RUN_FLAGS, code_files, imported_names, load_script, parse_flags, script_path
from support.result_tables import claims_table, plain_table, rows_table, searches_table, seeds_table
from support.results import git, is_git_root, parse_json, read_result, save_result
from support.statistics import read_comparison

Json = dict[str, Any]

CLAIMS = Path("results/claims.json")
OF_CAPSULES = ("lr", "n_epochs", "weight_decay", "em_iters")  # which do not touch the other side
OF_CNNS = ("cnn_lr", "cnn_epochs", "cnn_weight_decay")
MAX_BYTES = 200_000  # of a committed result
TOLERANCE = 1e-6  # of a number that is computed again, relative: versions of numpy and scipy differ by up to 1e-9 of it


# --- Pages ------------------------------------------------------------------------------------------------------------

HELP_MARKERS = """markers of a page, each closed by <!-- end -->; what stands between is rewritten:
  <!-- table: results/EXPERIMENT/FILE.json rows metrics=familiar_accuracy,held_out_accuracy -->
      a row per model, and of a sweep per setting
  <!-- table: results/E/A.json,results/E/B.json#PART rows names=capsules,CNN -->     of several files, or of a part;
      of a file with three settings, "names=A,one|two|" names the first two and leaves the third out
  <!-- table: results/EXPERIMENT/FILE.json seeds first=3 -->     a row per seed, here of the first three, then mean
      and sd, and the 95 % interval of five or more; of several files with the same seeds side by side, with names=
  <!-- table: results/claims.json registered page=docs/PAGE.md -->     a row per condition of each registered claim,
      here of a page's; of kind claims, of each exploratory one
  <!-- table: results/search/A.json,results/search/B.json searches -->     a row per search: its grid and its winner
  <!-- table: results/benchmarks/FILE.json table NAME digits=1 -->     a table of a benchmark file
Options: metrics= models= digits= first= page= names=.
A marker inside `backquotes` is left alone."""

OPTIONS = {"seeds": "models metrics digits first names", "rows": "models metrics digits names", "table": "digits",
           "claims": "page", "registered": "page", "searches": ""}


def make_table(files: list[str], kind: str, name: str | None, options: dict[str, str]) -> str:
    """A Markdown table of one kind; see HELP_MARKERS. Raises UserError where kind, options and files do not fit."""
    if kind not in OPTIONS:
        raise UserError(f"{kind!r} is not a kind of table, which are {', '.join(OPTIONS)}")
    if extra := set(options) - set(OPTIONS[kind].split()):
        raise UserError(f"a table of kind {kind} takes no {', '.join(sorted(extra))}=")
    if not re.fullmatch(r"\d", options.get("digits", "3")) or not re.fullmatch(r"[1-9]", options.get("first", "3")):
        raise UserError("digits= is a number from 0 to 9, first= one from 1 to 9")
    if (name is None) == (kind == "table") or (len(files) > 1 and kind not in ("rows", "seeds", "searches")):
        raise UserError("a marker names a file, then a kind of table; a table of kind table has a name, no other has")
    if kind == "table":
        return plain_table(read_result(Path(files[0])), str(name), options)
    if kind == "claims":
        return claims_table(read_result(Path(files[0]))["claims"], options.get("page"), ", exploratory")
    if kind == "registered":
        return claims_table(read_result(Path(files[0]))["registered"], options.get("page"))
    if kind == "searches":
        return searches_table({Path(file).stem: read_result(Path(file)) for file in files})
    make = rows_table if kind == "rows" else seeds_table
    return make([read_comparison(file) for file in files], options)


MARKER = re.compile(r"(?<!`)<!--\s*(?:table:\s*(.*?)|end)\s*-->(?!`)", re.DOTALL)


def fill_marker(text: str) -> str:
    """What belongs between a marker and its end. Raises UserError where the marker or its file is at fault."""
    try:
        words = shlex.split(text)
        option = re.compile(r"([a-z]+)=(.*)", re.DOTALL)
        options = {found[1]: found[2] for word in words if (found := option.fullmatch(word))}
        files, kind, *name = [word for word in words if not option.fullmatch(word)]
        return f"\n\n{make_table(files.split(','), kind, ' '.join(name) or None, options)}\n\n"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"the marker does not fit the file ({type(error).__name__}: {error})") from error


def render_page(text: str) -> tuple[str, list[str], list[str]]:
    """The page as it should be; where it differs; and which of its markers are at fault, as ``LINE: message``."""
    parts, stale, faults, end = list[str](), list[str](), list[str](), 0
    found = list(MARKER.finditer(text))
    for before, marker, after in zip([None, *found], found, [*found[1:], None], strict=False):
        line = text.count("\n", 0, marker.start()) + 1
        if marker[1] is None:
            if before is None or before[1] is None:
                faults.append(f"{line}: {marker[0]} closes nothing")
        elif after is None or after[1] is not None:
            faults.append(f"{line}: {marker[0]} has no end")
        else:
            parts.append(text[end : marker.end()])
            new = old = text[marker.end() : after.start()]
            end = after.start()
            try:
                new = fill_marker(marker[1])
            except OSError as error:
                faults.append(f"{line}: table {marker[1]}: {error}")
            if new != old:
                stale.append(f"{line}: table {marker[1]} differs from its file")
            parts.append(new)
    return "".join(parts) + text[end:], stale, faults


ACCURACY = re.compile(r"(?<![\w.])(?:0\.[1-9]\d\d|1\.000)(?!\d)")  # as tables write it
ROW = re.compile(r"^[ \t]*\|.*", re.MULTILINE)
GENERATED = re.compile(r"<!--\s*table:.*?<!--\s*end\s*-->", re.DOTALL)
NO_SENTENCE = re.compile(r"^```.*?^```|<!--.*?-->|`[^`]*`", re.DOTALL | re.MULTILINE)  # code and comments


def loose_accuracies(text: str) -> list[str]:
    """The accuracies in the sentences of a page that are in no cell of its tables."""
    text = NO_SENTENCE.sub("", text)
    known = {number for row in ROW.findall(text) for number in ACCURACY.findall(row)}
    return [number for number in ACCURACY.findall(ROW.sub("", text)) if number not in known]


NUMBER = r"([+−]?)(\d+\.(\d+))"
INTERVAL = re.compile(  # and the difference, where it stands right before
    rf"(?:{NUMBER}(?: points)?,?(?: ahead| behind)?(?: on [a-z]+)? )?\({NUMBER} to ([+−]?)(\d+\.\d+)(?: points)?"
    r"(?:, (\w+)(?: (?:seeds|sets)\b[^()]*)?)?\)")


def loose_intervals(text: str, document: Json) -> list[str]:
    """The intervals in a page's sentences, and in tables that no marker makes, such as (+1.2 to +2.9, 10 seeds), that
    are those of no condition of the claims, or stand after another difference than that condition's. One without signs
    says by how much something is ahead or behind."""
    every = (*document["registered"], *document["claims"])
    conditions = [c for claim in every for c in claim["conditions"] if c.get("low") is not None]

    def as_written(value: float, sign: str, decimals: str) -> str:
        shown = format(100 * value if sign else abs(100 * value), f"{'+' if sign else ''}.{len(decimals)}f")
        return shown.replace("-", "−")

    found = []
    for written in INTERVAL.finditer(" ".join(NO_SENTENCE.sub("", GENERATED.sub("", text)).split())):
        its_sign, its, its_decimals, sign, low, decimals, other_sign, high, n = written.groups()
        ends = [sign + low, other_sign + high]
        if not any(
            (sign or c["low"] * c["high"] > 0)  # how far ahead or behind one is: never of an interval that holds 0
            and ends == [as_written(c[end], sign, decimals)
                         for end in (("low", "high") if sign or c["low"] > 0 else ("high", "low"))]
            and n in (None, str(c["n"]))
            and its in (None, as_written(c["difference"], its_sign, its_decimals or "").lstrip("+−"))
            and its_sign in (None, "", as_written(c["difference"], "+", its_decimals or "")[0])
            for c in conditions
        ):
            found.append(written[0])
    return found


# --- Are the results what they say? -----------------------------------------------------------------------------------


def unknown_history() -> str | None:
    """Why commits cannot be looked up here."""
    if not is_git_root(Path.cwd()) or git("rev-parse", "HEAD").returncode:
        return "there is no git history"
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        return "the clone is shallow"
    return None


@functools.cache
def is_ancestor(commit: str) -> bool:
    return git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


known_names = functools.cache(imported_names)


@functools.cache
def known_files(script: Path) -> list[Path]:
    return code_files(script, known_names)


@functools.cache
def is_changed(commit: str, script: Path) -> bool:
    """Whether a script or what it imports has changed since."""
    return git("diff", "--quiet", commit, "--", *map(str, known_files(script))).returncode != 0


def commits_of(document: Json) -> list[Any]:
    environment = document.get("environment")
    commits = environment.get("git_commit") if isinstance(environment, dict) else None
    return commits if isinstance(commits, list) and commits else [commits]


def check_commits(document: Json, has_history: bool) -> Iterator[str]:
    for commit in commits_of(document):
        if isinstance(commit, str) and commit.endswith("-dirty"):
            yield f"was made from a tree with uncommitted changes, at {commit}"
        elif not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
            yield "names no commit that made it"
        elif has_history and not is_ancestor(commit):
            yield f"was made at {commit}, which is not in the history"


def find_script(command: object) -> tuple[Path, list[str]]:
    """The script of a recorded command, and its flags. Raises UserError."""
    words = shlex.split(command) if isinstance(command, str) else []
    if words[:2] == ["python", "-m"] and len(words) > 2:
        words[1:3] = [words[2]]
    if len(words) < 2 or words[0] != "python":
        raise UserError("names no command that made it, such as: python SCRIPT.py FLAGS")
    if path := script_path(words[1]):
        return path, words[2:]
    raise UserError(f"there is no script {words[1]} here")


def understand(script: Path, flags: Sequence[str]) -> Any:
    """``parse_flags``. Raises UserError in the parser's words."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            if script.name == "compare_seeds.py":
                return load_script(script).parse_command(flags)
            return parse_flags(script, flags)
    except (UsageError, SystemExit) as error:
        why = str(error) if isinstance(error, UsageError) else " ".join(said.getvalue().split())
        raise UserError(f"its command is no longer understood: {why}") from None


def check_command(document: Json, path: Path, part: str | None, has_history: bool) -> Iterator[str | None]:
    """Would the command write this, and does the file hold what the command asks for? None for a result that is older
    than the code, whose command may be another one today."""
    script, flags = find_script(document.get("command"))
    settings: list[Any] = []
    if script.name == "compare_seeds.py" and "settings" in document:
        args, settings = understand(script, flags)
        yield from check_settings(document, args, settings)
        yield from check_place(args, path, part)
        script = args.script
    elif "settings" in document:
        yield "holds a comparison of seeds, and its command makes none"
        return
    if not has_history or any(is_changed(commit, script) for commit in commits_of(document)):
        if has_history:
            yield None
        return
    for setting in settings:
        understand(script, [*setting.args, *RUN_FLAGS])
    if not settings:
        yield from check_place(understand(script, flags), path, part)


def check_place(args: Any, path: Path, part: str | None) -> Iterator[str]:
    """Does a command write this file, or this part of it?"""
    out = vars(args).get("out_json") or vars(args).get("out")
    written = f"{os.path.normpath(out) if out else 'no file'}" + (f"#{args.part}" if vars(args).get("part") else "")
    if written != f"{path}" + (f"#{part}" if part else ""):
        yield f"its command writes {written}"


def check_settings(document: Json, args: argparse.Namespace, settings: list[Any]) -> Iterator[str]:
    if document["experiment"] != args.script.stem or document["seeds"] != args.seeds:
        yield "its experiment or seeds are not those of its command"
    if [(name, entry["values"]) for name, entry in document["settings"].items()] != [
        (s.name, dict(s.values)) for s in settings
    ]:
        yield "its settings are not those of its command"
    config = document["config"]
    words = shlex.split(re.sub(r"(--[a-z-]+)=", r"\1 ", args.command.partition(" -- ")[2]))
    for flag, value in itertools.pairwise(words):
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and not value.startswith("--") and name in config and not is_told(value, config[name]):
            yield f"its command has {flag} {value}, its configuration {config[name]}"
    for name, entry in document["settings"].items():
        if sorted(run["seed"] for run in (*entry["runs"], *entry["failures"])) != sorted(document["seeds"]):
            yield f"setting {name}: its runs are not of its seeds"
        elif document["headline"] not in entry["runs"][0]["models"].get(document["reference"], {}):
            yield f"setting {name} has no {document['headline']} of {document['reference']}"


def is_told(value: str, stored: Any) -> bool:
    """Whether a stored setting is the value of a flag."""
    if isinstance(stored, list):
        told = re.split("[,:]", value)
        return len(told) == len(stored) and all(map(is_told, told, stored))
    try:
        return stored is not None and float(value) == float(stored)
    except ValueError:
        return value == str(stored)


def read_listed(where: str) -> Json | None:
    """The comparison in a place below results/; None where it has not been run."""
    file, _, part = where.partition("#")
    path = Path("results") / file
    is_there = path.exists() and (not part or part in parse_json(path).get("parts", ()))
    return read_comparison(f"results/{where}") if is_there else None


def make_claims() -> Json:
    """results/claims.json from the list in claims.py. Raises UserError where a file does not fit the list."""
    try:
        return claims.make_claims(claims.CLAIMS, functools.cache(read_listed), claims.REGISTERED)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"claims.py does not fit the results ({type(error).__name__}: {error})") from error


@functools.cache
def claims_at(commit: str) -> str:
    """The text of claims.py as it stood at a commit; empty where it stood nowhere."""
    places = ("evidence/claims.py", "claims.py")
    return next((text for place in places if (text := git("show", f"{commit}:{place}").stdout)), "")


@functools.cache
def listed_at(commit: str) -> set[claims.Condition]:
    try:
        return claims.listed(claims_at(commit))
    except (SyntaxError, ValueError, TypeError):
        return set()


def check_listed() -> Iterator[str]:
    """Has each commit of a reported comparison this comparison in its list, and one of them all of its seeds?"""
    for condition in (condition for claim in claims.CLAIMS for condition in claim.conditions):
        for where in dict.fromkeys(side.file for side in claims.sides(condition)):
            comparison = read_listed(where) or {}
            seeds = claims.runs_by_seed(comparison) if comparison else ()
            commits = [commit for commit in commits_of(comparison) if commit]
            ends = [claims.listed_end(condition, listed_at(commit)) for commit in commits]
            if commits and not (all(ends) and max(seeds) < max(ends)):
                at = " and ".join(commits)
                yield f"results/{where} was run at {at}, whose claims.py does not list all of {condition.name}"


@functools.cache
def winner_at(commit: str, file: str) -> Any:
    """That of a search as it stood at a commit; None where it was not there."""
    text = git("show", f"{commit}:results/search/{file}").stdout
    return json.loads(text)["winner"] if text else None


def registered() -> list[claims.Condition]:
    return [condition for claim in claims.REGISTERED for condition in claim.conditions]


def check_registered(has_history: bool) -> Iterator[str]:
    """Was each registered comparison listed as it is now at the commit of each of its runs, and are its settings those
    of the searches, no value of which lies at an edge?"""
    if len(registered()) > claims.N_COMPARISONS:
        yield f"claims.py registers {len(registered())} comparisons, more than {claims.N_COMPARISONS}"
    if has_history:
        kept = {c._replace(name="") for c in (*registered(), *claims.WITHDRAWN)}
        for commit in git("log", "--format=%H", "--", "evidence/claims.py").stdout.split():
            for gone in sorted(claims.listed(claims_at(commit), ["REGISTERED"]) - kept):
                yield f"{gone.metric} of {gone.file} was registered at {commit}, and is in neither list any more"
    for condition in registered():
        start, stop = map(int, condition.seeds.split(":"))
        if start < 2000 or stop - start < claims.MIN_REGISTERED or condition.looks != 1 or not condition.searches:
            yield f"{condition.name} of {condition.file} is not registered as it must be"
            continue
        for side, file in zip(claims.sides(condition), condition.searches, strict=True):
            yield from check_search(Path("results/search", file))
            if (comparison := read_listed(side.file)) is None:
                continue
            for commit in commits_of(comparison) if has_history else ():
                if condition._replace(name="") not in listed_at(str(commit)):
                    yield f"results/{side.file} was run before claims.py registered all of {condition.name}"
                elif claims.level_of(claims_at(str(commit))) != (claims.ALPHA, claims.N_COMPARISONS):
                    yield f"results/{side.file} was registered at another level than ALPHA / N_COMPARISONS"
                if winner_at(str(commit), file) != read_result(Path("results/search", file))["winner"]:
                    yield f"results/{side.file} was run before results/search/{file} had its winner"
            wanted, model = search.winner_of(read_result(Path("results/search", file)))
            if side.model != model:
                yield f"results/{side.file}: {side.model} is not the network of results/search/{file}, {model}"
            found = next(iter(comparison["settings"].values()))["config"]
            if differ := differing(wanted, found, model.startswith("cnn")):
                yield f"results/{side.file}: {', '.join(differ)} of {model} is not that of results/search/{file}"


def differing(wanted: Any, found: Json, is_cnn: bool) -> list[str]:
    """Which settings of the capsules or of the CNN are others in ``found``, the configuration in a result. One that the
    code did not have yet had what is now its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(wanted)}
    found = defaults | {"cnn_weight_decay": found.get("weight_decay")} | found  # before the CNN had its own
    own: Sequence[str] = ()
    other: Sequence[str] = ()
    values = plain(wanted) | ({"n_val": None} if hasattr(wanted, "n_val") else {})  # a comparison is on test digits
    if hasattr(wanted, "cnn_lr"):
        own, other = (OF_CNNS, OF_CAPSULES) if is_cnn else (OF_CAPSULES, OF_CNNS)
    names = values.keys() - {"seed", "data_dir", *other} | {*own}
    return [name for name, value in values.items()
            if name in names and not is_same(found[name], json.loads(json.dumps(value)))]


def check_search(path: Path) -> Iterator[str]:
    document = read_result(path)
    if search.edges(document["axes"], tuple(document["winner"])):
        yield f"{path}: the winner lies at an edge of the grid"
    tolerance = search.TOLERANCES.get(str(search.parse_search(shlex.split(document["command"])[3:])[0].condition))
    if tolerance and not document["doubled_length"]["change"] < tolerance:
        yield f"{path}: twice the length gains {document['doubled_length']['change']:.3f}"


def is_same(stored: Any, computed: Any) -> bool:
    if isinstance(stored, dict) and isinstance(computed, dict):
        return stored.keys() == computed.keys() and all(is_same(stored[key], computed[key]) for key in computed)
    if isinstance(stored, list) and isinstance(computed, list):
        return len(stored) == len(computed) and all(map(is_same, stored, computed))
    if isinstance(stored, float) and isinstance(computed, float):
        return math.isclose(stored, computed, rel_tol=TOLERANCE, abs_tol=1e-12)
    return type(stored) is type(computed) and bool(stored == computed)


def check_result(path: Path, has_history: bool) -> Iterator[str | None]:
    """What is wrong with one result file, each fault a line; None for each of its parts that is older than the
    code."""
    if path.is_file() and path.stat().st_size > MAX_BYTES:
        yield f"{path} is {path.stat().st_size:,} bytes, above {MAX_BYTES:,}"
    try:
        document = read_result(path)
        if path == CLAIMS:
            if not is_same(document, make_claims() | {"checksum": document["checksum"]}):
                yield f"{path} is not what claims.py and the results give; python -m evidence.report --claims writes it"
            yield from check_listed() if has_history else ()
            yield from check_registered(has_history)
            return
        for part, content in document.get("parts", {None: document}).items():
            where = f"{path}#{part}" if part else f"{path}"
            try:
                faults = list(check_commits(content, has_history))
                yield from (f"{where}: {fault}" for fault in faults)
                for fault in check_command(content, path, part, has_history and not faults):
                    yield fault and f"{where}: {fault}"
            except OSError as error:
                yield f"{where}: {error}"
    except OSError as error:
        yield str(error)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        yield f"{path} is not what compare_seeds.py writes ({type(error).__name__}: {error})"


# --- Command line -----------------------------------------------------------------------------------------------------


def report(check: bool, with_claims: bool) -> None:
    """Rewrite the pages of the working folder, or say what is wrong with them and the results."""
    if with_claims:
        save_result(CLAIMS, make_claims())
    problems: list[str | None] = []
    n_stale, everything, claimed = 0, "", make_claims() if check else {}
    for page in (Path("README.md"), *sorted(Path("docs").glob("*.md"))):
        text = read_text(page)
        everything += text
        new, stale, faults = render_page(text)
        problems += [f"{page}:{line}" for line in (*faults, *(stale if check else ()))]
        n_stale += len(stale)
        if check:
            problems += [f"{page}: {number} is in no table of the page" for number in loose_accuracies(text)]
            problems += [f"{page}: {ends} is the interval of no comparison" for ends in loose_intervals(text, claimed)]
        elif new != text:
            write_file(page, new.encode())
            print(f"{page}: {len(stale)} rewritten")
    if check:
        for cached in (known_names, known_files, is_changed, is_ancestor, claims_at, listed_at, winner_at):
            cached.cache_clear()  # the tree may be another one than at the last call
        if why := unknown_history():
            print_message(f"warning: commits are not checked: {why}")
        results, older = sorted(Path("results").rglob("*.json")), []
        others = [] if why else git("ls-files", "--others", "results").stdout.splitlines()
        used = {CLAIMS.as_posix(), *re.findall(r"results/[\w/.*-]+\.json", everything)}  # a page may name a pattern
        used |= {f"results/{c.file}" for claim in claims.CLAIMS for c in claim.conditions}
        used |= {f"results/{c.file}" for c in registered()}
        used |= {f"results/search/{file}" for c in registered() for file in c.searches or ()}
        for path in results:
            if not (is_used := any(path.match(pattern) for pattern in used)) and path.as_posix() in others:
                print_message(f"{path} is not checked: it is in no commit and on no page")
                continue
            found = list(check_result(path, why is None))
            problems += [fault for fault in found if fault]
            older += [str(path)] * (None in found)
            if not is_used:
                problems.append(f"{path} is used by no page and no claim")
        if older:
            names = ", ".join(older[:3]) + ", ..." * (len(older) > 3)
            print_message(f"note: {len(older)} of {len(results)} results were made by earlier code: {names}")
    if problems:
        print_message("\n".join(map(str, problems)))
        hint = "; python -m evidence.report rewrites the pages" if n_stale and check else ""
        raise UserError(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the pages and results{hint}")


@script
def main(argv: Sequence[str]) -> None:
    parser = Parser(
        description="Rewrite the tables of README.md and docs/*.md from results/.", epilog=HELP_MARKERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add("--check", action="store_true", help="Rewrite nothing; exit with status 1 where a page or a result is wrong.")
    add("--claims", action="store_true", help=f"Write {CLAIMS} before the pages.")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    report(args.check, args.claims)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
