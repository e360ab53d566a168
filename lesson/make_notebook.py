"""The lesson docs/how_capsules_work.md as a notebook, or as a program, by the ending of the file that is named.

    python -m lesson.make_notebook my_lesson.ipynb      Then open it with Jupyter, from the folder of the project.
    python -m lesson.make_notebook my_lesson.py         Then: python my_lesson.py

Both must lie in the folder of the project, whose drawn digits they use. A file that is there already is left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.files import told_as
from smallnorb_novel_viewpoint import Parser, UserError, path_of, script
from support.experiment import ROOT

PAGE = ROOT / "docs" / "how_capsules_work.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
OF_NOTEBOOK = """The lesson as a notebook. The output below a cell is the page's until you run it. The code under a bold
line is folded on the page; JupyterLab hides it."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)]+)(?=\))")


class Cell(NamedTuple):
    source: str
    is_code: bool = False
    is_folded: bool = False
    output: str = ""  # what the page says that the code prints

    @property
    def needs_torch(self) -> bool:
        """Whether it is left to those who have PyTorch: a notebook shows it as text."""
        return self.is_code and "import torch" in self.source


def cells(page: Path = PAGE) -> list[Cell]:
    """The text and the code of a page in its order."""
    text, found, end = page.read_text(encoding="utf-8"), list[Cell](), 0
    for block in BLOCK.finditer(text):
        if before := text[end : block.start()].strip():
            found.append(Cell(before))
        if block[1] == "python":
            before = text[: block.start()]
            is_folded = before.count("<details>") > before.count("</details>")
            found.append(Cell(block[2].rstrip(), True, is_folded))
        else:
            found[-1] = found[-1]._replace(output=block[2])
        end = block.end()
    return [*found, Cell(text[end:].strip())]


def as_shown(text: str, folder: Path) -> str:
    """GitHub's Markdown as Jupyter reads it: formulas between dollars, no folds, links from ``folder``."""
    text = re.sub(r"<details><summary>(.*?)</summary>", r"**\1**", text).replace("</details>", "")
    text = re.sub(r"^```math\n(.*?)^```", r"$$\n\1$$", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", re.sub(r"\$`(.*?)`\$", r"$\1$", text), flags=re.DOTALL)
    there = os.path.relpath(PAGE.parent, folder)
    return LINK.sub(lambda link: Path(os.path.normpath(f"{there}/{link[1]}")).as_posix(), text).strip()


def notebook(folder: Path) -> dict[str, Any]:
    def parts() -> Iterator[dict[str, Any]]:
        for k, cell in enumerate([Cell(OF_NOTEBOOK), *cells()]):
            part = {"id": f"cell-{k}", "source": cell.source, "metadata": {}}
            if cell.is_code and not cell.needs_torch:
                outputs = [{"output_type": "stream", "name": "stdout", "text": cell.output}] if cell.output else []
                hidden = {"jupyter": {"source_hidden": True}} if cell.is_folded else {}
                yield part | {"cell_type": "code", "execution_count": None, "outputs": outputs, "metadata": hidden}
            elif cell.is_code:
                shown = f"```python\n{cell.source}\n```\n\n```text\n{cell.output}```"
                yield part | {"cell_type": "markdown", "source": shown}
            elif source := as_shown(cell.source, folder):
                yield part | {"cell_type": "markdown", "source": source}

    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": list(parts()), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def program() -> str:
    """The code of the page but for PyTorch; its headings are comments."""
    parts = (c.source if c.is_code else "\n".join(re.findall(r"^#+ .*", c.source, re.MULTILINE))
             for c in cells() if not c.needs_torch)
    return "\n\n\n".join(filter(None, parts)) + "\n"


def run_page(page: Path = PAGE, n_steps: int | None = None) -> dict[str, Any]:
    """Run the code of a page in its order, all but PyTorch, with another number of training steps if one is given.
    Returns what it has defined."""
    names: dict[str, Any] = {"__name__": page.stem}
    for source in (cell.source for cell in cells(page) if cell.is_code and "torch" not in cell.source):
        if n_steps is not None:
            source = re.sub(r"^N_STEPS = \d+$", f"N_STEPS = {n_steps}", source, flags=re.MULTILINE)
        exec(compile(source, str(page), "exec"), names)
    return names


@script
def main(argv: Sequence[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=path_of, help="a new file that ends in .ipynb or .py")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    path = parser.parse_args(argv).file
    if path.suffix not in (".ipynb", ".py"):
        raise UserError(f"{path} ends neither in .ipynb nor in .py")
    if path.exists():
        raise UserError(f"{path} is there already, and is left alone: run it, delete it, or name another file")
    made = program() if path.suffix == ".py" else json.dumps(notebook(path.parent.resolve()), indent=1) + "\n"
    with told_as(f"cannot write {path}"), path.open("x", encoding="utf-8") as stream:
        stream.write(made)
    print(f"wrote {path}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
