"""What formats of weights cost: ``python -m benchmarks quality --help``."""
