"""Runs a script that ends when the process that started it does, however that ends: python watched.py SCRIPT FLAGS.

The standard input is a pipe whose other end that process holds open and never writes to.
"""

import os
import runpy
import sys
import threading


def end_with_the_other_end() -> None:
    while os.read(0, 1024):
        pass
    os._exit(143)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_other_end, daemon=True).start()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
