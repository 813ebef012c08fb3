"""Explanations of differences between tensors, for `compare(explain=True)`.

Read `passes` first: the passes over the unexplained tensors, in order. `sketches` suggest
`arrangements`, which are views of the same numbers in other places. `verification` picks relations
that fit a sample (`causes`, `quantised_causes`), and tests them on every element. `outcome` decides
the outcome of each tensor, and words it.
"""
