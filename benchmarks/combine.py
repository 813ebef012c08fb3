"""Combining checkpoints, beside the loop over state dicts in memory; each in its own process.

Three checkpoints of 1 GiB in float32, the time until the result is on the disk, and the peak of
resident memory (VmHWM). ``python -m benchmarks.combine 128`` takes checkpoints of 128 MiB.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import xckpt
from benchmarks.measuring import Result, in_fresh_process, table

MIB = 1 << 20
SHAPE = (2048, 2048)  # 16 MiB
RANK = 16
ROUNDS = 2
# What a user of xckpt writes. `ds` is the result.
OURS = {
    "mean of three": "ds = (a + b + c) / 3",
    "interpolation": "ds = 0.3 * a + 0.7 * b",
    "task vector": "ds = a.ckpt.merge(b - c, scale=0.5)",
    "SLERP": """
def slerp(a, b, t):
    norms = np.sqrt((a**2).sum() * (b**2).sum())
    cosine = ((a * b).sum() / norms.where(norms > 0)).fillna(1)
    is_arc = abs(cosine) < 0.9995
    angle = np.arccos(cosine.where(is_arc, 0))
    weights = [(np.sin(s * angle) / np.sin(angle)).where(is_arc, s) for s in (1 - t, t)]
    return weights[0] * a + weights[1] * b
ds = slerp(a, b, 0.3)
""",
    "merge of a LoRA": "ds = a.ckpt.merge('adapter')",
    "to bfloat16": "ds, options = a, {'dtype': 'bfloat16', 'cast': 'allow'}",
}
# The same for a name, with the state dicts `a`, `b`, `c`; `update` is that of the adapter.
THEIRS = {
    "mean of three": "(a[n] + b[n] + c[n]) / 3",
    "interpolation": "0.3 * a[n] + 0.7 * b[n]",
    "task vector": "a[n] + 0.5 * (b[n] - c[n])",
    "SLERP": "slerp(a[n], b[n], 0.3)",
    "merge of a LoRA": "a[n] + update(n) if n in adapted else a[n]",
    "to bfloat16": "to_bfloat16(a[n])",
}
MODELS = {"mean of three": "abc", "interpolation": "ab", "task vector": "abc", "SLERP": "ab"}
LOOP = """
from safetensors.LIBRARY import load_file, save_file
def update(name):
    a, b = (lora[adapted[name] + side + ".weight"] for side in "AB")
    return 2 * (b @ a)
def slerp(a, b, t):
    angle = xp.arccos((a * b).sum() / xp.sqrt((a * a).sum() * (b * b).sum()))
    return (xp.sin((1 - t) * angle) * a + xp.sin(t * angle) * b) / xp.sin(angle)
start = time.perf_counter()
models = [load_file(f"{model}.safetensors") for model in MODELS]
a, b, c = (models * 3)[:3]
lora = load_file("adapter/adapter_model.safetensors")
modules = {n: f"base_model.model.{n.removesuffix('weight')}lora_" for n in a}
adapted = {n: module for n, module in modules.items() if f"{module}A.weight" in lora}
save_file({n: RESULT for n in a}, "theirs.safetensors")
with open("theirs.safetensors", "rb+") as file:
    os.fsync(file.fileno())
"""
BFLOAT16 = {
    "numpy": "import ml_dtypes, numpy as xp; to_bfloat16 = lambda a: a.astype(ml_dtypes.bfloat16)",
    "torch": "import torch as xp; to_bfloat16 = lambda a: a.to(xp.bfloat16)",
}


def write(folder: Path, nbytes: int) -> None:
    """Write three models, and an adapter of half of the tensors."""
    rng = np.random.default_rng(0)
    names = [
        f"model.layers.{number // 2}.self_attn.{'qv'[number % 2]}_proj.weight"
        for number in range(max(2, nbytes // (4 * SHAPE[0] * SHAPE[1])))
    ]
    for model in "abc":
        tensors = {name: rng.standard_normal(SHAPE, dtype=np.float32) for name in names}
        xckpt.save(tensors, folder / f"{model}.safetensors", progress=False)
    factors = {}
    for name in names[::2]:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for side, shape in (("A", (RANK, SHAPE[1])), ("B", (SHAPE[0], RANK))):
            factors[f"{module}.lora_{side}.weight"] = rng.standard_normal(shape, dtype=np.float32)
    (folder / "adapter").mkdir()
    xckpt.save(factors, folder / "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
    (folder / "adapter/adapter_config.json").write_text(json.dumps(config), "utf-8")


def ours(what: str) -> str:
    """Return the program that uses xckpt."""
    return f"""
import numpy as np, xckpt
xckpt.save(xckpt.open({{"w": np.ones(2, "f4")}}) * 2, "warm.safetensors", overwrite=True)
start, options = time.perf_counter(), {{}}
a, b, c = (xckpt.open(f"{{model}}.safetensors") for model in "abc")
{OURS[what]}
ds.ckpt.save("ours.safetensors", overwrite=True, progress=False, **options)
"""


def theirs(what: str, library: str) -> str:
    """Return the program that has whole state dicts in memory."""
    loop = LOOP.replace("LIBRARY", library).replace("RESULT", THEIRS[what])
    return f"{BFLOAT16[library]}\n{loop.replace('MODELS', repr(MODELS.get(what, 'a')))}"


def measure(folder: str, program: str) -> dict[str, float]:
    """Return the time and the peak of memory of a program in a new process."""
    return in_fresh_process(f"""
import os, time
os.chdir({folder!r})
{program}
print(json.dumps({{"seconds": time.perf_counter() - start, "peak": peak()["resident"]}}))
""")


def run(nbytes: int = 1 << 30) -> list[Result]:
    """Measure."""
    library = "torch" if find_spec("torch") else "numpy"
    results = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), nbytes)
        for what in OURS:
            programs = ours(what), theirs(what, library)
            # In turns, so that a busy disk or machine slows down both.
            rounds = [[measure(folder, program) for program in programs] for _ in range(ROUNDS)]
            seconds = [min(m["seconds"] for m in column) for column in zip(*rounds, strict=True)]
            peaks = [max(m["peak"] for m in column) for column in zip(*rounds, strict=True)]
            context = f"{library} with state dicts in memory, {seconds[1]:.1f} s"
            results.append(Result(what, seconds[0] / seconds[1], "x", context, 1.5))
            context = f"{peaks[1] / MIB:,.0f} MiB"
            results.append(Result(f"{what}, peak memory", peaks[0] / MIB, "MiB", context))
    return results


if __name__ == "__main__":
    print(table(run(int(sys.argv[1]) * MIB if len(sys.argv) > 1 else 1 << 30)))
