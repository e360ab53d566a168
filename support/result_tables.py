"""Markdown tables of comparisons by compare_seeds.py, of the claims and of benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from smallnorb_novel_viewpoint import UserError
from support.statistics import MIN_SEEDS, describe_sample, has_scipy

Json = dict[str, Any]


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


def show_mean(sample: Json | None, digits: int) -> str:
    """Mean, and half of its 95 % interval."""
    if not sample:
        return ""
    half = "" if sample["low"] is None else f" ± {sample['high'] - sample['mean']:.{digits}f}"
    return f"{sample['mean']:.{digits}f}{half}"


def show_points(condition: Json) -> str:
    """The difference of a comparison with its interval, in percentage points: two digits where it is a narrow one."""
    if "difference" not in condition:
        return ""
    ends = [100 * condition[name] for name in ("difference", "low", "high") if condition[name] is not None]
    digits = 2 if len(ends) == 3 and ends[2] - ends[1] < 1 else 1
    shown = [f"{value:+.{digits}f}" for value in ends]
    return f"{shown[0]} ({shown[1]} to {shown[2]})" if len(ends) == 3 else shown[0]


def in_words(metric: str) -> str:
    """A metric at the head of a column, where a page can break its line."""
    return metric.replace("_", " ")


class View(NamedTuple):
    """What of a comparison a table shows."""

    models: list[str]
    metrics: list[str]
    digits: int

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return list(itertools.product(self.metrics, self.models))


def view_of(documents: list[Json], options: dict[str, str]) -> View:
    """Raises UserError for a model or metric that the documents have not."""
    there: dict[str, set[str]] = {}
    for entry in (entry for document in documents for entry in document["settings"].values()):
        for model, metrics in entry["models"].items():
            there.setdefault(model, set()).update(metrics)
    models = options["models"].split(",") if "models" in options else list(there)
    metrics = options["metrics"].split(",") if "metrics" in options else [documents[0]["headline"]]
    if missing := [name for name in models if name not in there]:
        raise UserError(f"there is no model {', '.join(missing)}")
    if missing := [name for name in metrics if not any(name in there[m] for m in models)]:
        raise UserError(f"there is no metric {', '.join(missing)}")
    return View(models, metrics, int(options.get("digits", 3)))


def names_in(options: dict[str, str], documents: list[Json]) -> list[str]:
    """The names that a marker gives its files; empty ones without."""
    names = options["names"].split(",") if "names" in options else [""] * len(documents)
    if len(names) != len(documents):
        raise UserError(f"names= has {len(names)} names for {len(documents)} files")
    return names


def seeds_table(documents: list[Json], options: dict[str, str]) -> str:
    """A row for each seed, or for the first N, then mean and standard deviation of these, and the interval where there
    are five or more; columns for each file, by its name, and for each setting."""
    view, n = view_of(documents, options), int(options["first"]) if "first" in options else None
    heads, columns, seeds = [], [], []
    for document, name in zip(documents, names_in(options, documents), strict=True):
        entries = document["settings"].values()
        models = {m for entry in entries for k, m in view.pairs if k in entry["models"].get(m, {})}
        is_one = bool(name) and len(models) == 1  # which the name stands for
        for setting, entry in document["settings"].items():
            of = [name, setting if len(document["settings"]) > 1 else ""]
            seeds.append([run["seed"] for run in entry["runs"][:n]])
            for k, m in ((k, m) for k, m in view.pairs if k in entry["models"].get(m, {})):
                heads.append(f"{' '.join(filter(None, [*of, '' if is_one else m]))}: {in_words(k)}")
                columns.append([run["models"][m][k] for run in entry["runs"][:n]])
    if any(other != seeds[0] for other in seeds):
        raise UserError("the files hold other seeds")
    samples = [describe_sample(column) for column in columns]
    rows = [[str(seed), *(show(x, view.digits) for x in xs)] for seed, *xs in zip(seeds[0], *columns, strict=True)]
    rows.append(["mean", *(show(s["mean"], view.digits) for s in samples)])
    if len(seeds[0]) > 1:
        rows.append(["sd", *(show(s["sd"], view.digits) for s in samples)])
    if len(seeds[0]) >= MIN_SEEDS and has_scipy():
        rows.append(["95 %", *(f"{s['low']:.{view.digits}f} to {s['high']:.{view.digits}f}" for s in samples)])
    return markdown(["seed", *heads], rows)


def paired_table(document: Json, options: dict[str, str]) -> str:
    """Of a comparison of one setting, the reference minus each other model; a verdict with five seeds or more."""
    (entry,), view = document["settings"].values(), view_of([document], options)
    rows = []
    for metric, name in view.pairs:
        if s := entry["paired"].get(name, {}).get(metric):
            ends = [f"{s[end]:+.{view.digits}f}" for end in ("mean", "low", "high") if s[end] is not None]
            rows.append(
                [name, metric, ends[0], " to ".join(ends[1:]), f"{s['higher']} of {s['n']}", s["verdict"] or ""]
            )
    columns = [f"{document['reference']} minus", "metric", "difference", "95 % interval", "higher on", "verdict"]
    keep = [k for k in range(6) if k < 5 or any(row[k] for row in rows)]
    return markdown([columns[k] for k in keep], [[row[k] for k in keep] for row in rows])


def metrics_table(document: Json, options: dict[str, str]) -> str:
    """Of a comparison of one setting, a row for each metric and a column for each model: however many metrics there
    are, it fits a terminal."""
    (entry,), view = document["settings"].values(), view_of([document], options)
    of_models = [entry["models"][m] for m in view.models]
    rows = [["parameters", *(f"{of_model.get('n_params', 0):,}" for of_model in of_models)]]
    rows += [[in_words(k), *(show_mean(of_model.get(k), view.digits) for of_model in of_models)] for k in view.metrics]
    return markdown([f"mean of {len(entry['runs'])} seeds", *view.models], rows)


def rows_table(documents: list[Json], options: dict[str, str]) -> str:
    """A row for each model and setting of one or several files, named by ``names``. A name "A|B|" of a file with three
    settings names the first two and leaves the third out. Without names a row has the model's."""
    view = view_of(documents, options)
    rows = []
    for document, of_file in zip(documents, names_in(options, documents), strict=True):
        settings, own = document["settings"], "|" in of_file
        labels = of_file.split("|") if own else [of_file] * len(settings)
        if len(labels) != len(settings):
            raise UserError(f"names= has {len(labels)} names for {len(settings)} settings")
        for (setting, entry), name in zip(settings.items(), labels, strict=True):
            models = [m for m in view.models if m in entry["models"] and (name or not own)]
            for m in models:
                label = f"{name}: {m}" if name and len(models) > 1 else name or m
                means = [show_mean(entry["models"][m].get(k), view.digits) for k in view.metrics]
                values = "" if own or setting == "default" else setting
                n_params = f"{entry['models'][m].get('n_params', 0):,}"
                rows.append([label, n_params, values, str(len(entry["runs"])), *means])
    columns = ["network", "parameters", "setting", "seeds", *map(in_words, view.metrics)]
    keep = [k for k in range(len(columns)) if k != 2 or any(row[2] for row in rows)]
    return markdown([columns[k] for k in keep], [[row[k] for k in keep] for row in rows])


