"""Caches and weights of published configs are those that transformers allocates, to the byte."""

from __future__ import annotations

from typing import Any

import dask.array as da
import ml_dtypes
import pytest
import xarray as xr

import xckpt
from tests.cached_models import MODELS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

BATCH, FEW = 2, 64
DTYPES = {torch.bfloat16: ml_dtypes.bfloat16, torch.float32: "f4"}  # of some routers
# A pattern of layers is complete in so many of them.
MOST_LAYERS = {"Jamba v0.1": 8, "Gemma 3 1B": 26, "Granite 4.0 H Tiny": 40}


def few_layers(name: str) -> dict[str, Any]:
    """Return the config of a model with as many layers as its pattern needs."""
    config = dict(MODELS[name].config)
    if "layer_types" in config or "hybrid_override_pattern" in config:
        return config
    count = next(key for key in ("num_hidden_layers", "n_layer") if key in config)
    config[count] = min(config[count], MOST_LAYERS.get(name, 4))
    return config


def parts_of(cache: Any) -> list[Any]:
    """Return the tensors that a cache has allocated."""
    if isinstance(cache, list):  # RWKV
        return cache
    tensors = []
    for layer in cache.layers:
        for attribute in ("keys", "values", "conv_states", "recurrent_states"):
            value = getattr(layer, attribute, None)
            values = value.values() if isinstance(value, dict) else [value]
            tensors += [tensor for tensor in values if torch.is_tensor(tensor)]
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_and_the_weights_are_those_that_are_allocated(name: str) -> None:
    stated = few_layers(name)
    config = transformers.AutoConfig.for_model(**stated)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    window = stated.get("sliding_window") or stated.get("attention_chunk_size")
    context = window + 100 if window and window < 10_000 else FEW
    options = {}
    if window:  # other caches leave one token of a window out
        options["past_key_values"] = transformers.StaticCache(config, max_cache_len=context)
    ids = torch.zeros((BATCH, context), dtype=torch.long, device="meta")
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True, **options)
    caches = (out.get(key) for key in ("past_key_values", "cache_params", "state"))
    allocated = parts_of(next(cache for cache in caches if cache is not None))

    weights = dict(model.named_parameters())
    arrays = {
        key: (
            [f"{key}_{axis}" for axis in range(weight.ndim)],
            da.zeros(tuple(weight.shape), dtype=DTYPES[weight.dtype], chunks=-1),
        )
        for key, weight in weights.items()
    }
    ds = xr.Dataset(arrays, attrs={"config": stated})
    footprint = xckpt.footprint(ds, context=context, batch=BATCH, cache_dtype="bfloat16")
    assert footprint.attrs.get("unknown") is None
    assert footprint["cache_nbytes"].sum() == sum(tensor.nbytes for tensor in allocated)
    assert footprint["parameters"] == sum(weight.numel() for weight in weights.values())
    assert footprint["weights_nbytes"] == sum(weight.nbytes for weight in weights.values())
