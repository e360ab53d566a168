"""Run the first seeds of results again, with the code of today and on this machine, and compare every number.

    python -m evidence.again results/smallnorb_novel_viewpoint/registered_azimuths.json#capsules --n-seeds 2
    python -m evidence.again        # the first seed of every registered comparison; for docs/method.md

The command of a result is run as it stands in its file, in an empty folder, with fewer seeds and another --out. Times
are not compared.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare_seeds import SECONDS, shortened
from evidence import claims
from smallnorb_novel_viewpoint import Parser, UserError, int_in, path_of, script
from support.experiment import ROOT, require_writable
from support.result_tables import markdown, show
from support.results import environment, save_result
from support.statistics import read_comparison

Json = dict[str, Any]
OUT = Path("results/again.json")
COLUMNS = ["result", "seeds", "numbers", "the same", "headline, then", "headline, again"]


def registered() -> list[str]:
    """FILE or FILE#PART of each side of the registered comparisons, once."""
    sides = (side.file for claim in claims.REGISTERED for c in claim.conditions for side in claims.sides(c))
    return [f"results/{file}" for file in dict.fromkeys(sides)]


def run_again(where: str, seeds: Sequence[int], command: str) -> Json:
    """The same comparison with these seeds. Raises UserError with the first error of the failed command."""
    words = [str(ROOT / "compare_seeds.py"), *shlex.split(command)[2:]]
    end = words.index("--") if "--" in words else len(words)
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/again.json"
        words[end:end] = ["--seeds", ",".join(map(str, seeds)), "--out", out]  # of two, the last counts
        # where no runs are kept
        done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, encoding="utf-8")
        if done.returncode:
            why = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
            raise UserError(f"{where} could not be run again: {why}")
        part = where.partition("#")[2]
        return read_comparison(f"{out}#{part}" if part else out)


def metrics(document: Json, seeds: Sequence[int]) -> dict[tuple[str, ...], float]:
    """Those of some seeds by setting, seed, model and name, to six digits, times aside."""
    return {
        (setting, str(run["seed"]), model, name): value
        for setting, entry in document["settings"].items() for run in entry["runs"] if run["seed"] in seeds
        for model, found in run["models"].items() for name, value in shortened(found).items()
        if isinstance(value, float) and name not in SECONDS
    }


def compare(where: str, n_seeds: int) -> list[Any]:
    """A row of the table: how many numbers there are, how many of them come out the same to six digits, as results have
    today, and the mean of the headline metric, then and now."""
    document = read_comparison(where)
    seeds = [run["seed"] for run in next(iter(document["settings"].values()))["runs"]][:n_seeds]
    then, now = (metrics(d, seeds) for d in (document, run_again(where, seeds, document["command"])))
    headline = (document["reference"], document["headline"])
    columns = ([value for key, value in found.items() if key[2:] == headline] for found in (then, now))
    means = (sum(column) / len(column) if column else None for column in columns)
    n_same = sum(now.get(key) == value for key, value in then.items())
    return [where.removeprefix("results/"), len(seeds), len(then), n_same, *means]


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description="Run the first seeds of results again, and compare every number.")
    parser.add_argument("results", nargs="*", metavar="FILE", help="Result by compare_seeds.py, or FILE#PART. Default:"
        " every registered comparison: about an hour on one thread.")
    parser.add_argument("--n-seeds", type=int_in(1, 10_000).convert, default=1, metavar="N",
        help="Run the first N seeds of each. Default: 1.")
    parser.add_argument("--out", type=path_of, default=OUT, metavar="FILE", help=f"File of the result. Default: {OUT}.")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    return parser


@script
def main(argv: Sequence[str]) -> None:
    args = make_parser().parse_args(argv)
    require_writable(args.out)
    rows = []
    for where in args.results or registered():
        rows.append(compare(where, args.n_seeds))
        print(markdown(COLUMNS, [[show(cell) for cell in rows[-1]]]).splitlines()[-1], flush=True)
    command = shlex.join(["python", "-m", "evidence.again", *args.results, "--n-seeds", str(args.n_seeds),
                          "--out", str(args.out)])
    tables = {"again": {"columns": COLUMNS, "rows": rows}}
    save_result(args.out, {"command": command, "environment": environment(1), "tables": tables})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
