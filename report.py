#!/usr/bin/env python3
"""The tables of README.md and docs/*.md from the files in results/, and the proof that all of them are true.

    python report.py            # rewrite what stands between the markers of the pages
    python report.py --claims   # write results/claims.json first, from the list in claims.py
    python report.py --check    # exit status 1, with a line for each fault

Checked are the pages against the files, and each file by itself: every derived number is computed again from the runs,
the command named in it is parsed by its own script and would write that very file, its commit is part of the history.
"""

from __future__ import annotations

import support.startup  # noqa: F401  before the others, for Ctrl-C

# isort: split

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import claims
from support.console import exit_status, print_message, print_result
from support.files import UserError, atomic_write, same_file
from support.flags import Parser
from support.results import checksum, code_fingerprint, parse_json, read_text, save_result
from support.statistics import best_setting, summarise

Json = dict[str, Any]

NEWLINE = "\n"
CLAIMS = Path("results/claims.json")
MAX_BYTES = 200_000  # of a committed result
TOLERANCE = 1e-9  # of a number that is computed again: other versions of numpy add in another order


# ----------------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Json:
    """A JSON object of finite numbers. Raises UserError for anything else."""
    document = parse_json(path)
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a JSON object")
    return document


def read_result(path: Path) -> Json:
    """A JSON object whose checksum is right. Raises UserError for anything else."""
    document = read_json(path)
    if "checksum" not in document:
        raise UserError(f"{path} has no checksum")
    if document["checksum"] != checksum(document):
        raise UserError(f"{path} has been changed since it was written: its checksum is of another content")
    return document


