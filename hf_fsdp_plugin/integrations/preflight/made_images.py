"""Made images for models that read text with images: pixels, and the tokens that stand for them in the text."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import nn

_TOKEN_NAMES: Final = ("image_token_id", "image_token_index")
_CHANNELS: Final = ("num_channels", "in_channels", "in_chans")
_MAX_PATCHES: Final = 2048
"""Maximum patches of an image: the attention of a vision tower grows with their square."""
_NOT_COUNTED: Final = -100
"""Label of a token that has no part in the loss."""


class NoImages(Exception):
    """There are no made images for a model. The message is the reason."""


class MadeImages:
    """One image for each sample of a model with a vision tower.

    Args:
        model: on a real device, not sharded; it runs its vision tower once to count the tokens of an image.

    Raises:
        NoImages: its inputs are not known here, or its vision tower refuses them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._config: Any = model.config
        self._accepted = set(inspect.signature(model.forward).parameters)
        self._vision: Any = getattr(self._config, "vision_config", None)
        tokens = [getattr(self._config, name, None) for name in _TOKEN_NAMES]
        self._token = next((token for token in tokens if isinstance(token, int)), None)
        reader: Any = getattr(model, "get_image_features", None)
        if self._vision is None or self._token is None or reader is None:
            raise NoImages("its config names no vision tower or no token for images")
        self._is_patched = "image_grid_thw" in self._accepted
        size = inspect.signature(reader).parameters.get("image_sizes")
        self._needs_size = size is not None and size.default is inspect.Parameter.empty
        try:
            self._num_tokens = self._count(reader)
        except NoImages:
            raise
        except Exception as error:  # whatever the code of the model raises
            raise NoImages(f"{type(error).__name__}: {error}") from error

    def add_to(self, sample: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return a sample of text with an image before it, and labels that do not count the image."""
        image = torch.full((self._num_tokens,), int(self._token or 0))
        found = {**sample, **self._pixels(generator)}
        found["input_ids"] = torch.cat([image, sample["input_ids"]])
        if "attention_mask" in sample:
            found["attention_mask"] = torch.ones_like(found["input_ids"])
        if "labels" in sample:
            found["labels"] = torch.cat([torch.full_like(image, _NOT_COUNTED), sample["labels"]])
        for name in {"mm_token_type_ids", "token_type_ids"} & self._accepted:
            found[name] = torch.eq(found["input_ids"], int(self._token or 0)).long()
        return found

    def _count(self, reader: Any) -> int:
        """Return the number of tokens of one image: what the vision tower returns for it."""
        sample = self._pixels(torch.Generator().manual_seed(0))
        inputs = sample if self._is_patched else {name: value[None] for name, value in sample.items()}
        with torch.no_grad():
            features = reader(**inputs)
        features = getattr(features, "pooler_output", features)
        parts = [features] if isinstance(features, torch.Tensor) else list(features)
        return sum(part.numel() // part.shape[-1] for part in parts)

    def _pixels(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        vision = self._vision
        channels = next((getattr(vision, name) for name in _CHANNELS if getattr(vision, name, None)), 3)
        if self._is_patched:
            side = 2 * int(getattr(vision, "spatial_merge_size", 1))
            size = channels * int(getattr(vision, "temporal_patch_size", 1)) * int(vision.patch_size) ** 2
            pixels = torch.randn(side * side, size, generator=generator)
            return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
        if "image_sizes" in self._accepted and hasattr(self._config, "image_grid_pinpoints"):
            raise NoImages("it cuts an image into a number of parts that depends on its size")
        height, width = _pair(getattr(vision, "image_size", None))
        patch = _pair(getattr(vision, "patch_size", None))
        if height * width > _MAX_PATCHES * patch[0] * patch[1]:
            raise NoImages(f"its images have {height}×{width} pixels, which takes too long on the CPU")
        pixels = torch.randn(channels, height, width, generator=generator)
        sizes = {"image_sizes": torch.tensor([height, width])} if self._needs_size else {}
        return {"pixel_values": pixels[None] if "pixel_attention_mask" in self._accepted else pixels, **sizes}


def _pair(size: Any) -> tuple[int, int]:
    if size is None:
        raise NoImages("its config does not set the size of images")
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def reads_images(model: nn.Module) -> bool:
    """Whether a model reads text together with images."""
    accepted = inspect.signature(model.forward).parameters
    is_both = {"input_ids", "pixel_values", "labels"} <= set(accepted)
    return is_both and getattr(getattr(model, "config", None), "vision_config", None) is not None