def plain_table(document: Json, name: str, options: dict[str, str]) -> str:
    table = document.get("tables", {}).get(name)
    if table is None:
        raise UserError(f"the file has no table {name!r}")
    digits = int(options.get("digits", 3))
    return markdown(table["columns"], [[show(cell, digits) for cell in row] for row in table["rows"]])


SEARCHED = {"shapes": "drawn shapes", "voxels": "the write-up's objects", "mnist": "MNIST"}  # by a file's first word


def searches_table(searches: dict[str, Json]) -> str:
    """A row for each search by evidence/search.py: the values of its grid, the best ones in bold, and their test."""

    def axis(values: list[Any], best: Any) -> str:
        return ", ".join(f"**{value:g}**" if value == best else f"{value:g}" for value in values)

    def in_words(network: str) -> str:
        words = network.replace("_", " ").replace("capsnet c", "c").replace("cnn", "CNN")
        return words.replace("1 iterations", "1 iteration").replace("reconstruction 0", "no reconstruction")

    columns = ["data and network", "rate", "decay", "epochs", "accuracy, fresh seeds", "twice the epochs, points"]
    rows = []
    for name, found in searches.items():
        data, condition, network = name.split("_", 2)
        fresh, twice = found["fresh"], found.get("doubled_length")
        accuracy = next(value for metric, value in fresh.items() if metric not in ("seeds", "sd"))
        rows.append([
            f"{SEARCHED[data]}, {condition}: {in_words(network)}", *map(axis, found["axes"], found["winner"]),
            f"{accuracy:.3f} ({fresh['seeds']} seeds)",
            f"{100 * twice['change']:+.1f} ± {100 * twice['standard_error']:.1f}" if twice else "not tried",
        ])
    return markdown(columns, rows)


def claims_table(claims: Sequence[Json], page: str | None, kind: str = "") -> str:
    """For each of all claims, or of those of a page, a line and a table with a row for each condition."""
    columns = ["tested on", "accuracy", "against", "difference, points", "seeds", "verdict"]
    parts = []
    for claim in (claim for claim in claims if page in (None, claim["page"])):
        rows = [
            [c["condition"], show(c.get("first")), show(c.get("second")), show_points(c), show(c.get("n", c["seeds"])),
             c["verdict"]]
            for c in claim["conditions"]
        ]
        head = f"*{claim['claim']}*{kind}: **{claim['verdict']}**. The paper: {claim['paper']}."
        parts += [head, markdown(columns, rows)]
    return "\n\n".join(parts)
