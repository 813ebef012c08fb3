"""All uses of private parts of dask and xarray, each with a public alternative.

`dask_arrays` relies on dask; `xarray_variables` and `xarray_trees` rely on xarray. No other module
uses private parts of them. The room imports nothing of the package. Read the table below first.

If a private part is missing or behaves differently, the public alternative is used; with
``XCKPT_PLAIN=1`` in the environment, always.

=============================================  ==================================================
relies on                                      gains, over the public alternative
=============================================  ==================================================
`da.Array` without its constructor, slots of   opening: half the time
`Variable`, `Variable._copy`
attributes of `HighLevelGraph` and `Layer`,    opening: no objects for unused graphs;
set on first access                            slices: tasks only for the chunks that are read
``dask._task_spec``, `getter`                  a row of a dask array: a sixtieth of the time,
                                               because only the row is read
`HighLevelGraph.copy`, called for all of an    computing: two thirds of the time and half the
array                                          memory, because chunks are read into their places
``__dask_optimize__`` of an instance           computing 500 arrays: two thirds of the time;
                                               10,000: two fifths
state of dask's scheduler: ``ready``           remote reading: ahead of the tasks
`Dataset._construct_direct` and ``_indexes``,  `open_datatree`: a twentieth of the time;
slots of `DataTree`                            opening and `stats`: no other look at variables
=============================================  ==================================================

`Variable._data` has no public alternative: `Variable.data` reads lazy data. A `Variable` without
`_data` is read.
"""

from __future__ import annotations

import os

#: Whether only public alternatives are used.
IS_PLAIN = os.environ.get("XCKPT_PLAIN", "0") not in {"", "0"}
