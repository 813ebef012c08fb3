"""What projects call the same tensor: Hugging Face, GGUF, Burn, gpt.rs, and wrappers of modules.

Names are brought to a common spelling, and those that are then equal, and nowhere twice, belong
together. The spellings of GGUF are those of the package `gguf`, where it is installed.

===========  =======================================================================================
rule         spelling
===========  =======================================================================================
``burn``     ``norm.gamma`` and ``norm.beta`` are ``norm.weight`` and ``norm.bias``
``prefix``   names in front that wrappers add, ``module.``, ``_orig_mod.`` or ``model.``, are left
             out
``gptrs``    ``blocks.0.attention.w_out`` is ``h.0.attn.c_proj.weight`` (of GPT-2), or
             ``layers.0.self_attn.o_proj.weight`` (of others)
``gguf``     ``model.layers.0.self_attn.q_proj.weight`` is ``blk.0.attn_q.weight``, and so on, of
             the architecture that makes most names of both sides the same
===========  =======================================================================================

Codes of quantised weights, small integers and floats that mean nothing without their scales, are
known by what these are called.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown, warn
from xckpt.labels.numbering import numbered, split_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

__all__ = ["same_tensors", "scales_of_codes"]

_WRAPPERS = re.compile(r"^((module|_orig_mod|base_model|model|transformer)\.)+(?=.)")
_LEAVES = {"gamma": "weight", "beta": "bias"}

# Of gpt.rs: what follows "blocks.N." in GPT-2 and in models like Llama, and all other names.
_GPT2 = {
    "attention.w_qkv": "attn.c_attn.weight",
    "attention.b_qkv": "attn.c_attn.bias",
    "attention.w_out": "attn.c_proj.weight",
    "attention.b_out": "attn.c_proj.bias",
    "feed_forward.w_in": "mlp.c_fc.weight",
    "feed_forward.b_in": "mlp.c_fc.bias",
    "feed_forward.w_out": "mlp.c_proj.weight",
    "feed_forward.b_out": "mlp.c_proj.bias",
    "tok_embeddings.weight": "wte.weight",
    "pos_embeddings": "wpe.weight",
    "final_ln.weight": "ln_f.weight",
    "final_ln.bias": "ln_f.bias",
    "lm_head": "lm_head.weight",
}
_LLAMA = {
    "attention.w_q": "self_attn.q_proj.weight",
    "attention.w_k": "self_attn.k_proj.weight",
    "attention.w_v": "self_attn.v_proj.weight",
    "attention.w_qkv": "self_attn.qkv_proj.weight",
    "attention.w_out": "self_attn.o_proj.weight",
    "feed_forward.w_gate": "mlp.gate_proj.weight",
    "feed_forward.w_up": "mlp.up_proj.weight",
    "feed_forward.w_down": "mlp.down_proj.weight",
    "norm_1.weight": "input_layernorm.weight",
    "norm_2.weight": "post_attention_layernorm.weight",
    "tok_embeddings.weight": "embed_tokens.weight",
    "final_norm.weight": "norm.weight",
    "lm_head": "lm_head.weight",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")

# More kinds of names than any architecture has; those of a file that was made to take long.
_MOST_KINDS = 2000


def same_tensors(ours: Collection[str], theirs: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Find names of one tensor on both sides, and the rule that says so."""
    left, right = dict.fromkeys(ours), dict.fromkeys(theirs)
    for rule, spell in _spellings(left, right):
        first, second = _spelled(left, spell), _spelled(right, spell)
        for key, name in first.items():
            other = second.get(key)
            if name is not None and other is not None:
                del left[name], right[other]
                yield name, other, rule


def _spelled(names: Iterable[str], spell: Callable[[str], str | None]) -> dict[str, str | None]:
    """Return names by how they are spelled; None where several are spelled alike."""
    found: dict[str, str | None] = {}
    for name in names:
        key = spell(name)
        if key is not None:
            found[key] = None if key in found else name
    return found


def _spellings(
    ours: Collection[str], theirs: Collection[str]
) -> Iterator[tuple[str, Callable[[str], str | None]]]:
    yield "burn", _with_usual_leaf
    yield "prefix", _unwrapped
    yield "gptrs", lambda name: _of_gptrs(name, "h", _GPT2)
    yield "gptrs", lambda name: _of_gptrs(name, "layers", _LLAMA)
    # Names that are left by now; the map is made only if there are some.
    architecture = _architecture(ours, theirs) if ours and theirs else None
    if architecture is not None:
        yield "gguf", lambda name: _of_gguf(name, architecture)


def _with_usual_leaf(name: str) -> str:
    head, separator, leaf = split_leaf(name)
    return head + separator + _LEAVES.get(leaf, leaf)


def _unwrapped(name: str) -> str:
    return _WRAPPERS.sub("", _with_usual_leaf(name))


def _of_gptrs(name: str, blocks: str, table: dict[str, str]) -> str:
    name = _unwrapped(name)
    block = _BLOCK.fullmatch(name)
    if block is None:
        return table.get(name, name)
    return f"{blocks}.{block[1]}.{table.get(block[2], block[2])}"


# --- GGUF ----------------------------------------------------------------------------------------


def _of_gguf(name: str, architecture: Any) -> str | None:
    """Return the name in GGUF."""
    kind, number = _kind(name)
    found = _gguf_kind(kind, architecture)
    return found if found is None or number is None else found.replace(".0.", f".{number}.", 1)


