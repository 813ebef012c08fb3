"""Single files of Stable Diffusion have the places of the models that they are converted to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.structure import named_models as named
from tests.structure.libraries import CASES
from tests.structure.named_models import shapes_of
from xckpt.structure.families import family_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

RESIDUAL = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
# Names in diffusers with one resnet in each block, and their names in single files.
UNET = (
    (r"conv_in", "input_blocks.0.0"),
    (r"conv_norm_out", "out.0"),
    (r"conv_out", "out.2"),
    (r"time_embedding\.linear_1", "time_embed.0"),
    (r"time_embedding\.linear_2", "time_embed.2"),
    (r"add_embedding\.linear_1", "label_emb.0.0"),
    (r"add_embedding\.linear_2", "label_emb.0.2"),
    (r"down_blocks\.0\.resnets\.0", "input_blocks.1.0"),
    (r"down_blocks\.0\.attentions\.0", "input_blocks.1.1"),
    (r"down_blocks\.0\.downsamplers\.0\.conv", "input_blocks.2.0.op"),
    (r"down_blocks\.1\.resnets\.0", "input_blocks.3.0"),
    (r"mid_block\.resnets\.0", "middle_block.0"),
    (r"mid_block\.attentions\.0", "middle_block.1"),
    (r"mid_block\.resnets\.1", "middle_block.2"),
    (r"up_blocks\.0\.resnets\.0", "output_blocks.0.0"),
    (r"up_blocks\.0\.resnets\.1", "output_blocks.1.0"),
    (r"up_blocks\.0\.upsamplers\.0\.conv", "output_blocks.1.1.conv"),
    (r"up_blocks\.1\.resnets\.0", "output_blocks.2.0"),
    (r"up_blocks\.1\.attentions\.0", "output_blocks.2.1"),
    (r"up_blocks\.1\.resnets\.1", "output_blocks.3.0"),
    (r"up_blocks\.1\.attentions\.1", "output_blocks.3.1"),
)
VAE = (
    (r"(encoder|decoder)\.conv_norm_out", r"\1.norm_out"),
    (r"(encoder|decoder)\.mid_block\.resnets\.0", r"\1.mid.block_1"),
    (r"(encoder|decoder)\.mid_block\.resnets\.1", r"\1.mid.block_2"),
    (r"(encoder|decoder)\.mid_block\.attentions\.0\.group_norm", r"\1.mid.attn_1.norm"),
    (r"(encoder|decoder)\.mid_block\.attentions\.0\.to_([qkv])", r"\1.mid.attn_1.\2"),
    (r"(encoder|decoder)\.mid_block\.attentions\.0\.to_out\.0", r"\1.mid.attn_1.proj_out"),
    (r"encoder\.down_blocks\.(\d)\.resnets", r"encoder.down.\1.block"),
    (r"encoder\.down_blocks\.(\d)\.downsamplers\.0", r"encoder.down.\1.downsample"),
    (r"decoder\.up_blocks\.0\.resnets", "decoder.up.1.block"),
    (r"decoder\.up_blocks\.1\.resnets", "decoder.up.0.block"),
    (r"decoder\.up_blocks\.0\.upsamplers\.0", "decoder.up.1.upsample"),
    (r"conv_shortcut", "nin_shortcut"),
)


def renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    """Return the name of a tensor of diffusers in a single file."""
    for pattern, replacement in rules:
        name = re.sub(rf"(?:^|(?<=\.)){pattern}(?=\.)", replacement, name, count=1)
    if re.match(r"(input|output|middle)_block", name) and "transformer_blocks" not in name:
        module, _, leaf = name.rpartition(".")
        front, _, last = module.rpartition(".")
        name = f"{front}.{RESIDUAL.get(last, last)}.{leaf}"
    return name


@pytest.mark.parametrize(
    ("case", "prefix", "rules", "converter"),
    [
        ("unet", "model.diffusion_model.", UNET, "convert_ldm_unet_checkpoint"),
        ("vae", "first_stage_model.", VAE, "convert_ldm_vae_checkpoint"),
    ],
)
def test_places_are_those_after_a_conversion(
    case: str, prefix: str, rules: Any, converter: str
) -> None:
    single_files = pytest.importorskip("diffusers.loaders.single_file_utils")
    with torch.device("meta"):
        model = CASES[case].build()
        state = model.state_dict()
        stored = {prefix + renamed(name, rules): tensor for name, tensor in state.items()}
        for name, tensor in stored.items():
            if ".attn_1." in name and tensor.ndim == 2:
                stored[name] = tensor[:, :, None, None]
        converted = getattr(single_files, converter)(dict(stored), dict(model.config))
    assert set(converted) == set(state)
    by_single_file = family_of({name: tuple(tensor.shape) for name, tensor in stored.items()})
    by_library = family_of({name: tuple(tensor.shape) for name, tensor in state.items()})
    assert by_single_file is not None
    assert by_library is not None
    for name in state:
        first = by_library.describe(name)
        second = by_single_file.describe(prefix + renamed(name, rules))
        assert first is not None
        assert second is not None
        assert (first.slot, first.param) == (second.slot, second.param)


# Slots of fused projections in single files, and of their parts in diffusers.
FUSED = {"qkv": ("query", "key", "value"), "qkv_ffn": ("query", "key", "value", "up")}


@pytest.mark.parametrize(
    ("case", "names", "converter"),
    [
        ("flux", named.FLUX, "convert_flux_transformer_checkpoint_to_diffusers"),
        ("sd3", named.STABLE_DIFFUSION_3, "convert_sd3_transformer_checkpoint_to_diffusers"),
    ],
)
def test_transformers_have_the_slots_of_their_parts(case: str, names: str, converter: str) -> None:
    single_files = pytest.importorskip("diffusers.loaders.single_file_utils")
    shapes = shapes_of(names)
    with torch.device("meta"):
        expected = {name: t.shape for name, t in CASES[case].build().state_dict().items()}
        # The converter of Flux expects the width of the published model.
        scale = 64 if case == "flux" else 1
        stored = {n: torch.empty([scale * extent for extent in s]) for n, s in shapes.items()}
        converted = getattr(single_files, converter)(stored)
    assert set(converted) == set(expected)
    by_single_file = family_of(shapes)
    by_library = family_of({name: tuple(shape) for name, shape in expected.items()})
    assert by_single_file is not None
    assert by_library is not None
    slots = set()
    for name in shapes:
        place = by_single_file.describe(name)
        assert place is not None, name
        front, _, last = place.slot.rpartition(".")
        slots |= {f"{front}.{part}" for part in FUSED[last]} if last in FUSED else {place.slot}
    places = [by_library.describe(name) for name in expected]
    # Of single blocks, the parts of the first projection belong to two modules.
    of_library = {
        place.slot.replace("single.attention", "single").replace("single.ffn", "single")
        for place in places
        if place is not None
    }
    of_single_file = {slot.replace("single.attention", "single") for slot in slots}
    assert of_single_file == of_library
