"""Values of flax, onnx, Keras, h5py, Orbax, tensorstore and DeepSpeed.

Flax and onnx read the golden files; the others write new random files. All of them are in the extra
``oracles``: ``pip install --editable '.[test,oracles]'``.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    """Let Keras use JAX, and JAX divide this processor into four devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
        yield


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a tree by their joined paths."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(tree, np.ndarray):
        yield "/".join(path) or "tensor", tree


@pytest.mark.parametrize("path", golden_files("flax/*.msgpack"), ids=lambda path: path.stem)
def test_flax_restores_the_same_values(path: Path) -> None:
    serialization = pytest.importorskip("flax.serialization")
    try:
        expected = dict(leaves(serialization.msgpack_restore(path.read_bytes())))
        ds = xckpt.open(path, decode=False)
    except (xckpt.FormatError, TypeError):
        pytest.skip("one of the two refuses it")
    except xckpt.CheckpointWarning:
        pytest.skip("something in it is left out")
    for name, values in expected.items():
        if values.dtype.name == str(ds.variables[name].dtype) and path.stem != "dtype_aliases":
            assert ds.variables[name].values.tobytes() == values.tobytes()


@pytest.mark.parametrize("path", golden_files("onnx/*.onnx"), ids=lambda path: path.stem)
def test_onnx_reads_the_same_values(path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper = pytest.importorskip("onnx.numpy_helper")
    ds = xckpt.open(path, decode=False)
    for tensor in onnx.load(path).graph.initializer:
        if tensor.data_type != onnx.TensorProto.STRING and not tensor.HasField("segment"):
            assert ds[tensor.name].values.tobytes() == helper.to_array(tensor).tobytes()


def identical(variable: Any, expected: Any) -> None:
    """Compare shapes and bits, in native byte order."""
    expected = np.asarray(expected)
    expected = expected.astype(expected.dtype.newbyteorder("="))
    assert variable.shape == expected.shape
    assert variable.values.tobytes() == expected.tobytes()


# --- Keras and h5py -------------------------------------------------------------------------------

POLICIES = ["float32", "float16", "mixed_bfloat16", "bfloat16"]


def random_model(keras: Any, seed: int) -> Any:
    """Return a model of random layers; every second one was trained for a step."""
    rng = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    pictures = [
        lambda: layers.Conv2D(int(rng.integers(1, 5)), 2, padding="same"),
        lambda: layers.DepthwiseConv2D(2, padding="same", depth_multiplier=2),
        lambda: layers.SeparableConv2D(3, 2, padding="same"),
        lambda: layers.Conv2DTranspose(2, 2, use_bias=False),
        lambda: layers.GroupNormalization(1),
        layers.BatchNormalization,
        lambda: keras.Sequential([layers.Conv2D(2, 1), layers.PReLU()]),
    ]
    sequences = [
        lambda: layers.Dense(int(rng.integers(1, 9)), dtype=str(rng.choice(POLICIES))),
        lambda: layers.LSTM(3, return_sequences=True),
        lambda: layers.GRU(2, return_sequences=True, reset_after=bool(rng.integers(2))),
        lambda: layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True)),
        layers.LayerNormalization,
        lambda: layers.Conv1D(4, 2, padding="same", dilation_rate=2),
        lambda: layers.EinsumDense("abc,cd->abd", output_shape=(None, 3), bias_axes="d"),
    ]
    choices, shape = (pictures, (6, 6, 2)) if seed % 4 < 2 else (sequences, (5, 3))
    chosen = rng.integers(len(choices), size=int(rng.integers(1, 7)))
    model = keras.Sequential([keras.Input(shape), *(choices[n]() for n in chosen)])
    if seed % 2:
        model.compile(str(rng.choice(["adam", "sgd", "rmsprop", "adamw", "lion"])), "mse")
        x = rng.normal(size=(2, *shape)).astype("f4")
        model.fit(x, np.zeros_like(model.predict(x, verbose=0)), verbose=0)
    return model


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".h5", ".weights.json"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore")
def test_keras_wrote_the_same_values(tmp_path: Path, seed: int, suffix: str) -> None:
    keras = pytest.importorskip("keras")
    model = random_model(keras, seed)
    path = tmp_path / f"model{suffix}"
    if "weights" not in suffix:
        model.save(path)
    else:
        model.save_weights(path, max_shard_size=1e-6 if suffix.endswith("json") else None)
    ds = xckpt.open(path, decode=False)
    values = Counter((v.shape, v.values.tobytes()) for v in ds.variables.values())
    trained = model.optimizer.variables if seed % 2 else ()
    for variable in (*model.weights, *trained):
        array = keras.ops.convert_to_numpy(variable.value)
        values[array.shape, array.tobytes()] -= 1
        assert values[array.shape, array.tobytes()] >= 0, variable.path


