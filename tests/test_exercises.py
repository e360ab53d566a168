"""exercises.py: the page's code passes, and every planted error gets its diagnosis."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import exercises
from helpers import ROOT, failure, usage_error

PAGE = (ROOT / "docs" / "how_capsules_work.md").read_text(encoding="utf-8")
BLOCKS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    if "torch" not in block and "example" not in block
]
SOLUTION = "\n".join(BLOCKS).replace("votes, seen):", "votes, seen=True):")


def faults_of(text: str, tmp_path: Path, *names: str) -> dict[str, str]:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    return dict(exercises.check(path, names or tuple(exercises.NUMBERS)))


def test_the_code_of_the_page_passes(tmp_path: Path) -> None:
    assert all(line.replace("K * ", "") in SOLUTION for line in exercises.TERMS)
    assert faults_of(SOLUTION, tmp_path) == dict.fromkeys(exercises.NUMBERS, "")


def test_a_copy_of_the_stubs_has_everything_to_do(tmp_path: Path) -> None:
    text = Path(exercises.__file__).read_text(encoding="utf-8")
    assert faults_of(text, tmp_path) == dict.fromkeys(exercises.NUMBERS, "is not written yet")


PLANTED = [  # function, a line of it, the wrong one, the diagnosis
    ("squash_backward", "return f * dv + ", "return -f * dv - ", "ds has the wrong sign"),
    ("squash_backward", "return f * dv + ", "return f * dv - ", "wrong sign in a term: through the length"),
    ("squash_backward", "return f * dv + ", "return f * dv  # ", "ds lacks a term: through the length |s|"),
    ("squash_backward", "return f * dv + ", "return ", "ds lacks a term: along dv, f(q) dv"),
    ("squash_backward", "return f * dv + ", "return f * dv + 0.5 * ", "ds is wrong in 15 of 15"),
    ("squash_backward", "(s * dv).sum(axis=-1,", "(s * dv).sum(axis=0,", "ds has a wrong axis: vectors are added up"),
    ("squash_backward", "+ 1e-9", "", "is not finite for s = 0"),
    ("squash_backward", "return f * dv", "return 2 * f**2 * dv", "ds is wrong in 15 of 15"),
    ("softmax_backward", "return c", "return -c", "db has the wrong sign"),
    ("softmax_backward", "(dc - ", "(dc + ", "db has the wrong sign in a term: through the sum of all exponentials"),
    ("softmax_backward", "(dc - (c * dc).sum(axis=-1, keepdims=True))", "dc", "lacks a term: through the sum of all"),
    ("softmax_backward", "axis=-1", "axis=0", "db has a wrong axis: the softmax"),
    ("softmax_backward", "return c", "return 3 * c", "db is 3 times what it should be"),
    ("dynamic_routing", "b = b + ", "b = b - ", "v has the wrong sign in a term: of the agreement"),
    ("dynamic_routing", "b = b + ", "b = ", "c lacks a term: of the logits b of earlier"),
    ("dynamic_routing", "c = softmax(b)", "c = softmax(b.T).T", "c has a wrong axis: the softmax is over the children"),
    ("dynamic_routing", "v = squash(s)", "v = s", "v is wrong in 12 of 12 entries; c is wrong in 40 of 60"),
    ("dynamic_routing", '"ij,ijd->jd", c', '"ij,ijd->id", c', "ends in ValueError: operands could not be broadcast"),
    ("dynamic_routing_backward", "return du_hat", "return -du_hat", "du_hat has the wrong sign"),
    ("dynamic_routing_backward", "db = db + softmax", "db = db - softmax", "wrong sign in a term: through the coup"),
    ("dynamic_routing_backward", "du_hat += db[", "du_hat -= db[", "wrong sign in a term: of the votes in the agree"),
    ("dynamic_routing_backward", "du_hat += db[", "du_hat + db[", "lacks a term: of the votes in the agreement"),
    ("dynamic_routing_backward", "du_hat += c[", "du_hat + c[", "lacks a term: of the votes in the weighted sum s"),
    ("dynamic_routing_backward", "dv = dv + ", "dv = dv + 0 * ", "lacks a term: of the outputs v in the agreement"),
    ("dynamic_routing_backward", "db = db + ", "db = ", "lacks a term: of the logits b of earlier iterations"),
    ("dynamic_routing_backward", "db = db + ", "db = 0 * db + 0 * ", "lacks a term: through the couplings c"),
    ("dynamic_routing_backward", "softmax_backward(dc, c)", "softmax_backward(dc.T, c.T).T", "has a wrong axis"),
    ("m_step", "(beta_a - cost)", "(beta_a + cost)", "z has the wrong sign in a term: of the cost"),
    ("m_step", "weight = r * a[:, None] /", "weight = r /", "mu is"),
    ("m_step", "(r * a[:, None]).sum(axis=0)", "r.sum(axis=0)", "mu is"),
    ("m_step", "+ floor", "", "sigma_sq lacks a term: of the floor; z lacks a term: of the floor"),
    ("m_step", "(beta_v[:, None] + 0.5", "(beta_v[:, None] / 3 + 0.5", "z is wrong in 4 of 4"),
    ("m_step", "0.5 * np.log", "np.log", "z is wrong in 4 of 4"),
    ("m_step", "* mass / unit", "", "z is wrong in 4 of 4"),
    ("m_step", "return mu, sigma_sq, lam *", "return mu, sigma_sq,", "z is 1.43 times what it should be"),
    ("m_step", ".sum(axis=0) + 1e-8", ".sum(axis=1)[:, None] + 1e-8", "wrong axis"),
    ("m_step_backward", "-lam * dz", "lam * dz", "dr has the wrong sign in a term: of the cost"),
    ("m_step_backward", "return dg * a[:, None]", "return -dg * a[:, None]", "dr has the wrong sign"),
    ("m_step_backward", "dmass -= ", "dmass - ", "dr lacks a term: through the mass in the weights"),
    ("m_step_backward", "dmass = dcost * cost / mass", "dmass = 0", "lacks a term: through the mass in the cost"),
    ("m_step_backward", "dg = dweight / mass + dmass", "dg = dweight / mass", "dr lacks a term: of the mass; da lacks"),
    ("m_step_backward", "dbeta_v = mu.shape[1] * ", "dbeta_v = ", "dbeta_v is 0.333 times what it should be"),
    ("m_step_backward", "dvotes = derror + ", "dvotes = ", "dvotes lacks a term: of the votes in sigma_sq"),
    ("m_step_backward", "dweight += np", "np", "dr lacks a term: of the weights in mu"),
    ("m_step_backward", "(dweight * weight).sum(axis=0)", "(dweight * weight).sum(axis=1).sum()", "has a wrong axis"),
    ("e_step", "-0.5 * ((votes", "-0.5 * (-(votes", "r has the wrong sign in a term: of the squared error"),
    ("e_step", "-np.logaddexp(0, -z) + log_p", "log_p", "r lacks a term: of the activation"),
    ("e_step", " + np.log(sigma_sq))", ")", "r lacks a term: of log sigma_sq"),
    ("e_step", "softmax(np.where(seen, log_ap, -np.inf))", "softmax(log_ap.T).T", "r has a wrong axis: the softmax"),
    ("e_step", "softmax(np.where(seen, log_ap, -np.inf))",
     "np.exp(log_ap) / np.exp(log_ap).sum(axis=1, keepdims=True)", "is not finite for votes far from all parents"),
    ("e_step_backward", "return -derror.sum", "return derror.sum", "dmu has the wrong sign"),
    ("e_step_backward", "error**2 / sigma_sq - 1", "error**2 / sigma_sq + 1", "wrong sign in a term: of log sigma_sq"),
    ("e_step_backward", "error**2 / sigma_sq - 1", "error**2 / sigma_sq", "dsigma_sq lacks a term: of log sigma_sq"),
    ("e_step_backward", "softmax_backward(dr, r)", "r * dr", "dvotes lacks a term: through the sum of all expon"),
    ("e_step_backward", "softmax_backward(dr, r)", "softmax_backward(dr.T, r.T).T", "dmu has a wrong axis"),
    ("margin_loss", "return (short**2", "return -(short**2", "loss"),
    ("margin_loss", "- 2 * short", "+ 2 * short", "dv has the wrong sign in a term: of the digits in the image"),
    ("margin_loss", "0.5 * 2 * long - 2 * short", "-2 * short", "dv lacks a term: of the digits not in the image"),
    ("margin_loss", "+ 0.5 * (long", "+ (long", "loss is wrong in 1 of 1"),
    ("margin_loss", "return (short**2).sum() + 0.5 * (long**2).sum()", "return short.sum() + 0.5 * long.sum()",
     "loss is wrong in 1 of 1"),
    ("margin_loss", "length[:, None] * v / length[:, None]", "length[:, None] * v / np.sqrt((v * v).sum(axis=0))",
     "dv has a wrong axis: capsules"),
    ("spread_loss", "da[true] = -da.sum()", "da[true] = da.sum()", "da has the wrong sign in a term: of the true"),
    ("spread_loss", "da[true] = -da.sum()", "", "da lacks a term: of the true class"),
    ("spread_loss", "da = 2 *", "da = -2 *", "da has the wrong sign"),
    ("spread_loss", "shortfall[true] = 0", "", "loss is wrong in 1 of 1 entries; da is wrong in 1 of 5"),
    ("spread_loss", "(a[true] - a)", "(a - a[true])", "loss is wrong in 1 of 1 entries; da is wrong in 5 of 5"),
    ("spread_loss", "return (shortfall**2)", "return shortfall", "loss is wrong in 1 of 1"),
    ("spread_loss", "return (shortfall**2).sum(), da", "return da", "returns 1 arrays and not 2: loss, da"),
    ("e_step", "return softmax", "softmax", "ends in ValueError: nothing is returned"),
    ("e_step", "return softmax", "1 / 0\n    return softmax", "ends in ZeroDivisionError: division by zero"),
    ("e_step", "return softmax", "raise SystemExit(7)\n    return softmax", "ends in SystemExit: 7"),
    ("m_step", "return mu, sigma_sq,", "return mu,", "returns 2 arrays and not 3: mu, sigma_sq, z"),
    ("softmax_backward", "return c *", "return 1 *", "db is wrong in 20 of 20 entries"),
    ("squash_backward", "return ", "dv += 1\n    return ", "ds is wrong in 15 of 15 entries"),
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
        command = shlex.join([sys.executable, exercises.__file__, "mine.py"])
        line = f"set -o pipefail; unset PYTHONUNBUFFERED; {command} {redirection}"
        process = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        return process.returncode, process.stdout, process.stderr

    status, out, error = run(SOLUTION)
    assert (status, out.splitlines()[-1], error) == (0, "10 of 10 functions pass", "")
    status, out, error = run("import numpy as np\n" + BLOCKS[1])
    assert (status, out.splitlines()[-1], error) == (1, "1 of 10 functions pass", "")
    assert out.splitlines()[0].split() == ["1", "squash_backward", "passes"]
    wrong = SOLUTION.replace("return f * dv", "return -f * dv")
    status, out, error = run(wrong)  # the routing gets a correct squash_backward
    assert (status, out.splitlines()[-1], error) == (1, "9 of 10 functions pass", "")
    assert run(wrong, "| true") == (0, "", "")


def test_what_cannot_be_checked_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    for argv in ([], ["--no-such-flag", str(path)]):
        usage_error(exercises, argv, capsys)
    assert "No such file" in failure(exercises, [str(path)], capsys)
    assert "Is a directory" in failure(exercises, [str(tmp_path)], capsys)
    endings = {"def squash(:": "SyntaxError: invalid syntax (mine.py, line 1)", "assert False": "AssertionError",
               "raise SystemExit(7)": "SystemExit: 7"}  # fmt: skip
    for text, ending in endings.items():
        path.write_text(text)
        assert f"{path} ends in {ending}" in failure(exercises, [str(path)], capsys)
    with pytest.raises(SystemExit, match="0"):
        exercises.main(["--help-all"])
