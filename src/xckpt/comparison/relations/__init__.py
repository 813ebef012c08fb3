"""Relations between the elements of two tensors: equal, rounded, scaled, quantised.

Read `causes` first, for the relations that a sample suggests; `quantised_causes` adds the
`quantisers`. `verification` picks relations that fit a sample, and tests them on every element.
"""