HDF5_TYPES = ["i1", "<u2", ">i4", "<i8", "<f2", ">f4", "<f8", "?", "<c8", ">c16"]


@pytest.mark.parametrize("libver", ["earliest", "v108", "latest"])
@pytest.mark.parametrize("seed", range(20))
def test_h5py_wrote_the_same_values(tmp_path: Path, seed: int, libver: str) -> None:
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(seed)
    arrays = {}
    user_block = int(rng.choice([0, 512]))
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w", libver=libver, userblock_size=user_block) as file:
        for n in range(int(rng.integers(1, 40))):
            shape = tuple(int(m) for m in rng.integers(0, 9, size=rng.integers(0, 4)))
            array = rng.integers(-99, 99, size=shape).astype(rng.choice(HDF5_TYPES))
            options: dict[str, Any] = {}
            if shape and array.size and rng.integers(2):
                options["chunks"] = tuple(int(rng.integers(1, m + 1)) for m in shape)
                options["compression"] = [None, "gzip", "lzf"][rng.integers(3)]
                options["shuffle"] = bool(rng.integers(2))
                options["fletcher32"] = bool(rng.integers(2))
                options["maxshape"] = tuple([None, m][rng.integers(2)] for m in shape)
            name = "/".join([*["vars", "a", "b"][: rng.integers(4)], f"w{n}"])
            is_partial = "chunks" in options and bool(rng.integers(2))
            if array.dtype != bool:
                options["fillvalue"] = array.dtype.type(n)
            dataset = file.create_dataset(name, shape, array.dtype, **options)
            rows = slice(int(rng.integers(shape[0]))) if is_partial else ...
            if array.size:
                dataset[rows] = array[rows]
            dataset.attrs["note"] = [1.5, "text", n][n % 3]
            arrays[name] = dataset[...]
    ds = xckpt.open(path, decode=False)
    assert {*ds.variables} == {*arrays}
    for name, expected in arrays.items():
        try:
            identical(ds.variables[name], expected)
        except xckpt.UnsupportedError as error:
            # Chunks in an extensible array, of which h5py reports wrong positions.
            assert error.rule == "Chunks" and libver != "earliest"  # noqa: PT017, PT018


# --- Orbax and tensorstore ------------------------------------------------------------------------

JAX_TYPES = ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "int32", "float8_e4m3fn"]


def random_tree(jax: Any, seed: int) -> Any:
    """Return a tree of dicts, lists and tuples with arrays of numpy and of one or four devices."""
    rng = np.random.default_rng(seed)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))

    def leaf() -> Any:
        shape = tuple(int(n) for n in 4 * rng.integers(1, 9, size=rng.integers(0, 4)))
        array = jax.numpy.asarray(rng.normal(size=shape) * 9).astype(str(rng.choice(JAX_TYPES)))
        axes = [[None, "x", "y"][n] for n in rng.permutation(3)][: len(shape)]
        spec = jax.sharding.PartitionSpec(*axes)
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.device_put(array, sharding) if rng.integers(2) else np.asarray(array)

    def branch(levels: int) -> Any:
        if not levels or not rng.integers(4):
            return leaf()
        children = [branch(levels - 1) for _ in range(rng.integers(1, 4))]
        kind = rng.integers(4)
        if kind > 1:
            return {
                f"{'kbw'[n]}{'.x' if kind == 3 else ''}": child for n, child in enumerate(children)
            }
        return tuple(children) if kind else children

    return {"params": branch(3), "step": np.asarray(seed)}


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["zarr2", "zarr3"])
@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["folders", "ocdbt"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore")
def test_orbax_wrote_the_same_values(
    tmp_path: Path,
    seed: int,
    use_ocdbt: bool,
    use_zarr3: bool,
) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    jax = pytest.importorskip("jax")
    tree = random_tree(jax, seed)
    options = {"chunk_byte_size": 256 << (seed % 3)} if seed % 2 else {}
    save_args = jax.tree.map(lambda _: checkpoint.SaveArgs(**options), tree)
    handler = checkpoint.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    with checkpoint.Checkpointer(handler) as checkpointer:
        arguments = checkpoint.args.PyTreeSave(tree, save_args=save_args)
        checkpointer.save(tmp_path / "ckpt", args=arguments)
    ds = xckpt.open(tmp_path / "ckpt", decode=False)
    keys_and_values = jax.tree_util.tree_flatten_with_path(tree)[0]
    expected = {
        ".".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in keys): value
        for keys, value in keys_and_values
    }
    assert {*ds.variables} == {*expected}
    for name, values in expected.items():
        identical(ds.variables[name], values)


