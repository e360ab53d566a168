"""MNIST accuracy of a CNN trained on generated digits alone. ``python -m benchmarks.strokes``

The trunk is the CapsNet's two convolutions, then one dense layer; PyTorch trains it (requirements-bench.txt).
"""

from __future__ import annotations

import support.startup  # noqa: F401  before the others, for Ctrl-C

# isort: split

import math
import shlex
import sys
from pathlib import Path

import numpy as np

from multimnist_capsnet import load_mnist
from support.console import exit_status, print_result
from support.files import UserError, require_writable
from support.flags import Parser, file_path, whole_number
from support.results import code_fingerprint, environment, save_result
from support.stroke_digits import stroke_digits

N_DIGITS, BATCH, LR = 20_000, 64, 1e-3


def accuracy_on_mnist(seed: int, n_epochs: int, data_dir: Path | None) -> float:
    """Accuracy on the MNIST test set of a CNN trained on ``N_DIGITS`` generated digits, a fraction."""
    import torch
    from torch import nn

    mnist = load_mnist(data_dir)
    torch.manual_seed(seed)
    images, classes = stroke_digits(np.random.default_rng(seed), N_DIGITS)
    x, labels = torch.tensor(images).float().div(255)[:, None], torch.tensor(classes.astype(np.int64))
    trunk = (nn.Conv2d(1, 32, 9), nn.ReLU(), nn.Conv2d(32, 64, 9, stride=2), nn.ReLU())
    network = nn.Sequential(*trunk, nn.Flatten(), nn.Linear(64 * 36, 10))
    optimiser = torch.optim.Adam(network.parameters(), LR)
    n_steps, step = n_epochs * (N_DIGITS // BATCH), 0
    for _ in range(n_epochs):
        for batch in torch.randperm(N_DIGITS)[: N_DIGITS // BATCH * BATCH].split(BATCH):
            optimiser.param_groups[0]["lr"] = LR * 0.5 * (1 + math.cos(math.pi * step / n_steps))
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[batch]), labels[batch]).backward()
            optimiser.step()
            step += 1
    with torch.no_grad():
        tests = torch.tensor(mnist.test_images).float().div(255)[:, None].split(500)
        named = torch.cat([network(part).argmax(1) for part in tests]).numpy()
    return float((named == mnist.test_labels).mean())


def make_parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.strokes", description=__doc__)
    parser.add_argument("--seed", type=whole_number(0, 2**32 - 1), default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--n-epochs", type=whole_number(1, 100), default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--data-dir", type=file_path, metavar="DIR", help="of MNIST; default: the cache, or a download")
    parser.add_argument(
        "--out", type=file_path, default=Path("results/benchmarks/strokes.json"), help="default: %(default)s"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser().parse_args(argv)

    def body() -> None:
        require_writable(args.out)
        try:
            import torch
        except ImportError:
            raise UserError("PyTorch is not installed: pip install -r requirements-bench.txt") from None
        accuracy = accuracy_on_mnist(args.seed, args.n_epochs, args.data_dir)
        print_result(f"MNIST test accuracy after {N_DIGITS:,} generated digits: {accuracy:.4f}")
        result = {
            "command": shlex.join(["python", "-m", "benchmarks.strokes", *argv]),
            "code": code_fingerprint(Path(__file__)),
            "environment": environment(torch.get_num_threads()),
            "tables": {"strokes": {"columns": ["tested on", "accuracy"], "rows": [["MNIST test set", accuracy]]}},
        }
        save_result(args.out, result)

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
