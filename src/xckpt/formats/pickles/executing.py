"""Code that runs when another program loads a pickle, or a text of a model.

A pickle names functions and classes, and a program that unpickles it imports and calls them. Here
nothing is imported: `CodeUses` notes which names a pickle imports, which it calls, and calls and
imports whose names are computed. `_ACCEPTED` is a closed list of the names that hold values only:

- what ``torch.load(weights_only=True)`` accepts by default, or after an import of
  ``torch.distributed.tensor``: ``_get_allowed_globals`` in torch/_weights_only_unpickler.py of
  github.com/pytorch/pytorch, 2.15,
- other functions of PyTorch that return tensors, and the metadata of its distributed checkpoints,
- NumPy arrays, numbers and generators, and types of Python's own modules that hold values,
- records that training programs put into their checkpoints, such as ``TrainingArguments``.

All other names of Python's own modules may run programs and read files. A class of a package that
is only instantiated, or only named, is an import: the file does not decide its effect. All other
calls run code with arguments from the file.
"""

from __future__ import annotations

import sys
from typing import Any

from xckpt.formats.pickles.records import Call, Global, Persistent, renamed

_MOST, _LONGEST = 100, 100  # names, and characters of each part
# Accepted functions have fewer arguments that they call. Many calls can share a tuple.
_MOST_ARGS = 16

# --- names ----------------------------------------------------------------------------------------

_SIGNED = "int8 int16 int32 int64"
_FLOATS = "float16 float32 float64 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2"
_FLOATS += " float8_e5m2fnuz float8_e8m0fnu"
_TYPES = "BFloat16 Bool Byte Char ComplexDouble ComplexFloat Double Float Half Int Long Short"
_METADATA = "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta"
_METADATA += " TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
_STRATEGIES = "EvaluationStrategy FSDPOption HubStrategy IntervalStrategy SaveStrategy"
_ARRAYS = "_reconstruct scalar"
_BUILTINS = "bool bytearray bytes complex dict ellipsis float frozenset int list long object range"
_BUILTINS += " set slice str tuple type unicode NotImplemented basestring xrange"
_PATHS = "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"

