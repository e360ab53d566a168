"""The check of the exercises: the solutions pass, every planted mistake gets its diagnosis, and a network trains."""

from __future__ import annotations

import inspect
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from helpers import Capture, Patch, failure, script_environment, usage_error
from lesson import check, exercises, solutions

SOLUTION = Path(solutions.__file__).read_text(encoding="utf-8")


def faults_of(text: str, tmp_path: Path, *names: str) -> dict[str, str]:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    numbers = {check.FUNCTIONS[name][0] for name in names}
    return {name: fault for name, fault in check.check(path, numbers) if not names or name in names}


STUBS = Path(exercises.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize(("text", "said"), [(SOLUTION, ""), (STUBS, "is not written yet")])
def test_the_solutions_pass_and_a_copy_of_the_stubs_has_everything_to_do(text: str, said: str, tmp_path: Path) -> None:
    assert faults_of(text, tmp_path) == dict.fromkeys(check.FUNCTIONS, said)


def with_mistake(name: str, there: str, instead: str) -> str:
    """The solutions, with something else in place of what stands in one function."""
    before, start, rest = SOLUTION.partition(f"def {name}(")
    body, end, after = rest.partition("\n\n\n")
    assert there in body
    return before + start + body.replace(there, instead) + end + after


PLANTED = [  # function, what stands there, a mistake, the diagnosis: one for each way to find it
    ("squash_backward", "return f * dv + ", "return -f * dv - ", "ds has the wrong sign"),
    ("squash_backward", "return f * dv + ", "return f * dv - ", "wrong sign in the term with dv, s"),
    ("squash_backward", "return f * dv + ", "return f * dv + 0.5 * ", "lacks a factor 2 in the term with dv, s"),
    ("squash_backward", "(s * dv).sum(axis=-1,", "(s * dv).sum(axis=0,", "ds has a wrong axis: what does not depend"),
    ("squash_backward", "+ 1e-9", "", "ds is wrong where s is 0 alone: add 1e-9 to q"),
    ("squash_backward", "np.sqrt(q) * (1 + q) ** 2", "0 * q", "ds is not finite"),
    ("squash_backward", "return ", "dv += 1\n    return ", "12 of 12 entries: compare it with differences of the"),
    ("squash_backward", "np.sqrt(q) * (1 + q) ** 2", "q * (1 + q) ** 2", "ds lacks the sqrt of q"),
    ("squash_backward", "(1 - q)", "q", "ds has q for 1 - q"),
    ("softmax_backward", "axis=-1", "axis=0", "db has a wrong axis: the softmax"),
    ("softmax_backward", "return c", "return 3 * c", "db is 3 times what it should be"),
    ("dynamic_routing", "b = b + ", "b = ", "s in the list, v in the list: each lacks the term with b"),
    ("dynamic_routing", "v = squash(s)", "v = s", "v in the list: each lacks the squash of s"),
    ("dynamic_routing", "ijd->...jd", "ijd->...id", "ends in ValueError, line 46: operands could not"),
    ("dynamic_routing", "range(n_iters)", "range(n_iters + 1)", "v in the list: each has one iteration too many"),
    ("dynamic_routing", "range(n_iters)", "range(n_iters - 1)", "v in the list: each has one iteration too few"),
    ("dynamic_routing", "range(n_iters)", "range(1)", "v in the list: each has one iteration alone"),
    ("dynamic_routing", "range(n_iters)", "range(3)", "takes no notice of n_iters"),
    ("dynamic_routing", "    return v, steps", "    u_hat *= 2\n    return v, steps", "changes its argument u_hat"),
    ("dynamic_routing", "(c, s, v))", "(c, 0 * s, -7 * v))",
     "s in the list is 0 times what it should be; v in the list is -7 times what it should be"),
    ("dynamic_routing_backward", "reversed(steps)", "reversed(steps[1:])", "du_hat lacks the first iteration"),
    ("m_step", "r * a[:, None]", "r", "mu, sigma_sq, z: each leaves a out"),
    ("m_step", "* mass / unit", "/ unit", "z lacks the factor mass"),
    ("m_step", "(beta_v[:, None] + 0.5 * np.log(sigma_sq)).sum(axis=1)",
     "(beta_v + 0.5 * np.log(sigma_sq).sum(axis=1))", "z has beta_v once and not D times"),
    ("m_step", "return mu, sigma_sq, lam * (beta_a - cost)", "return mu, sigma_sq, sigmoid(lam * (beta_a - cost))",
     "z is the sigmoid of what it should be"),
    ("m_step", "np.log(sigma_sq)", "sigma_sq", "z lacks the log of sigma_sq"),
    ("m_step", "return mu, sigma_sq,", "return mu, np.sqrt(sigma_sq),", "sigma_sq has sigma for sigma squared"),
    ("m_step", "0.5 * np.log", "np.log", "z has a factor 2 too many in the term with sigma_sq"),
    ("m_step", " + 1e-8", "", "mu is not finite where the mass is 0: add 1e-8 to it"),
    ("m_step_backward", "dmass -= ", "dmass - ", "dr, da: each lacks the term with dw, mass, w"),
    ("m_step_backward", "dvotes, dbeta_a, dbeta_v", "dvotes, dbeta_v, dbeta_a", "dbeta_a is dbeta_v: look at the"),
    ("e_step", "softmax(np.where(seen, log_ap, -np.inf))",
     "np.exp(log_ap) / np.exp(log_ap).sum(axis=1, keepdims=True)", "is not finite for votes far from all parents"),
    ("e_step", "(votes - mu) ** 2", "(votes - mu)", "r lacks the square of votes - mu"),
    ("e_step", "return softmax", "softmax", "returns nothing: is return missing?"),
    ("e_step_backward", "error**2 / sigma_sq - 1", "error**2 / sigma_sq + 1", "wrong sign in the term 1"),
    ("margin_loss", " + 1e-9", "", "dv is not finite where v is 0: add 1e-9 under the root"),
    ("network", "ds = squash_backward(du, s)", "ds = du", "dkernel, dbias: each lacks the squash_backward"),
    ("network", "dynamic_routing(u_hat, 3)", "dynamic_routing(u_hat, 2)", "dw: each has one iteration too few"),
]
SPELLED = [(name, there, instead, words) for name, words, there, instead in check.SPELLED]


@pytest.mark.parametrize(("name", "there", "instead", "diagnosis"), [*PLANTED, *SPELLED])
def test_a_planted_error_is_diagnosed(name: str, there: str, instead: str, diagnosis: str, tmp_path: Path) -> None:
    """Those that the check spells out, in their own words: no other one explains more or comes first."""
    assert diagnosis in faults_of(with_mistake(name, there, instead), tmp_path, name)[name]


RETURNED = [  # function, what it returns, the diagnosis
    ("squash_backward", "[[1.0], [1.0, 2.0]]", "ds is a list and not an array"),
    ("squash_backward", "args", "returns 2 arrays and not 1: ds"),
    ("squash_backward", "1j * args[0]", "ds is complex"),
    ("squash_backward", "args[0].astype(object)", "ds has entries of dtype object"),
    ("squash_backward", "1.0", "ds has shape () and not (4, 3): look at the axes"),
    ("margin_loss", "[0.0], args[0]", "loss is a list and not a number"),
    ("m_step", "None, 0, 0", "mu is None"),
    *(("dynamic_routing", returned, "does not return v and a list of (c, s, v)")
      for returned in ("args[0]", "args[0], args[0]")),
    ("dynamic_routing", "0, [(0, 0, 0), (0, 0)]", "the entries of the list have unequal lengths"),
    ("dynamic_routing", "0, [(0, 0, 0), (0, args[0], 0)]", "s in the list has another shape in another iteration"),
    ("dynamic_routing", "0, [(0, 0, [])]", "v in the list is a list and not an array"),
]


@pytest.mark.parametrize(("name", "returned", "diagnosis"), RETURNED)
def test_what_is_no_array_is_named(name: str, returned: str, diagnosis: str, tmp_path: Path) -> None:
    assert faults_of(f"def {name}(*args):\n    return {returned}", tmp_path, name) == {name: diagnosis}


LOSS, Z = "(short**2).sum() + 0.5 * (long**2).sum()", "lam * (beta_a - cost)"


@pytest.mark.parametrize(("name", "there", "instead"), [
    *(("margin_loss", LOSS, f"{kind}({LOSS})") for kind in ("float", "np.array", "np.float64")),
    ("dynamic_routing", "steps.append((c, s, v))", "steps.append([c, s, v])"),
    ("dynamic_routing", "return v, steps", "return v, tuple(steps)"),
    ("m_step", f"return mu, sigma_sq, {Z}", f"return [mu, sigma_sq, {Z}]"),
])
def test_numbers_lists_and_tuples_may_be_of_any_kind(name: str, there: str, instead: str, tmp_path: Path) -> None:
    assert faults_of(with_mistake(name, there, instead), tmp_path, name) == {name: ""}


def test_a_loop_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(check, "SECONDS", 0.5)
    before = signal.getsignal(signal.SIGALRM)
    text = SOLUTION.replace("    return c * (dc", "    while True:\n        pass\n    return c * (dc")
    found = faults_of(text, tmp_path, "squash_backward", "softmax_backward")
    said = "takes more than 0.5 seconds: a loop that does not end?"
    assert found == {"squash_backward": "", "softmax_backward": said}
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)) == (before, (0, 0))
    with pytest.raises(check.UserError, match="a loop that does not end"):
        faults_of(f"{SOLUTION}\nwhile True:\n    pass\n", tmp_path, "squash_backward")
    with ThreadPoolExecutor(1) as pool:  # which can have no timer
        assert pool.submit(faults_of, text, tmp_path, "squash_backward").result() == {"squash_backward": ""}


