"""Datasets and trees of an Index, and open objects as their tensors.

The room turns arrays of files into variables with named axes. In an open object it looks up tensors
by name, whether they are stacked or in a tree. It may import `arrays`, `labels`, `quantization`,
`storage` and the modules below them, but no format and no summary. Read `making` first,
for opening, then `listing` and `trees`; `tensors` is for all operations on an open object.
"""