CODECS: dict[str, list[Any]] = {
    "zarr": [None, {"id": "zstd", "level": 1}, {"id": "gzip", "level": 1}, {"id": "zlib"}],
    "zarr3": [
        [{"name": "bytes", "configuration": {"endian": "big"}}],
        [{"name": "transpose", "configuration": {"order": [2, 1, 0]}}, {"name": "bytes"}],
        [{"name": "zstd", "configuration": {"level": 1}}],
        [{"name": "gzip", "configuration": {"level": 1}}],
        [
            {
                "name": "sharding_indexed",
                "configuration": {"chunk_shape": [1, 2, 1], "codecs": [{"name": "zstd"}]},
            }
        ],
    ],
}


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("seed", range(20))
def test_tensorstore_wrote_the_same_values(tmp_path: Path, seed: int, driver: str) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    rng = np.random.default_rng(seed)
    arrays = {}
    for n in range(8):
        shape, chunk = (2 * rng.integers(1, 9, size=3)).tolist(), [2, 4, 2]
        codec = CODECS[driver][rng.integers(len(CODECS[driver]))]
        dtype = str(rng.choice(["float32", "uint8", "int64", "complex64", "float64"]))
        metadata: dict[str, Any] = {"shape": shape, "fill_value": int(rng.integers(9))}
        if driver == "zarr":
            code = np.dtype(dtype).newbyteorder("<" if rng.integers(2) else ">").str
            metadata |= {"chunks": chunk, "dtype": code, "compressor": codec}
            metadata |= {"order": str(rng.choice(["C", "F"]))}
            metadata |= {"dimension_separator": str(rng.choice([".", "/"]))}
        else:
            grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
            metadata |= {"chunk_grid": grid, "data_type": dtype, "codecs": codec}
        if dtype == "complex64":
            metadata["fill_value"] = None if driver == "zarr" else [1.0, -1.0]
        kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/ckpt", "path": f"w{n}/"}
        spec = {"driver": driver, "kvstore": kvstore, "metadata": metadata, "create": True}
        array = tensorstore.open(spec).result()
        values = rng.integers(0, 99, size=shape).astype(dtype)
        rows = slice(int(rng.integers(shape[0] + 1)))
        array[rows] = values[rows]
        arrays[f"w{n}"] = array.read().result()
    ds = xckpt.open(tmp_path / "ckpt", decode=False)
    assert {*ds.variables} == {*arrays}
    for name, expected in arrays.items():
        identical(ds.variables[name], expected)


# --- DeepSpeed -----------------------------------------------------------------------------------


def train(rank: int, world: int, stage: int, folder: str, port: int) -> None:
    """Train a small model with DeepSpeed on one of the ranks, and save it."""
    deepspeed = pytest.importorskip("deepspeed")
    torch = pytest.importorskip("torch")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 5)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(5, 7))
    model[3].weight = model[0].weight
    model[2].weight.requires_grad = False
    model.register_buffer("table", torch.arange(6.0))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config |= {"zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 5)).pow(2).mean())
        engine.step()
    engine.save_checkpoint(folder)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_consolidates_the_same_values(stage: int, tmp_path: Path) -> None:
    zero = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    torch = pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (2, stage, str(tmp_path), port), nprocs=2)
    expected = zero.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    ds = xr.open_dataset(tmp_path)
    for name, tensor in expected.items():
        values = tensor if isinstance(tensor, torch.Tensor) else tensor.contiguous()
        assert ds[name].values.tobytes() == values.detach().numpy().tobytes()
    assert ds["optimizer.state.0.weight.exp_avg"].shape == (7, 5)
