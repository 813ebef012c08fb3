"""One pass over the elements of many tensors, on threads or on a cluster, with a cache of results.

May import arrays, labels, datasets, opening and storage, but no format, and none of the rooms
above: statistics, comparison, health. Read `scanning` first, from `gather` down, then
`arrays.streams` (a tensor as a sequence of elements). `entries` opens a path, lists the tensors of
an object, and lays out results in the shape of the object.
"""
