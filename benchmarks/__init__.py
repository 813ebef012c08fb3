"""Benchmarks: each prints ratios against a peer or a floor that it measured in the same run."""