def test_mistakes_are_found_in_code_that_is_written_otherwise(tmp_path: Path) -> None:
    """A student's own loops, with one of the usual mistakes in each."""
    text = """
import numpy as np
def margin_loss(v, target):
    loss, dv = 0.0, np.zeros_like(v)
    for k in range(len(v)):
        n = np.sqrt(v[k] @ v[k] + 1e-9)
        if target[k]:
            loss += max(0, 0.9 - n) ** 2
            dv[k] = -max(0, 0.9 - n) * v[k] / n  # without the 2
        else:
            loss += 0.5 * max(0, n - 0.1) ** 2
            dv[k] = max(0, n - 0.1) * v[k] / n
    return loss, dv
def e_step(mu, sigma_sq, z, votes):
    a = 1 / (1 + np.exp(-z))
    p = a * np.exp(-0.5 * ((votes - mu) ** 2 / sigma_sq).sum(2)) / np.prod(sigma_sq, axis=1)  # without the root
    return p / p.sum(axis=1, keepdims=True)
"""
    found = faults_of(text, tmp_path, "margin_loss", "e_step")
    assert found["margin_loss"] == "dv lacks a factor 2 in the term with 0.9 − length"
    assert found["e_step"] == "r has a factor 2 too many in the term with sigma_sq"


