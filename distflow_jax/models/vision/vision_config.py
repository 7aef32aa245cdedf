"""Configuration of a vision tower, common to all families."""

import dataclasses
from collections.abc import Mapping

from distflow_jax.parsing.checked_fields import COUNT, MOST_INTEGER, POSITIVE, SIZE, Kind, is_number
from distflow_jax.parsing.one_line import shown
from distflow_jax.parsing.setting_checks import Section, setting

VISION = "vision"  # of a tower's parameters in the tree of the model's


@dataclasses.dataclass(frozen=True)
class Traits:
    """The parts of a family's tower, which no file states.

    `projector` makes features of a square of patches: "linear" and "mlp" of their vectors side by
    side, "pooled" of their mean.
    """

    projector: str
    activation: str = "gelu_tanh"  # of the MLPs
    gated: bool = False  # MLPs as those of the decoder
    rms: bool = False  # RMS norms without a bias, in place of layer norms
    fused: bool = False  # files have query, key and value in one tensor
    rotary: bool = False  # rotary positions in two dimensions
    learned: bool = False  # a learned vector for each place of a square grid of patches
    patch_bias: bool = False
    final_norm: bool = False  # a norm after the last layer
    frames: int = 1  # of a patch's kernel; an image fills all of them


_SIGLIP = Traits("linear", learned=True, patch_bias=True, final_norm=True)
TRAITS: Mapping[str, Traits] = {
    # Zhai et al. 2023 (arxiv.org/abs/2303.15343); a new tower beside a text model
    "siglip": _SIGLIP,
    # Marafioti et al. 2025 (arxiv.org/abs/2504.05299), with Idefics3's tiles and pixel shuffle
    "smolvlm": _SIGLIP,
    # Bai et al. 2025 (arxiv.org/abs/2502.13923), sec. 2.1
    "qwen2_5_vl": Traits(
        "mlp", activation="silu", gated=True, rms=True, fused=True, rotary=True, frames=2
    ),
    # Bai et al. 2025 (arxiv.org/abs/2511.21631), sec. 2
    "qwen3_vl": Traits("mlp", fused=True, rotary=True, learned=True, patch_bias=True, frames=2),
    # Gemma Team 2025 (arxiv.org/abs/2503.19786), sec. 2.1
    "gemma3": dataclasses.replace(_SIGLIP, projector="pooled"),
}
_TOKEN = Kind(f"an integer from -1 to {MOST_INTEGER}", lambda v: v == -1 or SIZE.fits(v))
_COLOURS = Kind("three numbers", lambda v: len(v) == 3 and all(map(is_number, v)))
_SPREADS = Kind("three numbers, none of them 0", lambda v: _COLOURS.fits(v) and 0 not in v)
_SQUARE = ("siglip", "smolvlm", "gemma3")  # families whose pictures all have one size


