"""Configuration of a vision tower, common to all families."""

import dataclasses
from collections.abc import Mapping

from distflow_jax.parsing.checked_fields import MOST_INTEGER, is_number
from distflow_jax.parsing.one_line import shown

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
_SQUARE = ("siglip", "smolvlm", "gemma3")  # families whose pictures all have one size


@dataclasses.dataclass(frozen=True)
class VisionConfig:
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
    hidden_size: int = 192
    num_layers: int = 6
    num_heads: int = 4
    mlp_size: int = 768
    patch_size: int = 8  # pixels of a side
    merge: int = 2  # patches of a side that one feature stands for
    width: int = 256  # of features: hidden_size of the text model
    grid: int = 0  # patches of a side of the learned positions; 0: none
    window: int = 0  # patches of a side of the windows of attention; 0: none
    full_layers: tuple[int, ...] = ()  # layers without windows, from 0
    deepstack: tuple[int, ...] = ()  # layers after which features for the text model's first layers
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    frozen: bool = False  # no parameter of the tower is trained: training.freeze=vision
    alone: bool = False  # no parameter of the text model is trained: training.freeze=language
    # what an image is before it is cut
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of pixels from 0 to 1, by colour
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    least_pixels: int = 0  # smaller images are enlarged, where sizes are free
    most_pixels: int = 0  # larger images are shrunk, where sizes are free
    longest_edge: int = 0  # of a picture that is cut into tiles; 0: no tiles
    # ids around an image; -1: none
    image_token: int = -1  # stands where features stand
    start_token: int = -1
    end_token: int = -1

    def __post_init__(self):
        if self.family not in TRAITS:
            known = ", ".join(TRAITS)
            raise ValueError(f"vision tower {shown(self.family)} is not supported, only {known}")
        self._check_numbers()
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

    def _check_numbers(self) -> None:
        may_be_none = ("grid", "window", "least_pixels", "most_pixels", "longest_edge")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in may_be_none else 1
            least = -1 if field.name.endswith("_token") else least
            if field.type in ("int", int):
                if not isinstance(value, int) or not least <= value <= MOST_INTEGER:
                    raise ValueError(
                        f"vision {field.name} must be a whole number from {least}, got "
                        f"{shown(value)}"
                    )
            elif field.type in ("float", float) and not (is_number(value) and value > 0):
                raise ValueError(
                    f"vision {field.name} must be positive and finite, got {shown(value)}"
                )
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(is_number(x) for x in values) or 0 in self.std:
                raise ValueError(f"vision {name} must be three numbers, std not 0, got {values}")

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
