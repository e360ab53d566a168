"""An experiment that keeps the contract of flags and JSON and trains nothing. It notes its runs in runs.log."""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

FLAGS = {
    "seed": 0, "threads": 1, "shift": 0.1, "kind": "a", "gap": "0:60", "models": "capsules,cnn", "sleep": 0.0,
    "death": "", "out-json": "", "checkpoint": "", "data-dir": "",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--quiet", action="store_true")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with open("runs.log", "a") as log:
        print(args.seed, args.shift, args.kind, args.gap, os.getpid(), file=log)
    dataset = "numbers"
    if os.environ.get("NO_NUMBERS") or (args.data_dir and not Path(args.data_dir, "numbers").exists()):
        print("=====\nWARNING: there are no numbers, drawn ones are used\n=====", file=sys.stderr)
        dataset = "drawn"
    time.sleep(60 if args.seed > 1 and Path("hang").exists() else args.sleep)
    if args.seed == 1 and args.death:
        print("Traceback of many lines:\n    the last words", file=sys.stderr)
        if args.death == "status":
            sys.exit(3)
        if args.death == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.death == "silence":
            sys.exit(0)
    draw = random.Random(args.seed)
    base = 0.5 + 0.1 * draw.random()
    value = base + args.shift + 0.01 * draw.random()
    if args.seed == 1 and args.death == "nan":
        value = float("nan")
    models = {
        name: {
            "n_params": n,
            "loss": 1 - v,
            "top_accuracy": v,
            "train_seconds": time.perf_counter(),
            "epoch_seconds": time.perf_counter() / 2,
            "sweep": {"-90": v / 3},
            "reached": None,
        }
        for name, n, v in (("capsules", 1234, value), ("cnn", 99, base))
        if name in args.models.split(",")
    }
    result = {
        "experiment": "fake", "seed": args.seed, "dataset": dataset,
        "config": {"seed": args.seed, "shift": args.shift, "data_dir": args.data_dir}, "models": models,
        "history": {"capsules": {"loss": [1.0, 0.5]}},
        "headline": "top_accuracy",
    }
    with open(args.out_json, "w") as stream:
        json.dump(result, stream)


if __name__ == "__main__":
    main()