@dataclasses.dataclass(frozen=True)
class VisionConfig(Section, name="vision "):
    """A vision transformer over packed patches, and the projector to the text model's width.

    Parameters stand under `vision` in the tree of the decoder; `layers` arrays are stacked. D is
    hidden_size, P patch_size, T the frames of a kernel, N num_heads, H head dim, F mlp_size, E the
    width of what the projector takes (merge^2 D, D if it is pooled), S deepstack layers, L layers:

        patch                    [T, P P 3, D]   (rows, columns, colours)
        patch_bias               [D]
        position                 [grid^2, D]
        layers/attention_norm    [L, D]
        layers/query, key, value [L, D, N, H]    (or fused: layers/qkv [L, D, 3, N, H])
        layers/output            [L, N, H, D]
        layers/mlp_norm          [L, D]
        layers/gate, up          [L, D, F]
        layers/down              [L, F, D]
        final_norm               [D]
        merger/norm              [D]
        merger/up                [E, E]
        merger/down              [E, width]
        deepstack/norm, up, down [S, E], [S, E, E], [S, E, width]

    Every product but the projector's and every layer norm has a bias, NAME_bias. TRAITS says which
    of the others a family has.
    """

    family: str = "siglip"  # one of TRAITS
    hidden_size: int = setting(192, COUNT)
    num_layers: int = setting(6, COUNT)
    num_heads: int = setting(4, COUNT)
    mlp_size: int = setting(768, COUNT)
    patch_size: int = setting(8, COUNT)  # pixels of a side
    merge: int = setting(2, COUNT)  # patches of a side that one feature stands for
    width: int = setting(256, COUNT)  # of features: hidden_size of the text model
    grid: int = setting(0, SIZE)  # patches of a side of the learned positions; 0: none
    window: int = setting(0, SIZE)  # patches of a side of the windows of attention; 0: none
    full_layers: tuple[int, ...] = ()  # layers without windows, from 0
    deepstack: tuple[int, ...] = ()  # layers after which features for the text model's first layers
    norm_eps: float = setting(1e-6, POSITIVE)
    rope_theta: float = setting(10_000.0, POSITIVE)
    # of videos, which are not read; not shown, since fingerprints are made of what is
    tokens_per_second: int = dataclasses.field(default=2, repr=False)
    frozen: bool = False  # no parameter of the tower is trained: training.freeze=vision
    alone: bool = False  # no parameter of the text model is trained: training.freeze=language
    # what an image is before it is cut
    mean: tuple[float, ...] = setting((0.5,) * 3, _COLOURS)  # of pixels from 0 to 1, by colour
    std: tuple[float, ...] = setting((0.5,) * 3, _SPREADS)
    least_pixels: int = setting(0, SIZE)  # smaller images are enlarged, where sizes are free
    most_pixels: int = setting(0, SIZE)  # larger images are shrunk, where sizes are free
    longest_edge: int = setting(0, SIZE)  # of a picture that is cut into tiles; 0: no tiles
    # ids around an image; -1: none
    image_token: int = setting(-1, _TOKEN)  # stands where features stand
    start_token: int = setting(-1, _TOKEN)
    end_token: int = setting(-1, _TOKEN)

    def __post_init__(self):
        if self.family not in TRAITS:
            known = ", ".join(TRAITS)
            raise ValueError(f"vision tower {shown(self.family)} is not supported, only {known}")
        super().__post_init__()
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"vision hidden_size {self.hidden_size} is not divisible by num_heads "
                f"{self.num_heads}"
            )
        if self.traits.rotary and self.head_dim % 4:
            raise ValueError(
                f"vision head dim must be a multiple of 4 for rotary positions in two dimensions: "
                f"{self.head_dim}"
            )
        if self.traits.learned != bool(self.grid):
            word = "needs" if self.traits.learned else "has no"
            raise ValueError(
                f"a {self.family} tower {word} learned positions, got vision grid={self.grid}"
            )
        if self.square and self.grid % self.merge:
            raise ValueError(
                f"vision merge {self.merge} does not divide the {self.grid} patches of a side"
            )
        if self.window and self.window % self.merge:
            raise ValueError(f"vision merge {self.merge} does not divide window {self.window}")
        for name in ("full_layers", "deepstack"):
            numbers = getattr(self, name)
            if list(numbers) != sorted({n for n in numbers if 0 <= n < self.num_layers}):
                raise ValueError(
                    f"vision {name} must be rising numbers below the {self.num_layers} layers, got "
                    f"{numbers}"
                )

    @property
    def traits(self) -> Traits:
        """The parts of this family's tower."""
        return TRAITS[self.family]

    @property
    def square(self) -> bool:
        """Whether every picture, or tile of one, has the one size of the learned positions."""
        return self.family in _SQUARE

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch: its rows of pixels, each three colours."""
        return self.patch_size**2 * 3

    @property
    def patches_per_feature(self) -> int:
        """Patches that one feature stands for, neighbours in a row of patches."""
        return self.merge**2

    @property
    def merged_size(self) -> int:
        """Width of what the projector takes."""
        pooled = self.traits.projector == "pooled"
        return self.hidden_size * (1 if pooled else self.patches_per_feature)

    @property
    def image_size(self) -> int:
        """Pixels of a side of a square picture; 0 where sizes are free."""
        return self.grid * self.patch_size if self.square else 0
