"""A decoder of texts with images between the tokens."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._model import DynamicImageTokens, ImageTokens, TransformerConfig
from transformer.config._parts import LayerKind
from transformer.nn._axes import Array, Bool, Coordinates, Float, Hidden, Int, Logits, PyTree, Tokens
from transformer.nn._blocks import Aux, kernel_init
from transformer.nn._caches import next_positions
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._stacks import Encoder, sum_aux
from transformer.nn.layers._layers import ACTIVATIONS, Linear
from transformer.nn.layers._norms import NORMS
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._dynamic_images import DynamicImageTower, ImagePatches, PatchMerger, TokenPlaces
from transformer.nn.models._vision import VisionEncoder


class ImageTower(VisionEncoder):
    """A VisionEncoder without pooling: it returns one vector per patch (Dosovitskiy et al. 2020, arXiv 2010.11929)."""

    def setup(self):
        self._setup_images()

    def features(self, images: Array, deterministic: bool = True) -> tuple[Hidden, Aux]:
        """Encode images (I, height, width, channels) as (I, T, D), learned tokens first; also return aux."""
        x, _, aux = self._run(images, deterministic)
        return x, aux


class ImageProjector(nn.Module):
    """Map patches of images (I, T, Di) to tokens (I, P, D): the mean of squares, `norm/`, `hidden/`, `projection/`."""

    parameter_axes = declare(
        dict.fromkeys(("projector/hidden/kernel", "projector/projection/kernel"), "_ -> embed")
        | dict.fromkeys(("projector/hidden/bias", "projector/projection/bias"), "embed")
    )

    config: TransformerConfig
    images: ImageTokens  # the config's input

    @nn.compact
    def __call__(self, x: Float[Array, "I T Di"]) -> Float[Array, "I P D"]:
        """Project (I, T, Di), without learned tokens, to (I, P, D)."""
        config, images = self.config, self.images
        types = (config.dtype, config.parameters.dtype)
        if images.pool > 1:
            (rows, columns), side = images.patches.grid, images.pool
            # (I, T, Di) -> (I, rows / s, s, columns / s, s, Di), then the mean of each square.
            x = x.reshape(x.shape[0], rows // side, side, columns // side, side, x.shape[-1])
            x = x.mean((2, 4)).reshape(x.shape[0], images.count, -1)
        if images.projector == "normalized":
            x = NORMS["zero_centered_rms_norm"](images.encoder.norm.epsilon, *types, name="norm")(x)
        width, init, use_bias = (config.d_model,), kernel_init(config), images.projector != "normalized"
        if images.projector == "mlp":
            # W_2 gelu(W_1 x + b_1) + b_2 (LLaVA 1.5, Liu et al. 2023, arXiv 2310.03744)
            x = ACTIVATIONS["gelu_erf"](Linear(width, 1, True, init, *types, name="hidden")(x))
        return Linear(width, 1, use_bias, init, *types, name="projection")(x)


class VisionLanguageModel(CausalLM):
    """A decoder that reads images between its tokens: an encoder of images, a projector and a CausalLM.

    These are LLaVA (Liu et al. 2023, arXiv 2310.03744), PaliGemma (Beyer et al. 2024, arXiv 2407.07726) and Gemma 3
    (arXiv 2503.19786). The config describes the decoder, and its `input` (`ImageTokens`) the images. Each image takes
    the place of `input.count` tokens with the id `input.token_id`.

    With `DynamicImageTokens`, images can have any size, and their number of tokens depends on it (Qwen2-VL, Wang et
    al. 2024, arXiv 2409.12191). They are then given as `ImagePatches`.

    Parameters in addition to those of a CausalLM: `image/` (an `ImageTower` or a `DynamicImageTower`), `projector/`,
    and with `input.unused_layers` also `image_unused/`: layers and a final norm that files contain but that no result
    needs.

    Raises:
        ConfigError: if the config's input is not images between tokens, or its token_id is None or not in the
            vocabulary.
    """

    def setup(self):
        super().setup()
        config, images = self.config, self.config.image_tokens or self.config.dynamic_images
        if images is None:
            raise ConfigError(
                "input is not images between tokens: a VisionLanguageModel needs input=ImageTokens(...). Set it."
            )
        if images.token_id is None:
            raise ConfigError(
                "input.token_id is not set: set it to the id of the image token, or train: training sets it from the "
                "tokenizer."
            )
        if images.token_id >= config.vocab_size:
            raise ConfigError(
                f"input.token_id ({images.token_id}) must be below vocab_size ({config.vocab_size}). Change one."
            )
        if isinstance(images, DynamicImageTokens):
            self.image = DynamicImageTower(config.image_encoder, images, self.execution)
            self.projector = PatchMerger(config, images)
            return
        self.image = ImageTower(config.image_encoder, self.execution)
        self.projector = ImageProjector(config, images)
        if images.unused_layers is not None:
            self.image_unused = Encoder(_unused(config), images.unused_layers, execution=self.execution)

    def __call__(
        self,
        tokens: Tokens,
        positions: Coordinates | None = None,
        mask: Mask | None = None,
        cache: PyTree | None = None,
        deterministic: bool = True,
        images: Float[Array, "B I ..."] | ImagePatches | None = None,
        prefix_lengths: Int[Array, " B"] | None = None,
    ) -> Logits | tuple[Logits, PyTree]:
        """Compute the logits of the next token at each position.

        Args:
            tokens: (B, T), token ids; each image of a row is `input.count` tokens with the id `input.token_id`.
            positions: (B, T); None: 0, 1, 2, ..., continued after the tokens in the cache. With `position.sections`,
                also (B, T, 3): time, row and column; None: those of the images (`TokenPlaces`).
            mask: restrictions in addition to the causal mask. Where tokens attend to later ones
                (`input.attention`), it must hide padding: `Mask.lengths(...)`.
            cache: a KV cache from `init_cache` or from the previous call.
            deterministic: False: training, with dropout (rng "dropout") and a capacity of experts, if any.
            images: (B, I, height, width, channels), floating-point, I images for each row in the order of their tokens;
                rows with fewer images have any values for the rest. For `DynamicImageTokens`: `ImagePatches`. None: no
                images.
            prefix_lengths: (B,), with attention="prefix": number of first tokens of this call that attend to one
                another; None: all tokens of a call with images, otherwise none.

        Returns:
            Logits (B, T, V), float32; with a cache, (logits, cache).

        Raises:
            ValueError: if ids are outside the vocabulary, tokens don't fit the cache, or a row does not have the tokens
                of its images (only for concrete values: under jit the result is NaN in the first two cases).
        """
        x, cache, _ = self.run_stacks(tokens, positions, mask, cache, deterministic, images, prefix_lengths)
        return self.head(x) if cache is None else (self.head(x), cache)

    def run_stacks(
        self,
        tokens: Tokens,
        positions: Coordinates | None = None,
        mask: Mask | None = None,
        cache: PyTree | None = None,
        deterministic: bool = True,
        images: Float[Array, "B I ..."] | ImagePatches | None = None,
        prefix_lengths: Int[Array, " B"] | None = None,
    ) -> tuple[Hidden, PyTree | None, Aux]:
        """Return hidden states (B, T, D), the cache, and aux, the layers' terms of the training loss.

        Raises:
            ValueError: as a call, or `prefix_lengths` for images of any size.
        """
        config, auxes = self.config.image_tokens, []
        if config is None:
            if prefix_lengths is not None:
                raise ValueError(
                    "prefix_lengths are for input.attention='prefix', but attention to images of any size is causal. "
                    "Leave them out."
                )
            return self._run_dynamic(tokens, positions, mask, cache, deterministic, images)
        x, is_image = self._embed(self.embedding, tokens), tokens == config.token_id
        if images is None and self.is_initializing():  # so that all parameters are created
            sizes = config.patches
            images = jnp.zeros((x.shape[0], 1, sizes.image_height, sizes.image_width, sizes.channels), x.dtype)
        if images is not None:
            features, aux = self._image_features(images, tokens.shape[0], deterministic)
            auxes.append(aux)
            _check_image_tokens(is_image, features.shape[1], config.count)
            # The n-th image token of a row is the n-th vector of its images: (B, I P, D) -> (B, T, D). Vectors of
            # images are not multiplied by sqrt(D) as token embeddings can be. Tokens before the first image would have
            # the index -1.
            places = jnp.clip(jnp.cumsum(is_image, axis=1) - 1, 0, features.shape[1] - 1)
            x = jnp.where(is_image[:, :, None], jnp.take_along_axis(features, places[:, :, None], axis=1), x)
        groups = self._groups(is_image, images is not None, prefix_lengths)
        if groups is not None:
            mask = Mask.groups(groups) & Mask.of(mask)
        x, cache, aux = self.decoder(x, positions=positions, mask=mask, cache=cache, deterministic=deterministic)
        return x, cache, sum_aux([*auxes, aux])

    def _run_dynamic(
        self,
        tokens: Tokens,
        positions: Coordinates | None,
        mask: Mask | None,
        cache: PyTree | None,
        deterministic: bool,
        images: Array | ImagePatches | None,
    ) -> tuple[Hidden, PyTree | None, Aux]:
        config, auxes = self.config.dynamic_images, []
        x, is_image = self._embed(self.embedding, tokens), tokens == config.token_id
        if images is None and self.is_initializing():  # so that all parameters are created
            # The smallest image: one token, that is, merge x merge patches
            sizes = (x.shape[0], 1, config.merge**2, config.patch_size**2 * config.channels)
            blank = ImagePatches(jnp.zeros(sizes, x.dtype), jnp.full((x.shape[0], 1, 2), config.merge))
            self.projector(self.image.features(blank, deterministic)[0])
        start = jnp.zeros((x.shape[0], 1), jnp.int32) if cache is None else next_positions(cache)[:, None]
        if images is None:
            if positions is None:
                positions = jnp.broadcast_to(start + jnp.arange(x.shape[1])[None], x.shape[:2])
        else:
            _check_patches(images, is_image, config)
            vectors, aux = self.image.features(images, deterministic)
            vectors = self.projector(vectors)
            # Aux is per image: the sum over the images of a row is that of the row.
            auxes.append(jax.tree.map(lambda one: one.reshape(x.shape[0], -1).sum(1), aux))
            places = TokenPlaces.of(is_image, jnp.asarray(images.grid), config.merge, vectors.shape[1])
            vectors = vectors.reshape(x.shape[0], -1, x.shape[2])  # (I, S, D) of all rows -> (B, I S, D)
            index = jnp.minimum(places.vector, vectors.shape[1] - 1)
            x = jnp.where(is_image[:, :, None], jnp.take_along_axis(vectors, index[:, :, None], axis=1), x)
            # (B, 1, 1) + (B, T, 3)
            positions = start[..., None] + places.coordinates if positions is None else positions
        x, cache, aux = self.decoder(x, positions=positions, mask=mask, cache=cache, deterministic=deterministic)
        return x, cache, sum_aux([*auxes, aux])

    def embed_images(self, images: Array | ImagePatches, deterministic: bool = True) -> Float[Array, "I P D"]:
        """Return what replaces the embeddings of the tokens of images (I, height, width, channels): (I, count, D).

        For `ImagePatches` with I images in all rows: (I, tokens of the longest image and padding, D).
        """
        if self.config.image_tokens is None:
            return self.projector(self.image.features(images, deterministic)[0])
        return self._image_features(images[:, None], images.shape[0], deterministic)[0]

    def _image_features(self, images: Array, rows: int, deterministic: bool) -> tuple[Float[Array, "B S D"], Aux]:
        if images.ndim != 5 or images.shape[0] != rows:
            raise ValueError(
                f"images must be (batch {rows}, images per row, height, width, channels), got shape {images.shape}. "
                f"For one image per row, pass images[:, None]."
            )
        config = self.config.image_tokens
        x, aux = self.image.features(images.reshape(-1, *images.shape[2:]), deterministic)
        # Creates the parameters of the unused layers, which files contain; their result is not used.
        if config.unused_layers is not None and self.is_initializing():
            self.image_unused(x, deterministic=deterministic)
        # The projector gets the patches without the learned tokens: (B I, T, Di) -> (B I, P, D) -> (B, I P, D).
        x = self.projector(x[:, config.patches.extra_tokens :])
        # Aux is per image: the sum over the images of a row is that of the row.
        aux = jax.tree.map(lambda one: one.reshape(rows, -1).sum(1), aux)
        return x.reshape(rows, -1, x.shape[-1]), aux

    def _groups(
        self, is_image: Bool[Array, "B T"], has_images: bool, prefix_lengths: Int[Array, " B"] | None
    ) -> Int[Array, "B T"] | None:
        """Return the groups of tokens that attend to one another (`Mask.groups`), or None if there are none."""
        attention = self.config.image_tokens.attention
        if prefix_lengths is not None and attention != "prefix":
            raise ValueError(
                f"prefix_lengths are for input.attention='prefix', but this model has {attention!r}. Leave them out."
            )
        if attention == "prefix" and prefix_lengths is not None:
            # Group 0 is the prefix. The other tokens have no group (-1), so the causal mask alone applies to them.
            return jnp.where(jnp.arange(is_image.shape[1])[None, :] < prefix_lengths[:, None], 0, -1)
        if not has_images or attention == "causal":
            return None
        if attention == "prefix":
            return jnp.zeros(is_image.shape, jnp.int32)  # all tokens of the call are one prefix
        # A group is a run of image tokens, as in the reference: images without a token between them are one group.
        # is_image 0 1 1 0 1 -> first 0 1 0 0 1 -> groups -1 0 0 -1 1
        first = is_image & ~jnp.pad(is_image, ((0, 0), (1, 0)))[:, :-1]
        return jnp.where(is_image, jnp.cumsum(first, axis=1) - 1, -1)


def _unused(config: TransformerConfig) -> TransformerConfig:
    """Return the config of the layers of the image encoder that are not computed, one by one, and of its final norm."""
    unused = config.image_tokens.unused_layers
    changes = {"stack.prefix": (LayerKind(),) * unused, "stack.final_norm": True, "embedding.norm": False}
    changes |= {"position": None, "input": None}
    return config.image_encoder.replace(num_layers=max(unused, 1), **changes)


def _check_patches(images: object, is_image: Bool[Array, "B T"], config: DynamicImageTokens) -> None:
    rows, width = is_image.shape[0], config.patch_size**2 * config.channels
    shape = images.values.shape if isinstance(images, ImagePatches) else ()
    if len(shape) != 4 or (shape[0], shape[3]) != (rows, width):
        got = f"values of shape {shape}" if isinstance(images, ImagePatches) else type(images).__name__
        raise ValueError(
            f"images must be ImagePatches with values (batch {rows}, images per row, patches, {width}), got {got}. "
            f"Create them with ImagePatches.of."
        )
    # Inside jit, values are unknown: only shapes are checked there.
    if isinstance(is_image, jax.core.Tracer) or isinstance(images.grid, jax.core.Tracer):
        return
    # (B, I, 2) -> tokens of each image (B, I) -> of each row (B,)
    counts = (images.grid // config.merge).prod(2).sum(1)
    for row, (found, wanted) in enumerate(zip(is_image.sum(1).tolist(), counts.tolist(), strict=True)):
        if found != wanted:
            raise ValueError(
                f"row {row} has {found} image tokens, but its images need {wanted}: one for each square of "
                f"{config.multiple} x {config.multiple} pixels. Put the tokens of each image into the text."
            )


def _check_image_tokens(is_image: Bool[Array, "B T"], vectors: int, each: int) -> None:
    if isinstance(is_image, jax.core.Tracer):
        return
    counts = is_image.sum(1)
    for row, count in enumerate(counts.tolist()):
        if count > vectors or count % each:
            raise ValueError(
                f"row {row} has {count} image tokens: expected a multiple of {each} of at most {vectors}, since "
                f"each of its {vectors // each} images takes {each}. Put the tokens of each image into the text."
            )