def test_a_function_has_the_number_of_its_exercise() -> None:
    number, found = 0, dict[str, int]()
    for title, name in re.findall(r"^(?:# exercise (\d)|def (\w+))", inspect.getsource(exercises), re.MULTILINE):
        number = int(title or number)
        found |= {name: number} if name and number else {}
    assert {name: number for name, (number, *_) in check.FUNCTIONS.items()} == found
    for name in ("sigmoid", "softmax", "squash"):  # which are given
        np.testing.assert_allclose(*(getattr(own, name)(np.eye(3) - 2) for own in (exercises, solutions)))


def test_the_network_of_the_solutions_learns_digits_that_were_not_trained_on() -> None:
    network = Mock(wraps=solutions.network)
    assert check.trained_accuracy(network, n_steps=25) > 0.3  # guessing gives 0.1
    seen = [tuple(x.tobytes() for x in call.args[:2]) for call in network.call_args_list]  # patches and target
    trained, tested = seen[:-300], seen[-300:]
    assert len(trained) == 25 * 16
    assert not {*trained} & {*tested}


def test_a_file_is_checked_from_the_command_line(tmp_path: Path) -> None:
    def run(text: str, redirection: str = "") -> tuple[int, str, str]:
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
        command = shlex.join([sys.executable, "-m", "lesson.check", "mine.py"])
        line = f"set -o pipefail; unset PYTHONUNBUFFERED; {command} {redirection}"
        process = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=script_environment(), capture_output=True, text=True
        )
        return process.returncode, process.stdout, process.stderr

    status, out, error = run(SOLUTION)
    assert (status, out.splitlines()[-1], error) == (0, "11 of 11 functions pass", "")
    assert out.splitlines()[0].split() == ["1", "squash_backward", "passes"]
    wrong = SOLUTION.replace("return f * dv", "return -f * dv").partition("def spread_loss")[0]
    status, out, error = run(wrong)  # the routing gets a correct squash_backward
    assert out.splitlines()[-2].split(maxsplit=2)[1:] == ["network", "is not in mine.py"]
    assert (status, out.splitlines()[-1], error) == (1, "8 of 11 functions pass", "")
    assert run(wrong, "| true") == (0, "", "")