# ----------------------------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------------------------


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table whose columns line up in a terminal too; the first is left-aligned."""
    widths = [max(3, *map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [c.rjust(w) for c, w in zip(cells, widths, strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *padded[1:]])} |"

    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(columns), line(rule), *map(line, rows)])


def show(value: Any, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def show_mean(sample: Json | None, digits: int, sign: str = "") -> str:
    """Mean, and half of its 95 % interval."""
    if not sample:
        return ""
    half = "" if sample["low"] is None else f" ± {sample['high'] - sample['mean']:.{digits}f}"
    return f"{sample['mean']:{sign}.{digits}f}{half}"


def show_interval(sample: Json, digits: int, sign: str = "") -> str:
    known = sample.get("low") is not None
    return f"{sample['low']:{sign}.{digits}f} to {sample['high']:{sign}.{digits}f}" if known else ""


def show_p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def pick_setting(document: Json, name: str | None) -> Json:
    settings = document.get("settings")
    if not settings:
        raise UserError("the file is not a comparison of seeds")
    if name is None and len(settings) > 1:
        raise UserError(f"the file holds {len(settings)} settings: add setting=NAME, such as {min(settings)!r}")
    if name is not None and name not in settings:
        raise UserError(f"the file has no setting {name!r}")
    chosen: Json = settings[name or next(iter(settings))]
    return chosen


class View(NamedTuple):
    """What of a result a table shows."""

    models: list[str]
    metrics: list[str]
    digits: int

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return list(itertools.product(self.metrics, self.models))

    def heads(self, prefix: str = "", models: list[str] | None = None) -> list[str]:
        """A column for each metric of each model."""
        names = self.models if models is None else models
        return [f"{prefix}{m}: {k}" for k, m in itertools.product(self.metrics, names)]


def seeds_table(entry: Json, view: View, reference: str) -> str:
    samples = [entry["models"][m].get(k, {}) for k, m in view.pairs]
    rows = [
        [str(run["seed"]), *(show(run["models"][m].get(k), view.digits) for k, m in view.pairs)]
        for run in entry["runs"]
    ]
    rows.append(["mean", *(show(s.get("mean"), view.digits) for s in samples)])
    if len(rows) > 2:
        rows.append(["sd", *(show(s.get("sd"), view.digits) for s in samples)])
        rows.append(["95 %", *(show_interval(s, view.digits) for s in samples)])
    return markdown(["seed", *view.heads()], rows)


def summary_table(entry: Json, view: View, reference: str) -> str:
    models = {name: entry["models"][name] for name in view.models}
    rows = [
        [name, f"{m.get('n_params', 0):,}", *(show_mean(m.get(k), view.digits) for k in view.metrics)]
        for name, m in models.items()
    ]
    return markdown(["model", "parameters", *view.metrics], rows)


def paired_table(entry: Json, view: View, reference: str) -> str:
    rows = []
    for metric, name in view.pairs:
        if s := entry["paired"].get(name, {}).get(metric):
            mean, interval = f"{s['mean']:+.{view.digits}f}", show_interval(s, view.digits, "+")
            less = f"{100 * s['error_reduction']:.0f} %" if s.get("error_reduction") is not None else ""
            higher = f"{s['higher']} of {s['n']}"
            rows.append([name, metric, mean, interval, higher, show_p(s["p"]), less, s["verdict"]])
    columns = ["metric", "difference", "95 % interval", "higher on", "p", "fewer errors", "verdict"]
    return markdown([f"{reference} minus", *columns], rows)


def study_table(entry: Json, view: View, reference: str) -> str:
    """A row for each kind of assignments with which a routing study tested the first model."""
    model = entry["models"][view.models[0]]
    kinds = [name.removesuffix("_entropy") for name in model if name.endswith("_entropy")]
    if not kinds:
        raise UserError(f"the file has no routing study of {view.models[0]}")
    columns, rows = ["accuracy", "changed", "entropy"], []
    for kind in kinds:
        means = [show_mean(model.get(f"{kind}_{k}"), view.digits) for k in columns]
        rows.append([kind.replace("iters_", "iterations: "), *means])
    return markdown(["assignments in the test", *columns], rows)


def grid_table(document: Json, view: View) -> str:
    axes = [name for group in document["axes"] for name in group]
    entries = list(document["settings"].values())
    baselines = [m for m in view.models if any(m in entry["paired"] for entry in entries)]
    rows = []
    for entry in entries:
        row = [*(entry["values"][name] for name in axes), str(len(entry["runs"]))]
        row += [show_mean(entry["models"].get(m, {}).get(k), view.digits) for k, m in view.pairs]
        for metric, name in itertools.product(view.metrics, baselines):
            row.append(show_mean(entry["paired"].get(name, {}).get(metric), view.digits, "+"))
        rows.append(row)
    return markdown([*axes, "seeds", *view.heads(), *view.heads(f"{document['reference']} − ", baselines)], rows)


def rows_table(documents: list[Json], names: list[str], view: View) -> str:
    """A row for each model and setting of several files. A name "A|B|" of a file with three settings names the first
    two and leaves the third out."""
    rows = []
    for document, of_file in zip(documents, names, strict=True):
        settings, own = document["settings"], "|" in of_file
        labels = of_file.split("|") if own else [of_file] * len(settings)
        for (setting, entry), name in zip(settings.items(), labels, strict=True):
            models = {m: entry["models"][m] for m in view.models or entry["models"] if m in entry["models"] and name}
            for m, found in models.items():
                label = f"{name}: {m}" if len(models) > 1 else name
                means = [show_mean(found.get(k), view.digits) for k in view.metrics]
                values = "" if own or setting == "default" else setting
                rows.append([label, f"{found['n_params']:,}", values, str(len(entry["runs"])), *means])
    columns = ["network", "parameters", "setting", "seeds", *view.metrics]
    if not any(row[2] for row in rows):
        columns, rows = [*columns[:2], *columns[3:]], [[*row[:2], *row[3:]] for row in rows]
    return markdown(columns, rows)


def plain_table(table: Json, columns: list[str], digits: int) -> str:
    where = [table["columns"].index(name) for name in columns]
    return markdown(columns, [[show(row[k], digits) for k in where] for row in table["rows"]])


def claims_table(document: Json, page: str | None) -> str:
    """All claims, or those of a page."""
    columns = ["claim", "the paper's result", "tested on", "accuracy", "against", "difference", "seeds", "verdict"]
    rows = []
    for claim in (claim for claim in document["claims"] if page in (None, claim["page"])):
        for k, c in enumerate(claim["conditions"]):
            name = "" if k else f"{claim['claim']}: **{claim['verdict']}**"
            interval = f" ({show_interval(c, 3, '+')})" if c["low"] is not None else ""
            rows.append([
                name, claim["paper"] if k == 0 else "", c["condition"], show(c["first"]), show(c["second"]),
                f"{c['difference']:+.3f}{interval}", str(c["n"]), c["verdict"],
            ])  # fmt: skip
    return markdown(columns, rows)


def verdicts_table(document: Json) -> str:
    """A row for each claim: the ranges over its conditions, and how many of them give which word."""

    def span(values: list[float], sign: str = "") -> str:
        texts = [f"{value:{sign}.3f}" for value in (min(values), max(values))]
        return texts[0] if texts[0] == texts[1] else " to ".join(texts)

    rows = []
    for claim in document["claims"]:
        found = claim["conditions"]
        words = Counter(c["verdict"] for c in found)
        named = {word: "with one seed" if word == "one seed" else word for word in words}
        counts = ", ".join(f"{words[word]} {named[word]}" for word in sorted(named, key=named.__getitem__))
        verdict = f"**{claim['verdict']}**" + (f": {counts}" if len(words) > 1 else "")
        rows.append([
            f"[{claim['claim']}]({claim['page']})", claim["paper"], span([c["first"] for c in found]),
            span([c["second"] for c in found]), span([c["difference"] for c in found], "+"), verdict,
        ])  # fmt: skip
    return markdown(["claim", "the paper's result", "accuracy", "against", "difference", "verdict"], rows)


def baselines_table(document: Json) -> str:
    """What ``make_toy_norb.py --baselines`` measures: errors on the toys, and on smallNORB as published."""
    models, grey = document["models"], document["grey_levels"]
    rows = []
    for name, who in (("nearest_neighbour", "nearest neighbour"), ("linear", "a linear classifier"), ("cnn", "a CNN")):
        rows.append([f"test error of {who}", f"{models[name]['error']:.1%}", f"{models[name]['real_error']:.1%}"])
    rows.append(["mean of the grey levels, 0 to 255", f"{grey['mean']:.0f}", ""])
    rows.append(["standard deviation of the grey levels", f"{grey['spread']:.0f}", ""])
    rows.append(["parameters of the CNN", f"{models['cnn']['n_params']:,}", ""])
    rows.append(["processor seconds to draw the set", f"{document['drawing']['cpu_seconds']:.0f}", ""])
    return markdown(["", "toys", "smallNORB"], rows)


TABLES = {"seeds": seeds_table, "summary": summary_table, "paired": paired_table, "study": study_table}


def digits_of(options: dict[str, str]) -> int:
    if not re.fullmatch(r"\d", digits := options.get("digits", "3")):
        raise UserError("digits= is a number from 0 to 9")
    return int(digits)


def make_table(document: Json, kind: str, options: dict[str, str], name: str | None = None) -> str:
    """A Markdown table of one kind; see HELP_MARKERS. Raises UserError where kind, options and file do not fit."""
    known: dict[str, set[str]] = {
        "grid": {"metrics", "models", "digits"}, "table": {"columns", "digits"}, "claims": {"page"}, "verdicts": set(),
        "baselines": set(),
    }  # fmt: skip
    if kind not in (*TABLES, *known):
        raise UserError(f"{kind!r} is not a kind of table, which are {', '.join((*TABLES, *known))}")
    if extra := set(options) - known.get(kind, {"metrics", "models", "digits", "setting"}):
        raise UserError(f"a table of kind {kind} takes no {', '.join(sorted(extra))}=")
    digits = digits_of(options)

    def chosen(option: str, default: list[str], there: Iterable[str]) -> list[str]:
        names = options[option].split(",") if option in options else default
        if missing := [n for n in names if n not in there]:
            raise UserError(f"the file has no {option.removesuffix('s')} {', '.join(missing)}")
        return names

    if kind == "verdicts":
        return verdicts_table(document)
    if kind == "baselines":
        return baselines_table(document)
    if kind == "claims":
        return claims_table(document, options.get("page"))
    if kind == "table":
        table = document.get("tables", {}).get(name)
        if table is None:
            raise UserError(f"the file has no table {name!r}")
        return plain_table(table, chosen("columns", table["columns"], table["columns"]), digits)
    first = next(iter(document.get("settings") or [None])) if kind == "grid" else options.get("setting")
    entry = pick_setting(document, first)
    models = chosen("models", list(entry["models"]), entry["models"])
    metrics = chosen("metrics", [document["headline"]], {k for m in models for k in entry["models"][m]})
    view = View(models, metrics, digits)
    return grid_table(document, view) if kind == "grid" else TABLES[kind](entry, view, document["reference"])


# ----------------------------------------------------------------------------------------------------------------------
# Pages
# ----------------------------------------------------------------------------------------------------------------------

HELP_MARKERS = """markers of a page, each closed by <!-- end -->; what stands between is rewritten:
  <!-- table: results/EXPERIMENT/FILE.json seeds -->     a row per seed, then mean, sd and 95 % interval
  <!-- table: results/EXPERIMENT/FILE.json summary metrics=familiar_accuracy,held_out_accuracy -->    a row per model
  <!-- table: results/EXPERIMENT/FILE.json paired setting="em-iters=1 loss=spread" -->     capsules minus each baseline
  <!-- table: results/EXPERIMENT/FILE.json study models=capsules -->     a row per kind of assignments (--routing-study)
  <!-- table: results/EXPERIMENT/FILE.json grid models=capsules,cnn digits=2 -->     a row per setting of a sweep
  <!-- table: results/E/A.json,results/E/B.json rows names=capsules,CNN -->     a row per setting of several files;
      of a file with three settings, "names=A,one|two|" names the first two and leaves the third out
  <!-- table: results/claims.json claims -->             a row per condition of each claim
  <!-- table: results/claims.json verdicts -->           a row per claim
  <!-- table: results/benchmarks/FILE.json table NAME columns=step,ms -->     a table of a benchmark file
  <!-- table: results/toys/baselines.json baselines -->     what simple classifiers reach on the toys
