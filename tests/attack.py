"""Wrong inputs, damaged files, kills and changed numbers by the hundred: ``python -m tests.attack``, ten minutes.

Not among the tests that run by themselves. Counted are tracebacks, failures without a message, inputs that were
changed, files left behind, processes that outlive their parent, refusals that took above 20 s or 1 GiB, and changed
numbers that ``report.py`` does not see. The exit status is 1 where any count is not 0.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import gzip
import importlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from PIL import Image  # noqa: E402
from scipy.io import savemat  # noqa: E402

import report  # noqa: E402
from helpers import EXPERIMENTS, digits_folder, script_environment, smallest, strokes  # noqa: E402
from support.results import checksum  # noqa: E402
from test_smallnorb_files import make_arrays, write_set  # noqa: E402

SECONDS, BYTES = 20, 1 << 30  # that a refusal may take
OTHERS = (  # neither train for themselves nor draw one experiment
    "make_toy_norb", "make_explorer", "make_explorer_gif", "visualize_claims", "visualize_parts",
    "visualize_networks", "visualize_how_capsules_work", "report", "benchmarks.__main__", "benchmarks.figure",
)  # fmt: skip
FIGURES = [p.stem for p in sorted(ROOT.glob("*.py")) if p.stem.partition("_")[2].removesuffix("_gif") in EXPERIMENTS]
FAULTS = ("traceback", "no message", "changed input", "left behind", "orphan", "above 20 s", "above 1 GiB", "not seen")
Counts = collections.Counter[tuple[str, str]]


class Trial(NamedTuple):
    kind: str
    script: str
    argv: list[str]


class Outcome(NamedTuple):
    status: int
    error: str
    seconds: float
    bytes: int


def in_a_fork(trial: Trial, folder: Path) -> Outcome:
    """Run a script's main in a copy of this process, which has imported everything already."""
    said, started = folder / "stderr", time.monotonic()
    child = os.fork()
    if child == 0:
        status = 99
        with contextlib.suppress(BaseException):
            os.setsid()
            os.chdir(folder / "work")
            for number, path in ((0, os.devnull), (1, os.devnull), (2, str(said))):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
            try:
                status = importlib.import_module(trial.script).main(trial.argv)
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)
    deadline = started + 3 * SECONDS
    while True:
        done, raw, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            deadline += 1e9
        time.sleep(0.002)
    error = said.read_text(errors="replace") if said.exists() else ""
    said.unlink(missing_ok=True)
    return Outcome(os.waitstatus_to_exitcode(raw), error, time.monotonic() - started, usage.ru_maxrss * 1024)


def stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        found[str(path)] = (stat.st_ino, stat.st_size, stat.st_mtime_ns) if not path.is_dir() else (0, 0, 0)
    return found


