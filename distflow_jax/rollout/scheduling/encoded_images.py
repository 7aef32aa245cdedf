"""Images of waiting prompts: encoded once per weight version, several prompts at a time."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.images.prompt_images import prompt_images
from distflow_jax.images.record import Image
from distflow_jax.images.turn_images import TurnImages, joined, of_prompt
from distflow_jax.rollout.cache_sizing import FEATURE_BATCHES
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.prefill.image_programs import PromptSight, joined_sight
from distflow_jax.rollout.requests import RolloutStats

_AHEAD = 64  # waiting prompts that are looked at

Key = tuple[bytes, ...]


class Seeing(Protocol):
    """Images that are encoded together: those of a prompt, or one of a response."""

    @property
    def images(self) -> tuple[Image, ...]:
        """The images, cut."""

    @property
    def patch(self) -> np.ndarray | None:
        """Which feature stands at each token, int32 [T]; None without images."""


class _Alone(NamedTuple):
    """One image of a response."""

    images: tuple[Image, ...]
    patch: np.ndarray  # int32 [features]

    @classmethod
    def of(cls, shown: TurnImages) -> "list[_Alone]":
        """Each image by itself."""
        both = zip(shown.images, shown.cut, strict=True)
        return [cls((image,), np.arange(cut.features, dtype=np.int32)) for image, cut in both]


class EncodedImages:
    """Features by the content of a prompt's images and their places; counts into `stats`."""

    def __init__(self, engine: RolloutEngine, params: Any, stats: RolloutStats):
        self._images, self._params, self._stats = engine.prompts.images, params, stats
        self._batches: list[dict[Key, PromptSight]] = []  # the last one used last

    def load(self, params: Any) -> None:
        """Swaps the weights; features of the old ones are dropped."""
        self._params, self._batches = params, []

    def clear(self) -> None:
        """Drops all features."""
        self._batches = []

    def of_sequence(
        self, prompt: Prompt, shown: TurnImages | None, ahead: Sequence[TurnImages | None]
    ) -> PromptSight | None:
        """The images of a prompt, and those `shown` in the response to it.

        `ahead`: of responses that are read soon; what of these fits is encoded with them.
        """
        (sight,) = self.of([prompt])
        if shown is None:
            return sight
        wanted = _Alone.of(shown)
        behind = [one for other in ahead if other is not None for one in _Alone.of(other)]
        found: list[PromptSight | None] = []
        while len(found) < len(wanted):
            rest = wanted[len(found) :]
            found += self.of([*rest, *behind[:_AHEAD]])[: len(rest)]
        parts = [one for one in (sight, *found) if one is not None]
        whole = joined(
            [
                (len(prompt.tokens), of_prompt(prompt.images, prompt.patch)),
                (len(shown.patch), shown),
            ]
        )
        return joined_sight(prompt_images(whole.images, whole.patch), parts)

    def of(self, prompts: Sequence[Seeing]) -> list[PromptSight | None]:
        """The images of the first prompt, and of those behind it that may share its row.

        Behind the first prompt the list ends before one whose images are not encoded yet. Raises
        ValueError for images in a prompt of a model without a tower.
        """
        if self._images is None:
            if any(prompt.images for prompt in prompts[:1]):
                raise ValueError(
                    "a prompt has images, and the model has no tower: use a vision model, or "
                    "config.model.vision"
                )
            return [None] * len(prompts)
        if _has_images(prompts[0]) and self._find(prompts[0]) is None:
            self._encode(prompts)
        found = []
        for prompt in prompts:
            sight = self._find(prompt) if _has_images(prompt) else None
            if sight is None and _has_images(prompt):
                break
            found.append(sight)
        return found

    def _encode(self, prompts: Sequence[Seeing]) -> None:
        """Encodes the images of the first prompt, and of those behind it that fit."""
        missing: dict[Key, Seeing] = {}
        for prompt in prompts[:_AHEAD]:
            if _has_images(prompt) and self._find(prompt) is None:
                missing.setdefault(_key(prompt), prompt)
        room, images = self._images.sizes.features, []
        for prompt in missing.values():
            images.append(prompt_images(prompt.images, prompt.patch))
            room -= images[-1].features
            if room <= 0:
                break
        sights = self._images.encode(self._params, images)
        self._stats.images += sum(sight.images.count for sight in sights)
        self._batches = self._batches[1 - FEATURE_BATCHES :]
        self._batches.append(dict(zip(missing, sights, strict=False)))

    def _find(self, prompt: Seeing) -> PromptSight | None:
        key = _key(prompt)
        for number, batch in enumerate(self._batches):
            if key in batch:
                self._batches.append(self._batches.pop(number))
                return batch[key]
        return None


def _has_images(prompt: Seeing) -> bool:
    return prompt.patch is not None and bool(prompt.images)


def _key(prompt: Seeing) -> Key:
    shapes = repr([image.patches.patches.shape for image in prompt.images]).encode()
    return (*(image.digest for image in prompt.images), prompt.patch.tobytes(), shapes)
