"""Times of training steps, of their matrix products alone and of other frameworks: ``python -m benchmarks``."""
