"""Fast twins of the plain forms in the scripts, held to them by tests in float64. Caches differ, and a few arguments.

In another project the folder lies where ``import fast`` finds it; each file but optimizers.py, which needs workers.py,
works alone. All need numpy, and arrays of one type of floats. A ``squash`` is a pair as in multimnist_capsnet.py.
"""