# Names by module; element types, and classes of storages and tensors are added below.
_ACCEPTED: dict[str, str] = {
    # PyTorch, with weights_only
    "torch": f"Size Tensor device per_channel_affine per_channel_affine_float_qparams"
    f" per_channel_symmetric per_tensor_affine per_tensor_symmetric bool bcomplex32 complex32"
    f" complex64 complex128 float4_e2m1fn_x2 {_FLOATS} {_SIGNED}"
    f" bits16 bits1x8 bits2x4 bits4x2 bits8 qint8 qint32 quint2x4 quint4x2 quint8"
    f" QInt8Storage QInt32Storage QUInt2x4Storage QUInt4x2Storage QUInt8Storage",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy"
    " _rebuild_meta_tensor_no_storage _rebuild_parameter _rebuild_parameter_with_state"
    " _rebuild_qtensor _rebuild_sparse_tensor _rebuild_tensor _rebuild_tensor_v2"
    " _rebuild_tensor_v3 _rebuild_wrapper_subclass"
    # It refuses these two, which return tensors.
    " _rebuild_nested_tensor _rebuild_xla_tensor",
    "torch.nn.parameter": "Parameter Buffer",
    "torch.serialization": "_get_layout",
    "torch.storage": "TypedStorage UntypedStorage _TypedStorage _UntypedStorage _load_from_bytes",
    "torch.distributed._mesh_layout": "_FlatLayout _MeshLayout",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
    "torch.distributed.tensor.placement_types": "Partial Replicate Shard _StridedShard",
    # other names of PyTorch
    "torch.autograd.variable": "Variable",
    "torch.nn": "Parameter",
    "torch.tensor": "_rebuild_from_type_v2",
    "torch.jit._pickle": "build_boollist build_doublelist build_intlist build_tensorlist"
    " build_tensor_from_id restore_type_tag",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.metadata": _METADATA,
    # NumPy
    "numpy": "dtype ndarray matrix record recarray bool bool_ str_ bytes_ void datetime64"
    f" timedelta64 complex64 complex128 longdouble intc longlong ulonglong {_FLOATS} {_SIGNED}",
    **dict.fromkeys(("numpy.core.multiarray", "numpy._core.multiarray"), _ARRAYS),
    **dict.fromkeys(("numpy.core.numeric", "numpy._core.numeric"), "_frombuffer"),
    **dict.fromkeys(("numpy.ma", "numpy.ma.core"), "MaskedArray _mareconstruct"),
    "numpy.rec": "recarray",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM",
    "numpy.random._philox": "Philox",
    "numpy.random._sfc64": "SFC64",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "ml_dtypes": f"int2 int4 uint2 uint4 float4_e2m1fn float6_e2m3fn float6_e3m2fn {_FLOATS}",
    # Python
    "_codecs": "encode",
    "argparse": "Namespace",
    "array": "_array_reconstructor array",
    "builtins": _BUILTINS,
    "collections": "ChainMap Counter OrderedDict UserDict UserList UserString defaultdict deque",
    "copyreg": "__newobj__ __newobj_ex__ _reconstructor",
    "dataclasses": "_HAS_DEFAULT_FACTORY_CLASS _MISSING_TYPE",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "partial",
    "http": "HTTPMethod HTTPStatus",
    "ipaddress": "IPv4Address IPv4Network IPv6Address IPv6Network",
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "random": "Random",
    "re": "_compile RegexFlag",
    "string": "Template",
    "time": "struct_time",
    "types": "MappingProxyType SimpleNamespace",
    "typing": "Any Callable Dict List Literal Optional Sequence Set Tuple Type Union",
    "uuid": "SafeUUID UUID",
    # arrays and records of other libraries
    "jax._src.array": "_reconstruct_array",
    "pandas": "Categorical DataFrame Interval Period Series StringDtype"
    " CategoricalIndex DatetimeIndex Index IntervalIndex MultiIndex PeriodIndex RangeIndex",
    "pandas.arrays": "BooleanArray DatetimeArray FloatingArray IntegerArray StringArray",
    "pandas.core.frame": "DataFrame",
    "pandas.core.series": "Series",
    "pandas._libs.arrays": "__pyx_unpickle_NDArrayBacked",
    "pandas._libs.internals": "_unpickle_block",
    "pandas._libs.tslibs.nattype": "_nat_unpickle",
    "pandas._libs.tslibs.timedeltas": "_timedelta_unpickle",
    "pandas._libs.tslibs.timestamps": "_unpickle_timestamp",
    "pandas.core.indexes.base": "_new_Index Index",
    "pandas.core.indexes.datetimes": "_new_DatetimeIndex",
    "pandas.core.indexes.interval": "_new_IntervalIndex",
    "pandas.core.internals.managers": "BlockManager SingleBlockManager",
    "sklearn.metrics._dist_metrics": "newObj EuclideanDistance64",
    "sklearn.neighbors._ball_tree": "newObj BallTree",
    "sklearn.neighbors._kd_tree": "newObj KDTree",
    "sklearn.tree._tree": "Tree",
    # records of training programs
    "accelerate.state": "PartialState",
    "accelerate.utils.dataclasses": "DistributedType",
    "timm.layers.format": "Format",
    "transformers.debug_utils": "DebugOption",
    "transformers.trainer_pt_utils": "AcceleratorConfig",
    "transformers.trainer_utils": f"SchedulerType {_STRATEGIES}",
    "transformers.training_args": "OptimizerNames ParallelMode TrainingArguments",
    "transformers.training_args_seq2seq": "Seq2SeqTrainingArguments",
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "megatron.core.enums": "ModelType",
    "megatron.core.transformer.enums": "AttnBackend AttnMaskType AttnType LayerType",
}
_NAMES = {module: frozenset(names.split()) for module, names in _ACCEPTED.items()}
_NAMES["torch"] |= {f"{kind}Storage" for kind in _TYPES.split()}
_NAMES["torch"] |= {f"{kind}Tensor" for kind in _TYPES.split()}
_NAMES["torch"] |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (*range(1, 9), 16, 32, 64)}
_NAMES["numpy"] |= {f"u{name}" for name in _SIGNED.split()}
for _module in ("torch.cuda", "torch.sparse", "torch.cuda.sparse"):
    _NAMES[_module] = frozenset(
        f"{kind}{noun}" for kind in _TYPES.split() for noun in ("Storage", "Tensor")
    )