class Attack:
    """The counts, and the folder in which all happens: ``inputs``, and ``work``, which is empty before a trial."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng, self.counts, self.trials = folder, rng, Counts(), collections.Counter[str]()
        self.inputs, self.work = folder / "inputs", folder / "work"
        self.work.mkdir()

    def fault(self, kind: str, what: str, example: object) -> None:
        self.counts[kind, what] += 1
        if self.counts[kind, what] <= 3:
            print(f"{kind}, {what}: {str(example)[:400]}", flush=True)

    def run(self, trial: Trial) -> Outcome:
        before = stamps(self.inputs)
        outcome = in_a_fork(trial, self.folder)
        self.trials[trial.kind] += 1
        refused, words = outcome.status in (1, 2), (trial.script, *trial.argv)
        if "Traceback" in outcome.error or outcome.status not in (0, 1, 2):
            self.fault(trial.kind, "traceback", (words, outcome.status, outcome.error[-200:]))
        if refused and "error: " not in outcome.error:
            self.fault(trial.kind, "no message", (words, outcome.error))
        if refused and outcome.seconds > SECONDS:
            self.fault(trial.kind, "above 20 s", (words, outcome.seconds))
        if refused and outcome.bytes > BYTES:
            self.fault(trial.kind, "above 1 GiB", (words, outcome.bytes))
        if stamps(self.inputs) != before:
            self.fault(trial.kind, "changed input", words)
        if refused and (left := sorted(self.work.rglob("*"))) and "not saved" not in outcome.error:
            self.fault(trial.kind, "left behind", (words, left, outcome.error))
        for path in self.work.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return outcome


# ----------------------------------------------------------------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> dict[str, Path]:
    """One intact file or folder of each kind."""
    folder.mkdir()
    made = {
        "digits": folder / "digits",
        "norb": folder / "norb",
        "picture": folder / "p.png",
        "photo": folder / "p.jpg",
    }
    shutil.copytree(digits_folder(), made["digits"])
    made["norb"].mkdir()
    for subset in ("training", "testing"):
        write_set(made["norb"], subset, make_arrays(subset, 20))
    Image.fromarray(strokes().test_images[0]).resize((56, 56)).save(made["picture"])
    Image.fromarray(strokes().test_images[1]).resize((90, 60)).save(made["photo"])
    pixels = np.random.default_rng(0).integers(0, 2, (1600, 20), np.uint8)
    made["images"], made["archive"], made["nothing"] = folder / "images", folder / "i.npz", folder / "nothing.json"
    for k, array in enumerate(strokes().test_images[:12]):
        picture = made["images"] / "ab"[k % 2] / f"{k}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(picture)
    x, y = strokes().test_images[:12], np.arange(12) % 2
    np.savez(made["archive"], x_train=x, y_train=y, x_test=x, y_test=y)
    made["nothing"].write_text("{}")
    made["affnist"] = folder / "a.mat"
    savemat(made["affnist"], {"affNISTdata": {"image": pixels, "label_int": np.arange(20) % 10}}, do_compression=True)
    for name, experiment in EXPERIMENTS.items():
        made[name] = folder / f"{name}.npz"
        with contextlib.redirect_stdout(io.StringIO()):
            files = ["--checkpoint", str(made[name]), "--out-json", str(folder / f"{name}.json")]
            assert experiment.script.main([*experiment.argv("--n-epochs 1"), *files]) == 0
    return made


def refused(name: str, made: dict[str, Path]) -> list[str]:
    """Flags of one of the other scripts with which it ends soon, whatever stands before them."""
    return {
        "make_toy_norb": ["--out-dir", str(made["norb"])],  # which has files of these names
        "make_explorer": ["--multimnist", str(made["picture"])],
        "make_explorer_gif": ["--page", "none"],
        "visualize_claims": ["--claims", str(made["nothing"])],
        "visualize_parts": ["--results", str(made["nothing"])],
        "visualize_networks": ["--outdir", "/dev/null"],
        "visualize_how_capsules_work": ["--capsnet", str(made["picture"])],
        "report": ["--root", "none"],
        "benchmarks.__main__": ["--out", "/dev/null/x"],
        "benchmarks.figure": ["--results", str(made["nothing"])],
    }[name]


def tiny(name: str, made: dict[str, Path]) -> list[str]:
    """The smallest training of one model; of a figure script, what draws the least."""
    experiment = EXPERIMENTS[next(known for known in EXPERIMENTS if known in name)]
    argv = [word.replace(str(digits_folder()), str(made["digits"])) for word in experiment.argv("--n-epochs 1")]
    return [*argv, "--models", "cnn"] if name in EXPERIMENTS else argv


# ----------------------------------------------------------------------------------------------------------------------
# Wrong inputs
# ----------------------------------------------------------------------------------------------------------------------

ODD_VALUES = (
    "", " ", "x", "nan", "inf", "-1", "1e400", "0x1", "1,", ",", ":", "1:0", "9" * 400, "x" * 5000, "a\nb", "\udcff",
    "--", ".", "/", "/dev/null", "/dev/full", "none/none", "/proc/1/mem", "~", "*", "\x1b[2J", "1e-320", "-0", "٣",
)  # fmt: skip


def wrong_inputs(attack: Attack, made: dict[str, Path], n: int) -> Iterator[Trial]:
    """Every script: a flag with an odd value; flags that do not fit; other data; an output that is an input."""
    choices, sets = [], dict[str, list[str]]()
    for name in (*EXPERIMENTS, *FIGURES, *OTHERS):
        actions = importlib.import_module(name).make_parser()._actions
        sets[name] = next((list(action.choices or ()) for action in actions if action.dest == "dataset"), [])
        shows = ("-h", "--help", "--help-all")
        flags = [flag for action in actions for flag in action.option_strings if flag not in shows]
        outputs = ("--out-json", "--checkpoint", "--predict-png", "--out", "--outdir", "--out-dir", "--figure")
        paths = [flag for flag in outputs if flag in flags]
        choices.append((name, flags, paths))
    inputs = [str(path) for path in made["digits"].iterdir()]
    for _ in range(n):
        name, flags, paths = attack.rng.choice(choices)
        base, kind = [] if name in OTHERS else tiny(name, made), attack.rng.random()
        if kind < 0.5:
            flag, value = attack.rng.choice(flags), attack.rng.choice(ODD_VALUES)
            argv = [*base, *attack.rng.choice(([f"{flag}={value}"], [flag, value]))]
        elif kind < 0.65:
            argv = [*base, *attack.rng.sample(flags, min(3, len(flags)))]
        elif name in OTHERS:
            argv = [attack.rng.choice(paths or flags), attack.rng.choice([str(path) for path in made.values()])]
        elif kind < 0.8 and sets[name]:
            argv = [*base, "--dataset", attack.rng.choice(sets[name]), "--data-dir"]
            argv.append(attack.rng.choice([*ODD_VALUES, *(str(path) for path in made.values())]))
        else:
            read = [str(ROOT / "README.md"), ".", *([] if "norb" in name else inputs)]
            argv = [*base, attack.rng.choice(paths), attack.rng.choice(read)]
            argv += attack.rng.choice(([], ["--resume"], ["--overwrite"], ["--predict", str(made["picture"])]))
            argv += [] if "norb" in name else ["--data-dir", str(made["digits"])]
        argv += refused(name, made) if name in OTHERS else []
        if name in FIGURES and not any(word in " ".join(argv) for word in ("--checkpoint", "--predict")):
            argv += ["--n-test", "0"] if "--n-test" in flags else ["--n-epochs", "x"]  # nothing is to be drawn
        yield Trial("wrong input", name, argv)
    for wrong in ("--seeds x", "--grid a", "--jobs 0", "--name a/b", "--out x --figure x", "-- --lr=x"):
        for known in (*EXPERIMENTS, "none", "../inputs/p.png", "."):
            yield Trial("wrong input", "compare_seeds", [known, *wrong.split()])
    for root in (*inputs[:10], "none", ".", "/proc"):
        yield Trial("wrong input", "report", ["--check", "--root", root])


# ----------------------------------------------------------------------------------------------------------------------
# Damaged files
# ----------------------------------------------------------------------------------------------------------------------


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The same with something cut, changed, put in, or doubled."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        at, n = rng.randrange(len(changed) or 1), rng.choice((1, 1, 4, 100))
        kind = rng.randrange(6)
        if kind == 0:
            changed[at : at + n] = rng.randbytes(n)
        elif kind == 1:
            changed[at : at + n] = bytes(n)
        elif kind == 2:
            changed[at:at] = rng.randbytes(n)
        elif kind == 3:
            del changed[at : at + n]
        elif kind == 4:
            head = rng.randrange(200)  # where formats say how large everything is
            changed[head : head + 4] = rng.choice((b"\xff\xff\xff\x7f", b"\x7f\xff\xff\xff", b"\0\0\0\0"))
        elif rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def forged(path: Path, rng: random.Random) -> bytes:
    """A checkpoint with one value of its header, or one array, replaced."""
    with np.load(path) as stored:
        arrays = {key: stored[key] for key in stored.files}
    header = json.loads(str(arrays.pop("header")))
    if rng.random() < 0.2:
        key = rng.choice(list(arrays))
        odd = (np.nan * arrays[key], arrays[key].astype(int), arrays[key][None], np.zeros(0), np.array("x"))
        arrays[key] = rng.choice(odd)
    else:
        places = list(leaves(header))
        where, key = rng.choice(places)
        where[key] = rng.choice((None, True, -1, 0, 1, 2.5, 1e300, 10**30, "x", "", [], [1], {}, {"x": 1}, [[]]))
    stream = io.BytesIO()
    np.savez(stream, header=np.array(json.dumps(header)), **arrays)
    return stream.getvalue()


def leaves(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from leaves(node[key])


KINDS = (
    "checkpoint", "forged", "resumed", "drawn", "tested", "taught", "picture", "digits", "norb", "images", "archive",
    "affnist", "results", "claims",
)  # fmt: skip


def damaged_files(attack: Attack, made: dict[str, Path], n: int) -> Iterator[Trial]:
    """Each trial's damaged file stands in ``inputs``, and must be as it was afterwards."""
    broken, rng = attack.inputs / "broken", attack.rng
    for _ in range(n):
        shutil.rmtree(broken, ignore_errors=True)
        broken.mkdir()
        name = rng.choice(list(EXPERIMENTS))
        base, picture = tiny(name, made), str(made["picture"])
        kind = rng.choice(KINDS)
        path, source = broken / "file", made[name]
        if kind in ("checkpoint", "forged", "resumed"):
            path.write_bytes(forged(source, rng) if kind != "checkpoint" else damaged(source.read_bytes(), rng))
            argv = ["--checkpoint", str(path), "--predict", picture]
            if kind == "resumed":  # it may be written to: a copy of it is
                shutil.copy(path, attack.folder / "c.npz")
                argv = [*base, "--checkpoint", "../c.npz", "--resume"]
            elif rng.random() < 0.2:  # nothing that can be read is left of it
                path.write_bytes(source.read_bytes()[: rng.randrange(1, 5000)])
                argv = [*base, "--checkpoint", str(path), *rng.choice(([], ["--overwrite"]))]
        elif kind in ("drawn", "tested", "taught"):  # with the data that the header names
            path.write_bytes(forged(source, rng))
            if kind == "drawn":
                argv = ["--checkpoint", str(path), "--results", str(made["nothing"]), "--quiet"]
                name = f"visualize_{name}"
            elif kind == "tested" and name != "smallnorb_novel_viewpoint":
                argv = [*base, "--eval-only", "--checkpoint", str(path)]
            else:
                flags = {"multimnist_capsnet": "--capsnet", "conv_matrix_capsules": "--conv-capsules"}
                name = rng.choice(list(flags))
                path.write_bytes(forged(made[name], rng))
                argv = [word for key, flag in flags.items() for word in (flag, str(path if key == name else made[key]))]
                name = "visualize_how_capsules_work"
        elif kind == "picture":
            path.write_bytes(damaged(made[rng.choice(("picture", "photo"))].read_bytes(), rng))
            argv = ["--checkpoint", str(source), "--predict", str(path)]
        elif kind == "digits":
            name = rng.choice([known for known, experiment in EXPERIMENTS.items() if experiment.has_digits])
            shutil.copytree(made["digits"], broken / "digits")
            path = rng.choice(sorted((broken / "digits").iterdir()))
            if rng.random() < 0.5:  # not packed, so that no checksum helps
                path.write_bytes(gzip.decompress(path.read_bytes()))
            path.write_bytes(damaged(path.read_bytes(), rng))
            argv = [*tiny(name, made), "--data-dir", str(broken / "digits")]
        elif kind == "norb":
            name = rng.choice(("smallnorb_novel_viewpoint", "conv_matrix_capsules"))
            shutil.copytree(made["norb"], broken / "norb")
            path = rng.choice(sorted((broken / "norb").iterdir()))
            path.write_bytes(damaged(path.read_bytes(), rng))
            argv = ["--dataset", "smallnorb", "--data-dir", str(broken / "norb"), "--models", "cnn", "--n-epochs", "1"]
            argv += ["--train-azimuths", "0:170", "--test-azimuths", "180:350", "--quiet"]
        elif kind == "images":
            name = "conv_matrix_capsules"
            shutil.copytree(made["images"], broken / "images")
            path = rng.choice(sorted((broken / "images").glob("*/*")))
            path.write_bytes(damaged(path.read_bytes(), rng))
            argv = [*tiny(name, made), "--dataset", "images", "--data-dir", str(broken / "images")]
        elif kind == "archive":
            name, path = "conv_matrix_capsules", broken / "i.npz"
            path.write_bytes(damaged(made["archive"].read_bytes(), rng))
            argv = [*tiny(name, made), "--dataset", "images", "--data-dir", str(path)]
        elif kind == "claims":
            name = rng.choice(("visualize_claims", "benchmarks.figure"))
            file = "results/claims.json" if name == "visualize_claims" else "results/benchmarks/scaling.json"
            whole = (ROOT / file).read_bytes() if (ROOT / file).is_file() else b"{}"
            path.write_bytes(damaged(whole, rng))
            argv = ["--claims" if name == "visualize_claims" else "--results", str(path)]
        elif kind == "affnist":
            name = "mnist_affine_capsnet"
            path.write_bytes(damaged(made["affnist"].read_bytes(), rng))
            argv = [*tiny(name, made), "--canvas", "40", "--affnist", str(path)]
        else:
            name = rng.choice([known for known in FIGURES if known.startswith("visualize")])
            path.write_bytes(damaged((attack.inputs / f"{name.removeprefix('visualize_')}.json").read_bytes(), rng))
            argv = [*tiny(name, made), "--results", str(path), "--n-epochs", "77"]
            if rng.random() < 0.9:  # it would be drawn if it were taken
                argv += ["--checkpoint", str(made[name.removeprefix("visualize_")])]
        yield Trial("damaged file", name, argv)


