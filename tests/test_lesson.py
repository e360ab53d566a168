"""The lesson docs/how_capsules_work.md: it runs as a notebook and prints what it says; numbers by hand are right."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from explorer.make_explorer import TEMPLATE
from helpers import ROOT, Capture, Patch, failure, usage_error
from lesson import make_notebook, solutions, visualize_how_capsules_work as pictures
from lesson.make_notebook import PAGE, cells, run_page

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_notebook_runs_cell_by_cell_and_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """As one program, shortened only in its number of steps; what is printed before the training is the page's."""
    monkeypatch.delenv("MNIST_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    assert make_notebook.main(["my_lesson.ipynb"]) == 0
    content = json.loads(Path("my_lesson.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    before_training, n_printing = True, 0
    for cell in code:
        source = re.sub(r"^N_STEPS = 1500$", "N_STEPS = 20", cell["source"], flags=re.MULTILINE)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, "cell", "exec"), names)
        found, said = printed.getvalue(), "".join(output["text"] for output in cell["outputs"])
        assert bool(found) == bool(said), source
        n_printing += bool(said)
        if source != cell["source"]:
            before_training = False
            assert found.splitlines()[0].partition(" after")[0] == said.partition(" after")[0]
        elif before_training or "# E-step" in source:
            assert found == said
        else:  # other numbers, of a shorter training
            digits = re.compile(r"\d+(\.\d+)?")
            assert digits.sub("", found) == digits.sub("", said)
    assert (before_training, n_printing) == (False, 7)
    assert names["accuracy"](3) > 0.2, "twenty steps of training do better than guessing"
    hidden = [cell["metadata"].get("jupyter", {}).get("source_hidden", False) for cell in code]
    unfolded = re.sub(r"<details>.*?</details>", "", TEXT, flags=re.DOTALL)
    assert hidden == [cell["source"] not in unfolded for cell in code]
    assert {*hidden} == {True, False}
    for folder, parts in ((tmp_path, content), (ROOT, make_notebook.notebook(ROOT))):  # links from where it lies
        text = "".join(cell["source"] for cell in parts["cells"] if cell["cell_type"] == "markdown")
        links = re.findall(r"\]\((?!http|#)(.*?)(?:#.*?)?\)", text)
        assert len(links) > 15
        assert all((folder / link).exists() for link in links)
    assert not re.search(r"<details>|\$`|```math|<!--", text)
    assert all(f"**{line}**" in text for line in re.findall(r"<summary>(.*?)</summary>", TEXT))
    (torch_cell,) = [cell for cell in cells() if cell.needs_torch]
    assert torch_cell.output.strip()
    assert f"```text\n{torch_cell.output}```" in text  # what it prints, too
    capsys.readouterr()
    assert "is there already" in failure(make_notebook, ["my_lesson.ipynb"], capsys)
    assert "neither in .ipynb nor in .py" in failure(make_notebook, ["my_lesson.txt"], capsys)
    usage_error(make_notebook, [], capsys)
    assert make_notebook.main(["my_lesson.py"]) == 0
    program = "\n".join(cell.source for cell in cells() if cell.is_code and not cell.needs_torch)
    assert ast.dump(ast.parse(Path("my_lesson.py").read_text(encoding="utf-8"))) == ast.dump(ast.parse(program))


def test_the_same_network_in_pytorch(capsys: Capture, monkeypatch: Patch) -> None:
    """It runs after the rest of the page, gives no name a second meaning, and learns as the network in numpy does."""
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("MNIST_DIR", raising=False)
    names = run_page(n_steps=20)
    (cell,) = [cell for cell in cells() if cell.needs_torch]
    before = {name: value for name, value in names.items() if callable(value) or name in ("params", "test_images")}
    capsys.readouterr()
    exec(compile(cell.source, str(PAGE), "exec"), names)
    assert {name: names[name] for name in before} == before
    difference, right = capsys.readouterr().out.splitlines()
    assert float(difference.rpartition(" ")[2]) < 1e-12
    assert float(right.partition("%")[0]) > 20  # twenty steps do better than guessing
    # One step from the same parameters.
    labels = names["train_labels"][:8]
    params = {name: torch.tensor(p, requires_grad=True) for name, p in names["params"].items()}
    v = names["forward_torch"](params, names["train_images"][:8])
    loss = names["margin_loss_torch"](v, torch.tensor(np.eye(10)[labels])) / 8
    loss.backward()
    expected, grads = names["loss_and_grads"](names["params"], names["train_images"][:8], labels)
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-10)
    optimizer = torch.optim.AdamW(params.values(), lr=0.02, betas=(0.9, 0.99), weight_decay=0.01)
    optimizer.step()
    moved = {name: p.copy() for name, p in names["params"].items()}
    zeros = [{name: np.zeros_like(p) for name, p in moved.items()} for _ in range(2)]
    names["adamw_step"](moved, grads, *zeros, 1, 0.02)
    for name, p in params.items():
        np.testing.assert_allclose(p.grad.numpy(), grads[name], rtol=1e-8, atol=1e-14)
        np.testing.assert_allclose(p.detach().numpy(), moved[name], rtol=1e-6, atol=1e-9)


