"""Lists a vision tower's tensors by canonical name, with their shapes."""

from mmengine.models.vision.config import VisionConfig

Shapes = dict[str, tuple[int, ...]]
QKV = ("q", "k", "v")  # Names of the matrices if q, k and v are stored separately.


def vision_tensors(c: VisionConfig) -> Shapes:
    """Return canonical name -> shape for each tensor. Linear weights are [out, in]."""
    merged = c.hidden_size * c.merge_size**2
    time = (c.temporal_patch_size,) if c.patches_have_time else ()
    patch = (c.in_channels, *time, c.patch_size, c.patch_size)
    shapes: Shapes = {
        "visual.patch_embed.proj.weight": (c.hidden_size, *patch),
        "visual.patch_embed.proj.bias": (c.hidden_size,),
        "visual.pos_embed.weight": (c.num_positions, c.hidden_size),
    }
    block = (
        _affine("norm1", c.hidden_size)
        | _affine("norm2", c.hidden_size)
        | _affine("attn.proj", c.hidden_size, c.hidden_size)
        | _affine("mlp.linear_fc1", c.intermediate_size, c.hidden_size)
        | _affine("mlp.linear_fc2", c.hidden_size, c.intermediate_size)
    )
    if c.joined_qkv:
        block |= _affine("attn.qkv", 3 * c.hidden_size, c.hidden_size)
    else:
        for name in QKV:
            block |= _affine(f"attn.{name}", c.hidden_size, c.hidden_size)
    for i in range(c.depth):
        shapes |= {f"visual.blocks.{i}.{name}": shape for name, shape in block.items()}
    mergers = [("visual.merger", c.hidden_size)]
    mergers += [(f"visual.deepstack_merger_list.{i}", merged) for i in range(len(c.deepstack_layers))]
    for name, norm_size in mergers:
        shapes |= _affine(f"{name}.norm", norm_size)
        if c.linear_merger:
            shapes[f"{name}.linear.weight"] = (c.out_hidden_size, merged)
            continue
        shapes |= _affine(f"{name}.linear_fc1", merged, merged)
        shapes |= _affine(f"{name}.linear_fc2", c.out_hidden_size, merged)
    return shapes


def _affine(name: str, out: int, *inputs: int) -> Shapes:
    """Return the shapes of a weight and a bias, for a linear layer or (without `inputs`) a layer norm."""
    return {f"{name}.weight": (out, *inputs), f"{name}.bias": (out,)}