def _kind(name: str) -> tuple[str, str | None]:
    """Return a name with 0 for the number of its layer, and the number."""
    found = numbered(name)
    if not found.indices:
        return name, None
    pieces = found.pieces
    pieces[found.template.index(None)] = "0"
    return "".join(pieces), found.indices[0]


@lru_cache(maxsize=1 << 16)
def _gguf_kind(kind: str, architecture: Any) -> str | None:
    bare = _unwrapped(kind)
    spellings = [_with_usual_leaf(kind), bare, f"model.{bare}", f"transformer.{bare}"]
    spellings += [_of_gptrs(kind, "h", _GPT2), f"model.{_of_gptrs(kind, 'layers', _LLAMA)}"]
    names = _gguf_names(architecture)
    for spelling in spellings:
        module, separator, leaf = split_leaf(spelling)
        if spelling in names:
            return names[spelling]
        if leaf in {"weight", "bias"} and module in names:
            return names[module] + separator + leaf
    return None


@lru_cache(maxsize=256)
def _gguf_names(architecture: Any) -> dict[str, str]:
    from gguf import get_tensor_name_map

    mapping = get_tensor_name_map(architecture, 1).mapping
    return {name: new for name, (_, new) in mapping.items()}


def _architecture(ours: Iterable[str], theirs: Iterable[str]) -> Any:
    """Find the architecture by whose map most names are the same; None without the package."""
    try:
        from gguf import MODEL_ARCH
    except ImportError:
        some = next((name for name in (*ours, *theirs) if name.startswith("blk.")), None)
        if some is not None:
            text = f"names like {shown(some)} are those of GGUF: pip install gguf to match them"
            warn(text)
        return None
    kinds = [Counter(_kind(name)[0] for name in names) for names in (ours, theirs)]
    if max(map(len, kinds)) > _MOST_KINDS:
        return None

    def score(architecture: Any) -> int:
        spelled = [{_gguf_kind(kind, architecture) for kind in each} - {None} for each in kinds]
        return len(spelled[0] & spelled[1])

    # To make the map of Arctic changes those of all that are made later.
    scores = {each: score(each) for each in MODEL_ARCH if each.name != "ARCTIC"}
    best = max(scores, key=lambda each: scores[each])
    return best if scores[best] else None


# --- quantised weights ---------------------------------------------------------------------------

# Element types that codes have, one by one or packed into words.
_CODES = re.compile(r"u?int(2|4|8|16|32)|float[468]_\w+")
# What the name of codes, or of zero points, may have where the name of their scales has not.
_ENDINGS = re.compile(r"(_packed|_blocks|_qdata|_zero_point|\._data|:data|:zero_points)$")
_SCALES = (
    *("_scale", "_scale_inv", "_scales", ".scale", "/scale", "._scale", ":scale", ":scales"),
    *(".absmax", "/absmax", "_absmax"),
)
# Scales of scales.
_GLOBAL_SCALES = ("_scale_2", "_global_scale", ":global")
# Of which a module has one, and what they scale then.
_SCALES_OF_A_MODULE = ("scales", "scale", "SCB", "scale_packed")
_SCALED = frozenset({"weight", "qweight", "qzeros", "kernel", "codes", "W_q"})


def scales_of_codes(dtypes: Mapping[str, str]) -> dict[str, str]:
    """Find the tensors that hold codes, because a tensor with their scales is next to them.

    Integers in the same module, such as shapes, zero points and indices of groups, say how the
    codes are to be read, and count as such.

    Parameters
    ----------
    dtypes : mapping of str to str
        The element type, as stored, of every tensor by its name.

    Returns
    -------
    dict of str to str
        The name of the scales, for each tensor of codes.

    Examples
    --------
    >>> scales_of_codes({"a.weight": "int8", "a.weight_scale": "float32", "a.bias": "float32"})
    {'a.weight': 'a.weight_scale'}
    """
    codes, companions = codes_and_companions(dtypes)
    return codes | companions


def codes_and_companions(dtypes: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the scales of codes, and those of the codes in the module of other integers."""
    codes = {}
    types = {dtype for dtype in set(dtypes.values()) if _CODES.fullmatch(dtype) is not None}
    for name, dtype in dtypes.items() if types else ():
        if dtype in types:
            scales = next((each for each in _candidates(name) if each in dtypes), None)
            if scales is not None:
                codes[name] = scales
    modules = {split_leaf(name)[0]: scales for name, scales in codes.items()}
    modules = {name: scales for name, scales in modules.items() if name} | codes
    companions = {}
    for name, dtype in dtypes.items() if codes else ():
        if dtype.lstrip("u").startswith("int") and name not in codes:
            # In the module of codes, or below them: ``weight.quant_state.bitsandbytes__nf4``.
            module = split_leaf(name)[0]
            scales = modules.get(module) or codes.get(split_leaf(module)[0])
            if scales is not None:
                companions[name] = scales
    return codes, companions


def _candidates(name: str) -> Iterator[str]:
    """Spell the names that the scales of a tensor would have."""
    stem = _ENDINGS.sub("", name)
    for ending in _SCALES:
        yield stem + ending
    if stem.endswith("_scale"):
        for ending in _GLOBAL_SCALES:
            yield stem.removesuffix("_scale") + ending
    module, separator, leaf = split_leaf(stem)
    if leaf in _SCALED:
        for scales in _SCALES_OF_A_MODULE:
            yield module + separator + scales
