"""Naming conventions: one tensor under the names of several projects.

Names from Hugging Face, GGUF, Burn, gpt.rs and wrappers of modules are brought to a common
spelling. Two tensors match if their spellings are equal and no other tensor on either side is
spelled so. The spellings of GGUF come from the package `gguf`, and are skipped if it is not
installed.

===========  =======================================================================================
rule         spelling
===========  =======================================================================================
``burn``     ``norm.gamma`` and ``norm.beta`` are ``norm.weight`` and ``norm.bias``
``prefix``   without the prefixes that wrappers add: ``module.``, ``_orig_mod.``, ``model.``, ...
``gptrs``    ``blocks.0.attention.w_out`` is ``h.0.attn.c_proj.weight`` in GPT-2, and
             ``layers.0.self_attn.o_proj.weight`` in other models
``gguf``     ``model.layers.0.self_attn.q_proj.weight`` is ``blk.0.attn_q.weight``, and so on, in
             the architecture that makes most names equal
===========  =======================================================================================
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown, warn
from xckpt.structure.numbering import parse_name, split_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    Spell = Callable[[str], str | None]

# --- equal tensors -------------------------------------------------------------------------------

_WRAPPERS = re.compile(r"^((module|_orig_mod|base_model|model|transformer)\.)+(?=.)")
_LEAVES = {"gamma": "weight", "beta": "bias"}

# Names in gpt.rs: whole, or after "blocks.N."; for GPT-2, and for models like Llama.
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

# No architecture has as many forms of names; a hostile file can have millions.
_MAX_FORMS = 2000


def match_names(ours: Iterable[str], theirs: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield pairs of names that mean the same tensor, with the rule that makes them equal."""
    our_names, their_names = dict.fromkeys(ours), dict.fromkeys(theirs)
    for rule, spell in _spellings(our_names, their_names):
        partners = _unique_spellings(their_names, spell)
        for spelling, name in _unique_spellings(our_names, spell).items():
            partner = partners.get(spelling)
            if partner is not None:
                del our_names[name], their_names[partner]
                yield name, partner, rule


def _unique_spellings(names: Iterable[str], spell: Spell) -> dict[str, str]:
    """Return the names whose spelling no other name has, by that spelling."""
    names_by_spelling = defaultdict(list)
    for name in names:
        spelling = spell(name)
        if spelling is not None:
            names_by_spelling[spelling].append(name)
    return {spelling: names[0] for spelling, names in names_by_spelling.items() if len(names) == 1}


def _spellings(ours: Collection[str], theirs: Collection[str]) -> Iterator[tuple[str, Spell]]:
    """Yield rules with their spellings; names are removed from both sides as they match."""
    yield "burn", _spell_leaf
    yield "prefix", _unwrap
    yield "gptrs", lambda name: _spell_gptrs(name, "h", _GPT2)
    yield "gptrs", lambda name: _spell_gptrs(name, "layers", _LLAMA)
    # Finding the architecture takes time: only if there are names that no other rule matched.
    architecture = _best_architecture(ours, theirs) if ours and theirs else None
    if architecture is None:
        return

    def spell_gguf(name: str) -> str | None:
        form, index = _split_index(name)
        spelling = _gguf_name(form, architecture)
        if spelling is None or index is None:
            return spelling
        return spelling.replace(".0.", f".{index}.", 1)

    yield "gguf", spell_gguf


def _spell_leaf(name: str) -> str:
    module, separator, leaf = split_leaf(name)
    return module + separator + _LEAVES.get(leaf, leaf)


def _unwrap(name: str) -> str:
    return _WRAPPERS.sub("", _spell_leaf(name))


def _spell_gptrs(name: str, blocks: str, table: dict[str, str]) -> str:
    name = _unwrap(name)
    match = _BLOCK.fullmatch(name)
    if match is None:
        return table.get(name, name)
    number, inner = match.groups()
    return f"{blocks}.{number}.{table.get(inner, inner)}"


def _split_index(name: str) -> tuple[str, str | None]:
    """Return a name with 0 for its first index, and that index."""
    parsed = parse_name(name)
    if not parsed.indices:
        return name, None
    pieces = parsed.pieces
    pieces[parsed.template.index(None)] = "0"
    return "".join(pieces), parsed.indices[0]


@lru_cache(maxsize=1 << 16)
def _gguf_name(form: str, architecture: Any) -> str | None:
    """Return the name in GGUF of a tensor of layer 0, or None if GGUF has no such tensor."""
    names = _gguf_names(architecture)
    for spelling, module, ending in _spellings_of(form):
        if spelling in names:
            return names[spelling]
        if ending and module in names:
            return names[module] + ending
    return None


@lru_cache(maxsize=1 << 16)
def _spellings_of(form: str) -> list[tuple[str, str, str]]:
    """Return the spellings of a name, each with its module and the ending of a weight or bias."""
    unwrapped = _unwrap(form)
    spellings = [
        _spell_leaf(form),
        unwrapped,
        f"model.{unwrapped}",
        f"transformer.{unwrapped}",
        _spell_gptrs(form, "h", _GPT2),
        f"model.{_spell_gptrs(form, 'layers', _LLAMA)}",
    ]
    pieces = [split_leaf(spelling) for spelling in spellings]
    endings = [dot + leaf if leaf in {"weight", "bias"} else "" for _, dot, leaf in pieces]
    modules = [module for module, *_ in pieces]
    return list(zip(spellings, modules, endings, strict=True))


@lru_cache(maxsize=256)
def _gguf_names(architecture: Any) -> dict[str, str]:
    """Return the names in GGUF of modules and tensors of layer 0, by their other names."""
    from gguf import get_tensor_name_map

    mapping = get_tensor_name_map(architecture, 1).mapping
    return {name: gguf_name for name, (_, gguf_name) in mapping.items()}


def _best_architecture(ours: Iterable[str], theirs: Iterable[str]) -> Any:
    """Return the architecture that makes most names equal; None without the package `gguf`."""
    try:
        from gguf import MODEL_ARCH
    except ImportError:
        example = next((name for name in (*ours, *theirs) if name.startswith("blk.")), None)
        if example is not None:
            text = f"names such as {shown(example)} are from GGUF: pip install gguf to match them"
            warn(text)
        return None
    our_forms = {_split_index(name)[0] for name in ours}
    their_forms = {_split_index(name)[0] for name in theirs}
    if max(len(our_forms), len(their_forms)) > _MAX_FORMS:
        return None

    def score(architecture: Any) -> int:
        our_names = {_gguf_name(form, architecture) for form in our_forms} - {None}
        return len(our_names.intersection(_gguf_name(form, architecture) for form in their_forms))

    # ARCTIC is left out: gguf changes the maps of all architectures when it makes this one.
    scores = {arch: score(arch) for arch in MODEL_ARCH if arch.name != "ARCTIC"}
    best = max(scores, key=lambda architecture: scores[architecture])
    return best if scores[best] else None