# ----------------------------------------------------------------------------------------------------------------------
# Kills
# ----------------------------------------------------------------------------------------------------------------------


def is_ours(process: int, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return str(folder).encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def kill(attack: Attack, k: int) -> None:
    """A training, every sixth time a comparison of seeds, every twelfth the drawing of toys is sent a signal at any
    moment; then it goes on."""
    rng = random.Random(1000 + k)
    number = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)[k % 4]
    folder = attack.folder / f"kill{k}"
    (folder / "tmp").mkdir(parents=True)
    env = script_environment() | {"TMPDIR": str(folder / "tmp"), "HOME": str(folder)}
    name = rng.choice(list(EXPERIMENTS))
    experiment = EXPERIMENTS[name]
    argv = [*experiment.argv("--models cnn --n-epochs 40 --checkpoint-every 1"), "--checkpoint", str(folder / "c.npz")]
    command = [sys.executable, str(ROOT / f"{name}.py"), *argv, "--out-json", str(folder / "o.json")]
    if k % 6 == 5:
        flags = [*(f"--{part}={folder / part}" for part in ("cache", "out", "figure")), "--seeds", "0:4", "--jobs", "2"]
        runs = experiment.argv("--models cnn --n-epochs 30")
        del runs[runs.index("--threads") : runs.index("--threads") + 3]  # and --quiet
        command = [sys.executable, str(ROOT / "compare_seeds.py"), name, *flags, "--", *runs]
    elif k % 12 == 4:
        command = [sys.executable, str(ROOT / "make_toy_norb.py"), "--instances", "1", "--lightings", "1", "--quiet"]
        command += ["--out-dir", str(folder / "toys")]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(rng.uniform(0.4, 5))
        process.send_signal(number)
        error = process.communicate(timeout=120)[1]
    expected = {signal.SIGKILL: (-9, 0), signal.SIGINT: (130, 0), signal.SIGTERM: (143, -15, 0)}[number]
    # Ctrl-C before the first line of a script is Python's to report.
    began = not error.endswith("line 0, in <module>\nKeyboardInterrupt\n")
    if began and (("Traceback" in error and str(ROOT) in error) or process.returncode not in expected):
        attack.fault("kill", "traceback", (command[1], number.name, process.returncode, error[-300:]))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (alive := [p for p in map(int, pids()) if is_ours(p, folder)]):
        time.sleep(0.05)
    if alive := [p for p in map(int, pids()) if is_ours(p, folder)]:
        attack.fault("kill", "orphan", (command, alive))
    more = ["--resume"] if k % 6 == 5 or (folder / "c.npz").exists() else []
    at = command.index("--") if "--" in command else len(command)
    again = subprocess.run([*command[:at], *more, *command[at:]], env=env, capture_output=True, text=True, check=False)
    if again.returncode and "has a smallnorb-" not in again.stderr:  # or it had finished before the signal
        attack.fault("kill", "traceback", ("after it", command[1], number.name, again.stderr[-300:]))
    left = [p for p in folder.rglob("*") if p.name.endswith(".tmp") or p.parent.name == "tmp"]
    if left:
        attack.fault("kill", "left behind", (command[1], number.name, left))
    attack.trials["kill"] += 1
    shutil.rmtree(folder)


