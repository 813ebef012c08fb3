"""Datasets and trees of an Index, and open objects as their tensors.

This room turns arrays of files into variables with names of axes, and finds the tensors in an open
object again: by name, stacked, or in a tree. It may import `arrays`, `labels`, `quantization`,
`storage` and the modules below them, but no format and no summary. Read `listing` and `making` for
opening, then `tensors` for everything that happens to an open object.
"""
