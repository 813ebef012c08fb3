"""Relations between the elements of two tensors: equal, rounded, scaled, quantised.

Read `rounding` and `causes` first: the relations that a sample suggests. `quantised_causes` has
those of `quantisers`. `verification` picks relations that fit a sample, and tests them on every
element.
"""
