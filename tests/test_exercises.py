"""exercises.py: the page's code passes, and every planted error gets its diagnosis."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import failure, script_environment, usage_error
from lesson import exercises

SOLUTION = re.sub(r"(?m)^example = (.*\n){3}", "", exercises.page()[0])


def faults_of(text: str, tmp_path: Path, *names: str) -> dict[str, str]:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    return dict(exercises.check(path, names or tuple(exercises.FUNCTIONS)))


def test_the_code_of_the_page_passes(tmp_path: Path) -> None:
    assert faults_of(SOLUTION, tmp_path) == dict.fromkeys(exercises.FUNCTIONS, "")


def test_a_copy_of_the_stubs_has_everything_to_do(tmp_path: Path) -> None:
    text = Path(exercises.__file__).read_text(encoding="utf-8")
    assert faults_of(text, tmp_path) == dict.fromkeys(exercises.FUNCTIONS, "is not written yet")


PLANTED = [  # function, a line of it, the wrong one, the diagnosis
    ("squash_backward", "return f * dv + ", "return -f * dv - ", "ds has the wrong sign"),
    ("squash_backward", "return f * dv + ", "return f * dv - ", "wrong sign in the term with dv, s, twice_df"),
    ("squash_backward", "return f * dv + ", "return f * dv  # ", "ds lacks the term with dv, s, twice_df"),
    ("squash_backward", "return f * dv + ", "return f * dv + 0.5 * ", "ds is wrong in 9 of 12 entries"),
    ("squash_backward", "(s * dv).sum(axis=-1,", "(s * dv).sum(axis=0,", "ds has a wrong axis: what does not depend"),
    ("squash_backward", "+ 1e-9", "", "ds is not finite"),
    ("squash_backward", "return ", "dv += 1\n    return ", "ds is wrong in 12 of 12 entries"),
    ("softmax_backward", "(dc - ", "(dc + ", "db has the wrong sign in the term with c, dc"),
    ("softmax_backward", "(dc - (c * dc).sum(axis=-1, keepdims=True))", "dc", "db lacks the term with c, dc"),
    ("softmax_backward", "axis=-1", "axis=0", "db has a wrong axis: the softmax"),
    ("softmax_backward", "return c", "return 3 * c", "db is 3 times what it should be"),
    ("dynamic_routing", "b = b + ", "b = b - ", "v has the wrong sign in the term with u_hat, v"),
    ("dynamic_routing", "b = b + ", "b = ", "c lacks the term with b"),
    ("dynamic_routing", "c = softmax(b)", "c = softmax(b.T).T", "c has a wrong axis: the softmax is over the children"),
    ("dynamic_routing", "v = squash(s)", "v = s", "v is wrong in 12 of 12 entries; c is wrong in 40 of 60"),
    ("dynamic_routing", '"ij,ijd->jd", c', '"ij,ijd->id", c', "ends in ValueError: operands could not be broadcast"),
    ("dynamic_routing_backward", "db = db + softmax", "db = db - softmax", "wrong sign in the term with c, dc,"),
    ("dynamic_routing_backward", "du_hat += db[", "du_hat + db[", "lacks the term with db, v"),
    ("dynamic_routing_backward", "softmax_backward(dc, c)", "softmax_backward(dc.T, c.T).T", "has a wrong axis"),
    ("m_step", "(beta_a - cost)", "(beta_a + cost)", "z has the wrong sign in the term with cost"),
    ("m_step", "+ floor", "", "sigma_sq lacks the term with floor; z lacks the term with floor"),
    ("m_step", "return mu, sigma_sq, lam *", "return mu, sigma_sq,", "z is 1.43 times what it should be"),
    ("m_step", ".sum(axis=0) + 1e-8", ".sum(axis=1)[:, None] + 1e-8", "z has shape (5, 4) and not (4,): look at"),
    ("m_step", "return mu, sigma_sq,", "return mu,", "returns 2 arrays and not 3: mu, sigma_sq, z"),
    ("m_step_backward", "-lam * dz", "lam * dz", "dr has the wrong sign in the term with dz, lam"),
    ("m_step_backward", "dmass -= ", "dmass - ", "dr lacks the term with dweight, mass, weight"),
    ("m_step_backward", "dweight = np", "dweight = 0 * np", "dr lacks the term with dsigma_sq, error"),
    ("m_step_backward", "(dweight * weight).sum(axis=0)", "(dweight * weight).sum(axis=1).sum()", "has a wrong axis"),
    ("e_step", "-0.5 * ((votes", "-0.5 * (-(votes", "r has the wrong sign in the term with mu, sigma_sq, votes"),
    ("e_step", " + np.log(sigma_sq))", ")", "r lacks the term with sigma_sq"),
    ("e_step", "softmax(np.where(seen, log_ap, -np.inf))", "softmax(log_ap.T).T", "r has a wrong axis: the softmax"),
    ("e_step", "softmax(np.where(seen, log_ap, -np.inf))",
     "np.exp(log_ap) / np.exp(log_ap).sum(axis=1, keepdims=True)", "is not finite for votes far from all parents"),
    ("e_step", "return softmax", "softmax", "ends in ValueError: nothing is returned"),
    ("e_step_backward", "error**2 / sigma_sq - 1", "error**2 / sigma_sq + 1", "wrong sign in the term 1"),
    ("e_step_backward", "softmax_backward(dr, r)", "softmax_backward(dr.T, r.T).T", "dmu has a wrong axis"),
    ("margin_loss", "- 2 * short", "+ 2 * short", "dv has the wrong sign in the term with short"),
    ("margin_loss", "+ 0.5 * (long", "+ (long", "loss is wrong in 1 of 1"),
    ("margin_loss", "length[:, None] * v / length[:, None]", "length[:, None] * v / np.sqrt((v * v).sum(axis=0))",
     "dv has a wrong axis: what"),
    ("spread_loss", "da[true] = -da.sum()", "", "da lacks the term with da"),
    ("spread_loss", "shortfall[true] = 0", "", "loss is wrong in 1 of 1 entries; da is wrong in 1 of 5"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "line", "wrong", "diagnosis"), PLANTED)
def test_a_planted_error_is_diagnosed(name: str, line: str, wrong: str, diagnosis: str, tmp_path: Path) -> None:
    start = SOLUTION.index(f"def {name}(")
    before, body = SOLUTION[:start], SOLUTION[start:]
    assert line in body.partition("\n\n\n")[0]
    assert diagnosis in faults_of(before + body.replace(line, wrong, 1), tmp_path, name)[name]


def test_a_file_is_checked_from_the_command_line(tmp_path: Path) -> None:
    def run(text: str, redirection: str = "") -> tuple[int, str, str]:
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
        command = shlex.join([sys.executable, "-m", "lesson.exercises", "mine.py"])
        line = f"set -o pipefail; unset PYTHONUNBUFFERED; {command} {redirection}"
        process = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=script_environment(), capture_output=True, text=True
        )
        return process.returncode, process.stdout, process.stderr

    status, out, error = run(SOLUTION)
    assert (status, out.splitlines()[-1], error) == (0, "10 of 10 functions pass", "")
    assert out.splitlines()[0].split() == ["1", "squash_backward", "passes"]
    wrong = SOLUTION.replace("return f * dv", "return -f * dv").partition("def spread_loss")[0]
    status, out, error = run(wrong)  # the routing gets a correct squash_backward
    assert (status, out.splitlines()[-1], error) == (1, "8 of 10 functions pass", "")
    assert run(wrong, "| true") == (0, "", "")


def test_what_cannot_be_checked_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    for argv in ([], ["--no-such-flag", str(path)]):
        usage_error(exercises, argv, capsys)
    assert "No such file" in failure(exercises, [str(path)], capsys)
    for text, ending in {"def f(:": "SyntaxError: invalid syntax", "raise SystemExit(7)": "SystemExit: 7"}.items():
        path.write_text(text)
        assert f"{path} ends in {ending}" in failure(exercises, [str(path)], capsys)
    with pytest.raises(SystemExit, match="0"):
        exercises.main(["--help-all"])
