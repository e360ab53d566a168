"""Training steps timed beside their bare matrix products and the same networks in PyTorch: ``python -m benchmarks``."""
