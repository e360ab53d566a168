"""Draw the pictures of a page again, by the commands of docs/figures.md, and say which are unchanged.

    python -m support.redraw                    # those of README.md
    python -m support.redraw docs/toys.md       # of another page
    python -m support.redraw --all              # of every page; --data-dir FOLDER where MNIST cannot be downloaded

The figure scripts ask this module where a picture may be written. That of a page is replaced by the page's own command,
and by another one with --overwrite alone; else the new one goes to the same place below out/.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from data.files import read_text
from smallnorb_novel_viewpoint import Parser, UsageError, UserError, path_of, script
from support.experiment import ROOT, script_path

TABLE = Path("docs/figures.md")
FREE = ("--figures", "--outdir", "--out", "--preview", "--data-dir", "--threads", "--quiet", "--overwrite")


class Row(NamedTuple):
    """Of the tables in docs/figures.md."""

    pictures: list[str]  # their paths in the project; of a whole folder, one that ends in /
    command: str
    time: str
    needs: str  # beside the project; empty if nothing

    def draws(self, path: str) -> bool:
        return any(path == own or (own.endswith("/") and path.startswith(own)) for own in self.pictures)


def read_rows() -> list[Row]:
    """No row without the page, as where a part of the project was copied."""
    page = ROOT / TABLE
    lines = page.read_text(encoding="utf-8").splitlines() if page.is_file() else ()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [Row(listed(row[0]), row[1].strip("`"), row[2], "".join(row[3:]))
            for row in cells if row[1].startswith("`python ")]


def listed(cell: str) -> list[str]:
    """The paths in a cell: some files of a folder, a whole folder, or files."""
    first, *others = re.findall(r"`(.+?)`", cell)
    return [first + other for other in others] if first.endswith("/") and others else [first, *others]


def in_project(path: Path) -> str | None:
    """A path as the tables write it; None of one that lies elsewhere."""
    whole = path.resolve()
    return whole.relative_to(ROOT).as_posix() if whole.is_relative_to(ROOT) else None


def meaning(words: Sequence[str]) -> tuple[Path | None, frozenset[str]]:
    """The script of a command line, and its flags without those that choose files or pictures. The words are those
    after "python"."""
    name, *flags = words[1:] if words[:1] == ["-m"] else words or [""]
    given = re.findall(r"--\S+", re.sub(r"(--[a-z-]+)\s+(?!--)", r"\1=", " ".join(flags)))
    return script_path(name), frozenset(flag for flag in given if flag.split("=")[0] not in FREE)


def place_of(path: Path, overwrite: bool) -> tuple[Path, str]:
    """Where a picture that differs from the file ``path`` may be written, and what the reader is told of it."""
    rows = [row for row in read_rows() if row.draws(in_project(path) or "")]
    if not rows:
        return path, ""
    if overwrite or meaning(sys.argv) in [meaning(shlex.split(row.command)[1:]) for row in rows]:
        return path, ", which differs from the picture of the page"
    place = ROOT / "out" / str(in_project(path))
    near = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    return near, f": {path} is of another command and stays as it is (--overwrite replaces it)"


def pictures_of(page: Path) -> Iterator[str]:
    """The paths of the pictures that a page shows."""
    for link in re.findall(r"\]\(([^)]+\.(?:png|gif|svg))\)", read_text(page)):
        yield in_project(page.parent / link) or link


def files_of(row: Row) -> dict[Path, bytes]:
    own = [ROOT / picture for picture in row.pictures]
    files = [file for path in own for file in (path.iterdir() if path.is_dir() else [path])]
    return {path: path.read_bytes() for path in files if path.is_file()}


def redraw(wanted: Collection[str] | None, data_dir: Path | None) -> None:
    """Run the commands of the ``wanted`` pictures, or of all, with MNIST from ``data_dir`` where one is given. Raises
    UserError where one fails."""
    rows = read_rows()
    if wanted is not None:
        first = [next((row for row in rows if row.draws(path)), None) for path in wanted]
        rows = [row for row in rows if row in first]
    changed, n_same, n_left_out, failed = [], 0, 0, []
    for row in rows:
        print(f"\n{row.command}   # {row.time}", flush=True)
        if row.needs:
            print(f"left out: it needs {row.needs}")
            n_left_out += 1
            continue
        before = files_of(row)
        place = ["--data-dir", str(data_dir.absolute())] if data_dir and "--dataset mnist" in row.command else []
        done = subprocess.run([sys.executable, *shlex.split(row.command)[1:], *place], cwd=ROOT, check=False)
        failed += [row.command] * (done.returncode != 0)
        for path, content in files_of(row).items():
            is_same = before.get(path) == content
            n_same += is_same and done.returncode == 0
            changed += [] if is_same else [in_project(path)]
    left_out = f", {n_left_out} left out" if n_left_out else ""
    print(f"\n{n_same} unchanged, {len(changed)} changed{left_out}" + "".join(f"\n    {path}" for path in changed))
    if failed:
        raise UserError(f"{len(failed)} of {len(rows)} commands failed: {failed[0]}")


@script
def main(argv: Sequence[str]) -> None:
    parser = Parser(description="Draw the pictures of a page again, by the commands of docs/figures.md.")
    parser.add_argument("pages", nargs="*", type=path_of, metavar="PAGE",
                        help="Pages, such as docs/toys.md. (README.md)")
    parser.add_argument("--all", action="store_true", help="The pictures of every page.")
    parser.add_argument("--data-dir", type=path_of, metavar="FOLDER",
                        help="Folder of the four MNIST files. (the cache, where they are downloaded to)")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.all and args.pages:
        raise UsageError("argument --all: not together with a page")
    pages = args.pages or [ROOT / "README.md"]
    redraw(None if args.all else {path for page in pages for path in pictures_of(page)}, args.data_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
