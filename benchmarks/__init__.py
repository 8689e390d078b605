"""Every op against its peers and the physical limit: ``python -m benchmarks --help``."""