def test_exercise_9_trains_with_the_functions_of_the_file(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    path = tmp_path / "mine.py"
    wrong = SOLUTION.replace("db = db + softmax", "db = db - softmax")
    for text, accuracy, said in (
        (SOLUTION, 0.81, "your network classifies 81% of 300 new drawn digits correctly"),
        (wrong, 0.81, "It learns in spite of the fault above: an"),
        (wrong, 0.4, "It does not learn: repair the fault above"),
        (SOLUTION, 0.07, "It does not learn."),
    ):
        path.write_text(text, encoding="utf-8")
        monkeypatch.setattr(check, "trained_accuracy", trained := Mock(return_value=accuracy))
        with pytest.raises(SystemExit, match=str(int(text == wrong))):
            check.main([str(path), "3", "9"])
        out = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in out[:6]] == ["1", "2", "3", "4", "5", "9"]  # what the training needs
        assert out[-1].startswith(said)
    own = trained.call_args.args[0].__globals__
    assert own["squash_backward"].__globals__ is own, "all functions are the file's own"
    monkeypatch.undo()
    line = 1 + SOLUTION[: SOLUTION.index("    u = squash(s)\n")].count("\n")
    for text, said in (
        (STUBS, "the training needs exercises 1 to 5 and 9: network is not written yet\n"),
        (SOLUTION.replace("u = squash(s)\n", "u = s / None\n"), f"the training ends in TypeError, line {line}: "),
    ):
        path.write_text(text, encoding="utf-8")
        assert check.main([str(path), "9"]) == 1
        assert capsys.readouterr().err.startswith(f"error: {said}")


def test_the_file_of_the_exercises_runs_the_example_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(STUBS.replace("if __name__ ==", SOLUTION + "\n\nif __name__ =="), encoding="utf-8")
    out = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[1] == "iteration 2: couplings to A [0.62 0.62 0.62 0.38], lengths of A and B [0.69 0.06]"
    done = subprocess.run([sys.executable, exercises.__file__], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "dynamic_routing, exercise 3, is not written yet\n")


def test_what_cannot_be_checked_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.py"
    for argv in ([], ["--no-such-flag", str(path)], [str(path), "0"], [str(path), "10"], [str(path), "x"]):
        usage_error(check, argv, capsys)
    assert "exercise" not in usage_error(check, [], capsys)  # it may be left out
    assert "No such file" in failure(check, [str(path)], capsys)
    for text, ending in (
        ("def f(:", "SyntaxError: invalid syntax (mine.py, line 1)"),
        ("raise SystemExit(7)", "SystemExit, line 1: 7"),
        ("\n1 / 0", "ZeroDivisionError, line 2: division by zero"),
    ):
        path.write_text(text)
        assert f"{path} ends in {ending}" in failure(check, [str(path)], capsys)
    with pytest.raises(SystemExit, match="0"):
        check.main(["--help-all"])