def pids() -> list[str]:
    return [entry for entry in os.listdir("/proc") if entry.isdigit()]


# ----------------------------------------------------------------------------------------------------------------------
# Changed numbers of results
# ----------------------------------------------------------------------------------------------------------------------


def results_to_change(attack: Attack) -> list[Path]:
    """Those of this project; where there are none, one that is made here."""
    os.chdir(ROOT)
    found = sorted(Path("results").rglob("*.json"))
    if found:
        return found
    os.chdir(attack.work)
    name = "smallnorb_novel_viewpoint"
    flags = ["--seeds", "0:3", "--name", "n", "--grid", "loss=cross-entropy,spread"]
    command = [sys.executable, str(ROOT / "compare_seeds.py"), name, *flags, "--", *EXPERIMENTS[name].tiny.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return sorted(Path("results").rglob("*.json"))


def changed_numbers(attack: Attack) -> int:
    """Every number of every file is changed: plainly, which the checksum shows, and with the checksum computed again,
    when only what nothing else follows from may pass. The number of those that passed."""
    n_raw = 0
    for path in results_to_change(attack):
        document = json.loads(path.read_text())
        known = set(report.check_result(path, False))
        copy = attack.work / "copy" / path
        for where, key in list(leaves(document)):
            value = where[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            where[key] = value + 1 if isinstance(value, int) else value + max(1e-6, abs(value) * 1e-6)
            if document["checksum"] == checksum(document):
                attack.fault("changed number", "not seen", (path, key, value))
            attack.trials["changed number"] += 1
            faults = seen(document | {"checksum": checksum(document)}, path, copy)
            attack.trials["and its checksum"] += 1
            if not faults - known:
                n_raw += 1
                if is_derived(document, where):
                    attack.fault("and its checksum", "not seen", (path, key, value))
            where[key] = value
    return n_raw


def seen(document: dict[str, Any], path: Path, copy: Path) -> set[str]:
    """What ``report.py`` says of a document that lies under a path."""
    original = report.read_json
    report.read_json = lambda _: document  # type: ignore[assignment]
    try:
        return set(report.check_result(path, False))
    finally:
        report.read_json = original


def is_derived(document: dict[str, Any], container: Any) -> bool:
    """Whether a number in this container follows from others: statistics over the runs."""
    for entry in document.get("settings", {}).values():
        if any(container is found for part in ("models", "paired") for found, _ in leaves(entry[part])):
            return True
    return False


# ----------------------------------------------------------------------------------------------------------------------
# All of it
# ----------------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    for flag, n in (("inputs", 900), ("files", 1100), ("kills", 60)):
        parser.add_argument(f"--{flag}", type=int, default=n, help="default: %(default)s")
    args = parser.parse_args(argv)
    rng, folder = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="attack"))
    os.environ |= {"HOME": str(folder), "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    before = stamps_of_project()
    attack = Attack(folder, rng)
    with pytest.MonkeyPatch.context() as patch:
        smallest(patch)
        made = make_inputs(attack.inputs)
        for trial in wrong_inputs(attack, made, args.inputs):
            attack.run(trial)
        for trial in damaged_files(attack, made, args.files):
            attack.run(trial)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda k: kill(attack, k), range(args.kills)))
    n_raw = changed_numbers(attack)
    os.chdir(ROOT)
    if stamps_of_project() != before:
        attack.fault("wrong input", "changed input", "a file of this project")
    print(f"\n{'':<18} {'trials':>7} " + " ".join(f"{what:>13}" for what in FAULTS))
    for kind, n in attack.trials.items():
        print(f"{kind:<18} {n:>7} " + " ".join(f"{attack.counts[kind, what]:>13}" for what in FAULTS))
    print(f"{n_raw} changed numbers from which nothing follows were not seen once their checksum was right")
    shutil.rmtree(folder, ignore_errors=True)
    return int(attack.counts.total() > 0)


def stamps_of_project() -> dict[str, tuple[int, int, int]]:
    kept = [*ROOT.glob("*.*"), *ROOT.glob("support/*.py"), *(ROOT / "results").rglob("*"), *(ROOT / "viz").rglob("*")]
    return {str(p): (p.stat().st_ino, p.stat().st_size, p.stat().st_mtime_ns) for p in kept if p.is_file()}


if __name__ == "__main__":
    sys.exit(main())
