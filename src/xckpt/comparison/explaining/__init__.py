"""Explanations of differences between tensors, for `compare(explain=True)`.

`results` adds them to the variables of a comparison. Read `passes` first: the passes over the
unexplained tensors, in order. They try `arrangements`, which are views of the same numbers in other
places, and `relations` between the elements. `outcome` decides the outcome of each tensor, and
words it.
"""
