"""Datasets: from an Index to variables, Datasets and trees, and open objects as their tensors."""