Options: metrics= models= digits= setting= columns= page= names=.
A marker inside `backquotes` is left alone."""

MARKER = re.compile(r"(?<!`)<!--\s*(?:table:\s*(.*?)|end)\s*-->(?!`)", re.DOTALL)


def fill_rows(files: list[str], options: dict[str, str]) -> str:
    """The table of kind rows. Raises UserError where files and options do not fit."""
    documents = [read_json(Path(file)) for file in files]
    entries = [pick_setting(document, next(iter(document.get("settings") or [None]))) for document in documents]
    if extra := set(options) - {"names", "metrics", "models", "digits"}:
        raise UserError(f"a table of kind rows takes no {', '.join(sorted(extra))}=")
    names = options["names"].split(",") if "names" in options else [Path(file).stem for file in files]
    if len(names) != len(files):
        raise UserError(f"names= has {len(names)} names for {len(files)} files")
    for file, document, name in zip(files, documents, names, strict=True):
        if "|" in name and (n := len(name.split("|"))) != len(document["settings"]):
            raise UserError(f"names= has {n} names for the {len(document['settings'])} settings of {file}")
    metrics = (options.get("metrics") or str(documents[0]["headline"])).split(",")
    models = options["models"].split(",") if "models" in options else []
    there: set[str] = set()
    for entry in entries:
        there = there.union(*(entry["models"].get(m, {}) for m in models or entry["models"]))
    if missing := [k for k in metrics if k not in there]:
        raise UserError(f"the files have no metric {', '.join(missing)}")
    return rows_table(documents, names, View(models, metrics, digits_of(options)))


def fill_marker(text: str) -> str:
    """What belongs between a marker and its end. Raises UserError where the marker or its file is at fault."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{error}") from None
    option = re.compile(r"(metrics|models|digits|setting|columns|page|names)=(.*)", re.DOTALL)
    options = {found[1]: found[2] for word in words if (found := option.fullmatch(word))}
    plain_words = [word for word in words if not option.fullmatch(word)]
    if not 2 <= len(plain_words) <= 3:
        raise UserError("a marker names a file, then a kind of table")
    file, kind, *rest = plain_words
    try:
        if (kind, rest) == ("rows", []):
            return f"\n\n{fill_rows(file.split(','), options)}\n\n"
        if rest and kind != "table":
            raise UserError(f"{rest[0]!r} is not an option: write NAME=VALUE")
        return f"\n\n{make_table(read_json(Path(file)), kind, options, *rest)}\n\n"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"the marker does not fit the file ({type(error).__name__}: {error})") from error


