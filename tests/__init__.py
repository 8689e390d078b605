"""The tests; ``support`` holds what more than one folder of them uses, and the benchmarks."""