def test_one_function_has_one_text() -> None:
    """On the lesson's page, on the reference page and in the solutions."""

    def functions(code: str) -> dict[str, str]:
        return dict(re.findall(r"^def (\w+)(.*?)(?=\n\n\n|\Z)", code, re.MULTILINE | re.DOTALL))

    pages = [PAGE, ROOT / "docs" / "capsule_reference.md"]
    lesson, reference = (functions("\n\n\n".join(c.source for c in cells(page) if c.is_code)) for page in pages)
    ours = functions(Path(solutions.__file__).read_text(encoding="utf-8"))
    assert len(shared := lesson.keys() & reference.keys()) == 10
    assert {name: lesson[name] for name in shared} == {name: reference[name] for name in shared}
    assert ours.keys() - reference.keys() == {"network"}
    del ours["network"]
    assert {name: reference[name] for name in ours} == ours


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def votes_in_tables() -> list[list[list[float]]]:
    """Of the first example in rows 0 to 3, of the second in 4 to 7."""
    rows = re.findall(r"^\| \d \| \((.*?)\) \| \((.*?)\) \|$", TEXT, re.MULTILINE)
    return [[[*map(number, vote.split(", "))] for vote in row] for row in rows]


def test_dynamic_routing_by_hand_has_the_numbers_of_its_code() -> None:
    (example,) = re.findall(r"^example = np.array\((.*?)\)$", TEXT, re.MULTILINE)
    assert votes_in_tables()[:4] == ast.literal_eval(example) == pictures.WORKED_EXAMPLE.tolist()
    (_, _, first), (c, s, v) = solutions.dynamic_routing(pictures.WORKED_EXAMPLE, 2)[1]
    np.testing.assert_allclose(first, [[0.5, 0.0], [0.0, 0.0]], atol=1e-8)
    np.testing.assert_allclose(c[:, 0], [0.62, 0.62, 0.62, 0.38], atol=0.005)
    np.testing.assert_allclose(s, [[1.49, 0], [-0.245, 0]], atol=0.005)
    np.testing.assert_allclose(np.linalg.norm(v, axis=1), [0.69, 0.06], atol=0.005)


def table(row: str) -> list[list[float]]:
    """The numbers with a point of the rows of this form."""
    rows = re.findall(row, TEXT, re.MULTILINE)
    return [[*map(number, re.findall(r"−?\d+\.\d+", found))] for found in rows]


def test_em_routing_by_hand_has_the_numbers_of_its_code_and_the_votes_of_the_explorer() -> None:
    votes = pictures.EM_EXAMPLE
    script = (TEMPLATE / "explorer.js").read_text(encoding="utf-8")
    (start,) = re.findall(r"^const START = (.*);$", script, re.MULTILINE)
    assert votes_in_tables()[4:] == votes.tolist() == json.loads(start)
    assert f"floor: {pictures.EM_FLOOR}, betaA: {pictures.EM_BETA_A:g}" in script
    r, by_iteration, beta_a = np.full((4, 2), 0.5), list[list[float]](), np.full(2, pictures.EM_BETA_A)
    for t in range(3):
        mu, sigma_sq, z = solutions.m_step(r, np.ones(4), votes, beta_a, np.zeros(2), 1.0, pictures.EM_FLOOR)
        a = solutions.sigmoid(z)
        by_iteration.append([*r.sum(axis=0), *a])
        r = solutions.e_step(mu, sigma_sq, z, votes)
        if t == 0:
            *parents, of_a = zip(*table(r"^\| [AB] \| .*"), strict=True)
            np.testing.assert_allclose(np.transpose(parents), np.column_stack([mu, sigma_sq, beta_a - z]), atol=0.0006)
            np.testing.assert_allclose(of_a, a, atol=0.00006)
            log_p = -0.5 * ((votes - mu) ** 2 / sigma_sq + np.log(sigma_sq)).sum(axis=2)
            children = table(r"^\| \d \| −.* \| 0\.\d+ \| 0\.\d+ \|$")
            np.testing.assert_allclose(children, np.column_stack([log_p, r]), atol=0.0006)
    np.testing.assert_allclose(table(r"^\| \d \| \d\.\d\d \| \d\.\d\d \| .*"), by_iteration, atol=0.006)


def test_the_answers_to_the_exercises_are_those_of_the_solutions() -> None:
    plan = (ROOT / "lesson" / "plan.md").read_text(encoding="utf-8")
    other = pictures.WORKED_EXAMPLE.copy()
    other[3, 0] = 0
    (a, b), (a_now, b_now) = (np.linalg.norm(solutions.dynamic_routing(votes, 3)[0], axis=1)
                              for votes in (pictures.WORKED_EXAMPLE, other))
    assert f"A has a length of {a:.2f} and B of {b:.2f}. With (0, 0), A is longer, {a_now:.2f}, and" in plan
    assert f"B is shorter, {b_now:.2f}." in plan
    loss, da = solutions.spread_loss(np.full(5, 0.5), 1, 0.2)
    assert f"0.2² = {loss:.2f}. The gradient is {da[0]:.1f} for each" in plan
    assert da[1] == pytest.approx(-1.6)


def test_no_sentence_is_longer_than_thirty_words() -> None:
    pages = [PAGE, ROOT / "docs" / "capsule_reference.md", ROOT / "lesson" / "README.md", ROOT / "lesson" / "plan.md"]
    for page in pages:
        text = re.sub(r"^```.*?^```|^\|.*?$|<[^>]+>", "\n\n", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        text = re.sub(r"\$`.*?`\$|`.*?`", "x", re.sub(r"!?\[(.*?)\]\(.*?\)", r"\1", text))
        for part in re.split(r"\n\n|\n(?=[-\d#])|(?<=[.?!:])\s", text):
            assert len(re.findall(r"[\w’'−-]*[A-Za-z]\w*", part)) <= 30, part