_ERRORS = ("Error", "Exception", "Warning", "Interrupt")
_SCRIPTED = "__torch__"  # the root of the classes of TorchScript, which are not Python's
# Modules of Python and its installers, also of other versions and platforms.
_OWN = frozenset(sys.stdlib_module_names)
_OWN |= {"nt", "posix", "msvcrt", "winreg", "_winapi", "commands", "popen2", "cPickle", "urllib2"}
_OWN |= {"httplib", "__builtin__", "distutils", "imp", "asyncore", "asynchat", "smtpd", "lib2to3"}
_OWN |= {"cgi", "cgitb", "crypt", "mailcap", "msilib", "nntplib", "pipes", "telnetlib", "uu"}
_OWN |= {"pip", "setuptools", "pkg_resources", "_distutils_hack", "ensurepip", "site"}
#: It loads a file of torch.save from bytes; the scanner looks into them.
BYTES_OF_TORCH = Global("torch.storage", "_load_from_bytes")
_TYPE, _RECONSTRUCTOR = ("builtins", "type"), ("copyreg", "_reconstructor")
_NO_BASE = ("builtins", "object")


def is_accepted(name: Global) -> bool:
    """Return whether a name only holds values, so that calling it runs no code of a file."""
    if name.module == "builtins" and name.name.endswith(_ERRORS):
        return True
    return name.name in _NAMES.get(name.module, ()) or name.module.startswith(f"{_SCRIPTED}.")


def is_own(module: str) -> bool:
    """Return whether a module belongs to Python or its installers."""
    return module.partition(".")[0] in _OWN


# --- pickles --------------------------------------------------------------------------------------


class CodeUses:
    """The names that a pickle imports, and those that it calls with arguments."""

    __slots__ = ("_computed", "_imports", "_runs")

    def __init__(self) -> None:
        self._imports: dict[Global, None] = {}
        self._runs: dict[Global, None] = {}
        self._computed: dict[str, None] = {}

    def imported(self, name: Global) -> None:
        """Note an import."""
        self._imports[name] = None

    def called(self, function: Any, args: tuple[Any, ...]) -> None:
        """Note a call. A function among the arguments may be called in turn."""
        if type(function) is Persistent and type(function.id) is tuple:
            # In old files of PyTorch: ("module", class, file with its code, the code).
            function = function.id[1] if function.id[:1] == ("module",) else function
        if type(function) is not Global:
            self.computed("a call of a computed function")
            return
        name = renamed(function)
        if name == _RECONSTRUCTOR and len(args) == 3 and type(args[1]) is Global:
            # The base is called with the state; the class has no arguments.
            args = args[1:] if renamed(args[1]) != _NO_BASE else ()
        elif name == _TYPE and len(args) != 1:
            self.computed("a class made by builtins.type")
        elif name == BYTES_OF_TORCH:
            self.computed(_spelled(name))
        elif args:
            self._runs[function] = None
        for arg in args[:_MOST_ARGS]:
            if type(arg) is Global:
                self._runs[arg] = None

    def built(self, target: Any) -> None:
        """Note a state that replaces methods: of a function or a class, or of an object again."""
        if type(target) is Global:
            self.computed(f"changed attributes of {_spelled(target)}")
        elif type(target) is Persistent:
            self.computed("changed attributes of a storage")
        elif type(target) is Call and target.is_built:
            # The first state may be the function that receives the second one.
            self.computed("a state that is set twice")

    def computed(self, text: str) -> None:
        """Note what has no name in the file, as a text."""
        self._computed[text] = None

    @property
    def executes(self) -> list[str]:
        """Names and texts of the code that runs, at most a hundred."""
        runs = [_spelled(name) for name in self._imports if self._is_run(name)]
        return [*dict.fromkeys((*runs, *self._computed))][:_MOST]

    @property
    def imports(self) -> list[str]:
        """Names of other classes and functions of packages, at most a hundred."""
        names = [name for name in self._imports if not self._is_run(name)]
        return [_spelled(name) for name in names if not is_accepted(renamed(name))][:_MOST]

    def _is_run(self, name: Global) -> bool:
        newest = renamed(name)
        if is_accepted(newest):
            return False
        # A name with a dot is a method, such as Path.unlink.
        return is_own(newest.module) or "." in newest.name or name in self._runs


def _spelled(name: Global) -> str:
    return f"{name.module[:_LONGEST]}.{name.name[:_LONGEST]}"
