"""Private parts of dask and xarray, all of them, each with a public way beside it.

`dask_arrays` knows dask, `xarray_variables` and `xarray_trees` know xarray. No other module uses
private parts of them.

Parts that are missing, or do not do what they did, are not used. With ``XCKPT_PLAIN=1`` in the
environment none is.

=============================================  ==================================================
relies on                                      gains, over the public way
=============================================  ==================================================
`da.Array` without its constructor, slots of   opening: half the time
`Variable`, `Variable._copy`
attributes of `HighLevelGraph` and `Layer`,    opening: no objects for graphs nobody looks at;
set when they are first asked for              slices: tasks for the chunks that are read
``dask._task_spec``, `getter`                  a row of an array that is dask's: a sixtieth of
                                               the time, as no more than the row is read
`HighLevelGraph.copy`, called for all of an    computing: two thirds of the time and half the
array                                          memory, as chunks are read into their places
``__dask_optimize__`` of an instance           computing 500 arrays: two thirds of the time;
                                               10,000: two fifths
state of dask's scheduler: ``ready``           remote reading: in the order of the file
`Dataset._construct_direct`, slots of          `open_datatree`: a twentieth of the time
`DataTree`
=============================================  ==================================================

`Variable._data` has no public counterpart: `Variable.data` reads what is lazy. The data of a
`Variable` without it are read.
"""

from __future__ import annotations

import os

__all__ = ["IS_PLAIN"]

#: Whether only public ways are used.
IS_PLAIN = os.environ.get("XCKPT_PLAIN", "0") not in {"", "0"}
