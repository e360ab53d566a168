"""Every reading of a comparison in the history of the project, the contrary ones too.

    python -m evidence.earlier      # writes results/earlier_readings.json, for docs/earlier_rounds.md

The readings are those of all versions of results/claims.json that were committed, and those of the attacks on digits,
which are older than that file. They are exploratory: see the head of claims.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smallnorb_novel_viewpoint import Parser, UserError, path_of, script
from support.experiment import ROOT, require_writable
from support.result_tables import show_points
from support.results import environment, git, save_result

OUT = Path("results/earlier_readings.json")
CLAIMS = "results/claims.json"
LAST = "d68380710b5a6d7a79623176adac2c77e488daa1"  # the last commit with exploratory readings alone
DIGITS = (  # attacks on matrix capsules that had learned digits
    "fb502cbfddb7e21aaadc51c3fb1111b9c4714364", "results/mnist_matrix_capsules_seeds.json",
)
SUBJECTS = {  # a word of the claim -> the table's name
    "attack": "attacks", "azimuth": "new azimuths", "elevation": "new elevations", "equal accuracy": "toys",
    "look new": "classes that look new from behind", "toys": "toys", "Reconstruction": "reconstruction",
    "overlapping digits be": "overlapping digits", "rotated": "rotated and distorted digits",
    "turned": "rotated and distorted digits", "iterations": "iterations of dynamic routing",
    "bias": "bias of the votes", "EM routing": "EM routing", "spread": "losses",
}


class Reading(NamedTuple):
    claim: str
    condition: str
    n: int
    difference: float
    low: float | None
    high: float | None
    verdict: str
    listed: bool  # whether its seeds were listed before the runs
    commit: str
    date: str


def show(*words: str) -> str:
    done = git(*words, cwd=ROOT)
    if done.returncode:
        raise UserError("this needs the whole history of the project: git fetch --unshallow")
    return str(done.stdout)


def readings() -> Iterator[Reading]:
    """The oldest first; one that a later version repeats is not given again."""
    commit, file = DIGITS
    runs = json.loads(show("show", f"{commit}:{file}"))["settings"]["default"]
    date = show("log", "-1", "--format=%ad", "--date=short", commit).strip()
    for kind in ("fgsm", "iterated"):
        for epsilon in ("0.05", "0.1", "0.2", "0.3"):
            it = runs["paired"]["cnn"][f"{kind}_{epsilon}_accuracy"]
            name = f"digits, {'one step' if kind == 'fgsm' else 'ten steps'}, ε = {epsilon}"
            yield Reading("attack", name, it["n"], it["mean"], it["low"], it["high"], "no verdict", False, commit, date)
    seen = set()
    for line in show("log", "--reverse", "--format=%H %ad", "--date=short", LAST, "--", CLAIMS).splitlines():
        commit, date = line.split()
        for claim in json.loads(show("show", f"{commit}:{CLAIMS}"))["claims"]:
            for c in claim["conditions"]:
                if c.get("low") is None:
                    continue
                key = (claim["claim"], c["condition"], c["n"], round(c["difference"], 4), c["verdict"])
                if key not in seen:
                    seen.add(key)
                    yield Reading(claim["claim"], c["condition"], c["n"], c["difference"], c["low"], c["high"],
                                  c["verdict"], "seeds" in c, commit, date)


def subject(claim: str) -> str:
    return next(name for word, name in SUBJECTS.items() if word in claim)


def weakness(reading: Reading, later: Sequence[Reading]) -> str:
    """What was weak about a reading, in few words."""
    if not reading.listed:
        return "seeds were not listed"
    if any(r.condition == reading.condition and r.claim == reading.claim for r in later):
        return "seeds were added"
    if subject(reading.claim) != "attacks":
        return "search was too small"
    of_one_step = reading.condition.startswith(("one step", "FGSM"))
    return "search was not under attack" if of_one_step else "ten steps were too few"


def make_tables() -> dict[str, Any]:
    found = list(readings())
    tables: dict[str, Any] = {}
    columns = ["tested on", "seeds", "difference, points", "said then", "commit, date", "weakness"]
    for k, reading in enumerate(found):
        table = tables.setdefault(subject(reading.claim), {"columns": columns, "rows": []})
        condition = reading.condition.replace("turned", "rotated")  # one word a thing, on all pages
        table["rows"].append([condition, reading.n, show_points(reading._asdict()), reading.verdict,
                              f"{reading.commit[:7]}, {reading.date}", weakness(reading, found[k + 1 :])])
    for table in tables.values():
        table["rows"].sort(key=lambda row: row[0])
    return tables


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description="List every earlier reading of a comparison, from the history.")
    parser.add_argument("--out", type=path_of, metavar="FILE", help=f"File of the result. Default: {OUT}.")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    return parser


@script
def main(argv: Sequence[str]) -> None:
    args = make_parser().parse_args(argv)
    out = args.out or ROOT / OUT
    require_writable(out)
    tables = make_tables()
    for name, table in tables.items():
        print(f"{name}: {len(table['rows'])} readings")
    command = f"python -m evidence.earlier --out {args.out or OUT}"
    save_result(out, {"command": command, "environment": environment(1), "tables": tables})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