def render_page(text: str) -> tuple[str, list[str], list[str]]:
    """The page as it should be; where it differs; and which of its markers are at fault, as ``LINE: message``."""
    parts: list[str] = []
    stale: list[str] = []
    faults: list[str] = []
    end, opened = 0, None
    for marker in MARKER.finditer(text):
        if (marker[1] is None) == (opened is None):  # an end without a beginning, or a second beginning
            what = "closes nothing" if opened is None else f"stands before the end of {opened[0]}"
            faults.append(f"{text.count(NEWLINE, 0, marker.start()) + 1}: {marker[0]} {what}")
        elif opened is not None:
            at = f"{text.count(NEWLINE, 0, opened.start()) + 1}: table {opened[1]}"
            parts.append(text[end : opened.end()])
            old, end = text[opened.end() : marker.start()], marker.start()
            try:
                new = fill_marker(opened[1])
                if new != old:
                    stale.append(f"{at} differs from its file")
            except UserError as error:
                faults.append(f"{at}: {error}")
                new = old
            parts.append(new)
        opened = marker if marker[1] else None
    if opened is not None:
        faults.append(f"{text.count(NEWLINE, 0, opened.start()) + 1}: {opened[0]} has no end")
    return "".join(parts) + text[end:], stale, faults


ACCURACY = re.compile(r"(?<![\w.])(?:0\.[1-9]\d\d|1\.000)(?!\d)")  # as tables write it

