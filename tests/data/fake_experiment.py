"""An experiment that keeps the contract of flags and JSON and trains nothing. It notes its runs in runs.log."""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out-json")
    parser.add_argument("--checkpoint")
    parser.add_argument("--eval-only", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--shift", type=float, default=0.1)
    parser.add_argument("--kind", default="a")
    parser.add_argument("--gap", default="0:60")
    parser.add_argument("--models", default="capsules,cnn")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sleep", type=float, default=0)
    parser.add_argument("--death", default="")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with open("runs.log", "a") as log:
        print(args.seed, args.shift, args.kind, args.gap, os.getpid(), file=log)
    dataset = "numbers"
    if os.environ.get("NO_NUMBERS") or (args.data_dir and not (args.data_dir / "numbers").exists()):
        print("=====\nWARNING: there are no numbers, drawn ones are used\n=====", file=sys.stderr)
        dataset = "drawn"
    time.sleep(60 if args.seed > 1 and Path("hang").exists() else args.sleep)
    if args.seed == 1 and args.death:
        print("the last words", file=sys.stderr)
        if args.death == "status":
            sys.exit(3)
        if args.death == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.death == "hang":
            sys.stderr.flush()
            time.sleep(60)
        if args.death == "silence":
            sys.exit(0)
        if args.death == "deep":
            Path(args.out_json).write_text("[" * 100_000)
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
            "soft_accuracy": v,
            "train_seconds": time.perf_counter(),
        }
        for name, n, v in (("capsules", 1234, value), ("cnn", 99, base))
        if name in args.models.split(",")
    }
    result = {
        "experiment": "fake", "seed": args.seed, "dataset": dataset,
        "config": {"seed": args.seed, "shift": args.shift}, "models": models,
        "history": {"capsules": {"loss": [1.0, 0.5]}},
        "environment": {"python": "3", "git_commit": os.environ.get("FAKE_COMMIT")},
        "headline": "top_accuracy", "chance": 0.25,
    }  # fmt: skip
    with open(args.out_json, "w") as stream:
        json.dump(result, stream)


if __name__ == "__main__":
    main()