NO_SENTENCE = re.compile(r"^```.*?^```|<!--.*?-->|`[^`]*`", re.DOTALL | re.MULTILINE)  # code and comments


def loose_accuracies(text: str) -> list[str]:
    """The accuracies in the sentences of a page that are in no cell of its tables."""
    text = NO_SENTENCE.sub("", text)
    rows: list[str] = []
    sentences: list[str] = []
    for line in text.splitlines():
        (rows if line.lstrip().startswith("|") else sentences).append(line)
    known = set(ACCURACY.findall("\n".join(rows)))
    return [number for number in ACCURACY.findall("\n".join(sentences)) if number not in known]


# ----------------------------------------------------------------------------------------------------------------------
# Are the results what they say?
# ----------------------------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    """What the command in a result stands for."""

    script: Path
    module: ModuleType
    args: argparse.Namespace
    settings: list[Any] | None  # of a comparison of seeds


def load_script(name: str, is_module: bool = False) -> ModuleType:
    """A script of this folder, imported; or a module of a package, by its dotted name."""
    try:
        if is_module:  # python -m benchmarks
            if not re.fullmatch(r"\w+(\.\w+)?", name) or not Path(__file__).with_name(name.split(".")[0]).is_dir():
                raise UserError(f"there is no package {name} here")
            return importlib.import_module(name if "." in name else f"{name}.__main__")
        places = (Path(name), Path(__file__).parent / name) if re.fullmatch(r"(\./)?\w+\.py", name) else ()
        path = next((path.resolve() for path in places if path.is_file()), None)
        if path is None:
            raise UserError(f"there is no script {name} here")
        known = sys.modules.get(path.stem)
        if known and known.__file__ and Path(known.__file__).resolve() == path:
            return known
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name} cannot be imported: {type(error).__name__}: {error}") from None


def parse(module: ModuleType, argv: list[str]) -> tuple[argparse.Namespace, list[Any] | None]:
    """The flags as the script's own parser understands them. Raises UserError in its words."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            if hasattr(module, "parse_command"):
                return module.parse_command(argv)
            return module.make_parser().parse_args(argv), None
    except SystemExit:
        raise UserError(f"its command is no longer understood: {' '.join(said.getvalue().split())}") from None
    except AttributeError:
        raise UserError(f"{module.__name__} has no make_parser()") from None


@functools.lru_cache(1024)
def parse_named(command: str) -> Named:
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if is_module := words[:2] == ["python", "-m"]:
        del words[1]
    if len(words) < 2 or words[0] != "python":
        raise UserError("names no command that made it, such as: python SCRIPT.py FLAGS")
    module = load_script(words[1], is_module)
    args, settings = parse(module, words[2:])
    script = Path(module.__file__ or "")
    if settings is not None:  # the experiment's parser must know the flags after -- too
        script = args.script
        experiment = load_script(os.path.relpath(script))
        for setting in settings:
            parse(experiment, [*setting.args, "--seed=0", "--threads=1", "--quiet", "--out-json=x.json"])
    return Named(script, module, args, settings)


def check_command(document: Json, path: Path) -> Iterator[str]:
    """Would the command write this file, and does the file hold what the command asks for?"""
    named = parse_named(str(document.get("command", "")))
    args = vars(named.args)
    out = args.get("out_json") or args.get("out")
    if out is None or Path(os.path.normpath(out)) != path:
        yield f"its command writes {out or 'no file'}"
    if args.get("eval_only") or args.get("resume"):
        if "checkpoint_command" not in document:
            yield f"its command reads {args.get('checkpoint')}, and nothing says how that was made"
        else:
            made = vars(parse_named(str(document["checkpoint_command"])).args)
            if made.get("checkpoint") != args.get("checkpoint") or made.get("eval_only"):
                yield f"its checkpoint_command does not make {args.get('checkpoint')}"
    if "settings" in document:
        if named.settings is None:
            yield "holds a comparison of seeds, and its command makes none"
        else:
            yield from check_settings(document, named)


def check_settings(document: Json, named: Named) -> Iterator[str]:
    asked = {setting.name: setting for setting in named.settings or []}
    if document["experiment"] != named.script.stem or document["seeds"] != named.args.seeds:
        yield "its experiment or seeds are not those of its command"
    if document["axes"] != named.module.axes_of(named.args):
        yield "its axes are not those of its command"
    if named.args.metric not in (None, document["headline"]):
        yield "its headline is not the metric of its command"
    if list(document["settings"]) != list(asked):
        yield "its settings are not those of its command"
    for name, entry in document["settings"].items():
        if name in asked and (entry["values"], entry["args"]) != (asked[name].values, list(asked[name].args)):
            yield f"setting {name}: its flags are not those of its command"
        seeds = [run["seed"] for run in (*entry["runs"], *entry["failures"])]
        if sorted(seeds) != sorted(document["seeds"]):
            yield f"setting {name}: its runs are not of its seeds"


def differences(stored: Any, computed: Any, where: str) -> Iterator[str]:
    """Where a stored value is not the computed one."""
    if isinstance(stored, dict) and isinstance(computed, dict):
        for key in dict.fromkeys((*computed, *stored)):
            yield from differences(stored.get(key), computed.get(key), f"{where}.{key}" if where else key)
    elif isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        for k, (old, new) in enumerate(zip(stored, computed, strict=True)):
            yield from differences(old, new, f"{where}[{k}]")
    elif isinstance(stored, float) and isinstance(computed, float):
        if not math.isclose(stored, computed, rel_tol=TOLERANCE, abs_tol=1e-12):
            yield f"{where} is {stored}, but its runs give {computed}"
    elif stored != computed or type(stored) is not type(computed):
        yield f"{where} is {stored}, but its runs give {computed}"


def check_numbers(document: Json) -> Iterator[str]:
    """Every number that follows from others, computed again."""
    for name, entry in document.get("settings", {}).items():
        reference = document["reference"]
        stored = {key: entry[key] for key in ("models", "paired")}
        if reference not in entry["models"] or document["headline"] not in entry["models"][reference]:
            yield f"setting {name} has no {document['headline']} of {reference}"
        for model in (run["models"] for run in entry["runs"]):
            if any(
                m.get("n_params") != entry["models"][k].get("n_params")
                for k, m in model.items()
                if k in entry["models"]
            ):
                yield f"setting {name}: the n_params of its runs differ"
        computed = summarise(entry["runs"], reference)
        yield from (f"setting {name}: {fault}" for fault in differences(stored, computed, ""))
    if "best" in document:
        best = {m: best_setting(document["settings"], m, document["headline"]) for m in document["best"]}
        yield from differences(document["best"], best, "best")


def make_claims() -> Json:
    """results/claims.json from the list in claims.py. Raises UserError where runs are missing."""
    try:
        return claims.make_claims(claims.CLAIMS, functools.cache(lambda file: read_json(Path("results") / file)))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"claims.py does not fit the results ({type(error).__name__}: {error})") from error


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False)


def unknown_history() -> str | None:
    """Why commits cannot be looked up here."""
    if not shutil.which("git") or git("rev-parse", "HEAD").returncode:
        return "there is no git history"
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        return "the clone is shallow"
    return None


def check_commits(document: Json, has_history: bool) -> Iterator[str]:
    environment = document.get("environment")
    commits = environment.get("git_commit") if isinstance(environment, dict) else None
    for commit in commits if isinstance(commits, list) and commits else [commits]:
        if isinstance(commit, str) and commit.endswith("-dirty"):
            yield f"was made from a tree with uncommitted changes, at {commit}"
        elif not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
            yield "names no commit that made it"
        elif has_history and git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
            yield f"was made at {commit}, which is not in the history"


def check_result(path: Path, has_history: bool) -> Iterator[str]:
    """What is wrong with one result file, each fault a line."""
    if path.is_file() and path.stat().st_size > MAX_BYTES:
        yield f"{path} is {path.stat().st_size:,} bytes, above {MAX_BYTES:,}"
    try:
        document = read_json(path)
    except UserError as error:
        yield str(error)
        return
    try:
        read_result(path)
    except UserError as error:
        yield str(error)
    checks: list[Callable[[], Iterator[str]]] = [
        lambda: check_command(document, path),
        lambda: check_commits(document, has_history),
        lambda: check_numbers(document),
    ]
    if path == CLAIMS:
        checks = [lambda: differences({**document, "checksum": ""}, {**make_claims(), "checksum": ""}, "")]
    for check in checks:
        try:
            yield from (f"{path}: {fault}" for fault in check())
        except UserError as error:
            yield f"{path}: {error}"
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            yield f"{path} is not what compare_seeds.py writes ({type(error).__name__}: {error})"


fingerprint = functools.lru_cache(code_fingerprint)


def is_older(path: Path) -> bool:
    """Whether the code has changed since the result was made."""
    try:
        document = read_json(path)
        return "code" in document and document["code"] != fingerprint(parse_named(str(document["command"])).script)
    except (UserError, KeyError):
        return False  # what is wrong is a fault of its own


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def report(check: bool, with_claims: bool = False) -> None:
    """Rewrite the pages of the working folder, or say what is wrong with them and the results."""
    if with_claims:
        save_result(CLAIMS, make_claims())
    pages = [Path("README.md"), *sorted(Path("docs").glob("*.md"))]
    for page, path in itertools.product(pages, Path("results").rglob("*.json")):
        if same_file(page, path):
            raise UserError(f"{page} and {path} are the same file")
    problems: list[str] = []
    n_stale, everything = 0, ""
    for page in pages:
        text = read_text(page)
        everything += text
        new, stale, faults = render_page(text)
        problems += [f"{page}:{line}" for line in (*faults, *(stale if check else ()))]
        n_stale += len(stale)
        if check:
            problems += [f"{page}: {number} is in no table of the page" for number in loose_accuracies(text)]
        elif new != text:
            with atomic_write(page) as stream:
                stream.write(new.encode())
            print_result(f"{page}: {len(stale)} rewritten")
    if check:
        parse_named.cache_clear()  # scripts may have changed since the last call
        fingerprint.cache_clear()
        if why := unknown_history():
            print_message(f"warning: commits are not checked: {why}")
        results = sorted(Path("results").rglob("*.json"))
        conditions = [condition for claim in claims.CLAIMS for condition in claim.conditions]
        everything += " ".join(f"results/{runs.file}" for c in conditions for runs in (c.first, c.second))
        for path in results:
            problems += check_result(path, why is None)
            if path.as_posix() not in everything:
                problems.append(f"{path} is used by no page and no claim")
        older = [str(path.relative_to("results")) for path in results if is_older(path)]
        if older:
            print_message(
                f"warning: {len(older)} of {len(results)} results are older than the code: {', '.join(older[:2])}"
                + ", ..." * (len(older) > 2)
            )
    if problems:
        print_message("\n".join(problems))
        hint = "; python report.py rewrites the pages" if n_stale and check else ""
        raise UserError(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the pages and results{hint}")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        examples=[
            ("", "Write the tables of the pages: about 2 seconds."),
            ("--check", "Compare pages, results, commands and commits, and change nothing: about 10 seconds."),
            ("--root ../other --check", "The same in another copy of the repository: about 10 seconds."),
        ],
        description="Rewrite the tables of README.md and docs/*.md from results/.",
        epilog=HELP_MARKERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--check", action="store_true",
        help="Rewrite nothing; exit with status 1 where a page or a result is wrong.")  # fmt: skip
    add("--claims", action="store_true", help=f"Write {CLAIMS} before the pages.")
    add("--root", type=Path, metavar="DIR", default=Path(__file__).resolve().parent,
        help="The folder of README.md and results/. Default: that of this script.")  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.check and args.claims:
        parser.error("argument --claims: --check writes nothing")

    def body() -> None:
        try:
            os.chdir(args.root)
        except OSError as error:
            raise UserError(f"cannot read {args.root}: {error.strerror}") from None
        report(args.check, args.claims)

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
