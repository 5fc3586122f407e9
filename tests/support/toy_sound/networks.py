# SPDX-License-Identifier: Apache-2.0
"""The networks of the toy family with sound: a transformer of two streams, an upsampler of latents, a sound decoder."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.kernels.attention import attention as attend
from wanjax.layers.embeddings import sinusoidal_embedding
from wanjax.layers.linear import linear
from wanjax.layers.norms import layer_norm
from wanjax.layers.patch import depth_to_space, patch_grid, patchify, unpatchify
from wanjax.layers.stack import NO_BLOCK_CACHE, scan_blocks, scan_with_results, stack

PATCH = (1, 2, 2)


@dataclass(frozen=True)
class JointConfig:
    layers: int
    heads: int
    head_dim: int
    text_width: int
    channels: int
    audio_channels: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class UpsamplerConfig:
    channels: int


@dataclass(frozen=True)
class SoundConfig:
    channels: int
    samples: int  # per latent


class JointBlock(nnx.Module):
    """The tokens of a video and of its sound, which attend to each other, to the prompt and to a reference."""

    def __init__(self, config: JointConfig, attention: AttentionConfig, **kw):
        width, self.heads, self.attention, self.dtype = config.width, config.heads, attention, kw["dtype"]
        self.video_qkv = linear(width, 3 * width, ("embed", "heads"), **kw)
        self.audio_qkv = linear(width, 3 * width, ("embed", "heads"), **kw)
        self.text_kv = linear(width, 2 * width, ("embed", "heads"), **kw)
        self.video_out = linear(width, width, ("heads", "embed"), **kw)
        self.audio_out = linear(width, width, ("heads", "embed"), **kw)
        self.norm = layer_norm(width, 1e-6, affine=False, **kw)

    def _split(self, x, parts):
        return jnp.split(x.reshape(*x.shape[:2], self.heads, -1), parts, axis=-1)

    def reference(self, x, mask):
        """Run the block on a reference alone; return its tokens, and the keys and values that others read."""
        q, k, v = self._split(self.video_qkv(self.norm(x).astype(self.dtype)), 3)
        y = attend(q, k, v, key_mask=mask, implementation=self.attention)
        return x + self.video_out(y.reshape(x.shape)), (k, v)

    def __call__(self, streams, text, reference, mask):
        video, audio = streams["video"], streams["audio"]
        qkv = [
            self.video_qkv(self.norm(video).astype(self.dtype)),
            self.audio_qkv(self.norm(audio).astype(self.dtype)),
        ]
        q, *own_kv = self._split(jnp.concatenate(qkv, axis=1), 3)
        pairs = zip(reference, self._split(self.text_kv(text), 2), own_kv, strict=True)
        k, v = (jnp.concatenate(pair, axis=1) for pair in pairs)
        y = attend(q, k, v, key_mask=mask, implementation=self.attention).reshape(len(video), -1, video.shape[-1])
        y_video, y_audio = jnp.split(y, [video.shape[1]], axis=1)
        return {"video": video + self.video_out(y_video), "audio": audio + self.audio_out(y_audio)}


class JointTransformer(nnx.Module):
    """Predicts v of a video's latents [B T H W C] and of its sound's [B L C], after a pass over a reference."""

    def __init__(self, config: JointConfig, *, attention: AttentionConfig = AUTO, **kw):
        rngs, width, self.config, self.dtype = kw["rngs"], config.width, config, kw["dtype"]
        self.patch_embed = linear(4 * config.channels, width, (None, "embed"), **kw)
        self.audio_embed = linear(config.audio_channels, width, (None, "embed"), **kw)
        self.text_embed = linear(config.text_width, width, ("text", "embed"), **kw)
        self.time_embed = linear(8, width, (None, "embed"), **kw)
        self.blocks = stack(lambda rngs: JointBlock(config, attention, **kw | {"rngs": rngs}), config.layers, rngs)
        self.proj_out = linear(width, 4 * config.channels, ("embed", None), **kw)
        self.audio_out = linear(width, config.audio_channels, ("embed", None), **kw)

    def _tokens(self, x):
        """Return tokens, and which of them are real: on a mesh, zeros are padded at the end."""
        tokens = self.patch_embed(patchify(x.astype(self.dtype), PATCH))
        real = jnp.arange(tokens.shape[1]) < np.prod(patch_grid(x, PATCH))
        return tokens, jnp.broadcast_to(real, (len(x), len(real)))

    def reference(self, x):
        """Return the keys and values of a reference [B T H W C] in each layer, and which of them are real."""
        tokens, real = self._tokens(x)
        _, keys_and_values = scan_with_results(self.blocks, lambda block, x: block.reference(x, real), tokens)
        return keys_and_values, real

    def __call__(self, x, t, text, mask, reference, real, cache=NO_BLOCK_CACHE):
        time = self.time_embed(sinusoidal_embedding(t, 8).astype(self.dtype))[:, None]
        video, is_real = self._tokens(x["video"])
        audio = self.audio_embed(x["audio"].astype(self.dtype))
        streams = {"video": video + time, "audio": audio + time}
        keys = jnp.concatenate([real, mask, is_real, jnp.ones(audio.shape[:2], bool)], axis=1)
        for part in cache.parts(self.config.layers):
            streams = cache.before(part, streams)
            streams = scan_blocks(
                self.blocks, lambda block, x, reference: block(x, text, reference, keys), streams, reference, part=part
            )
        streams = cache.after(streams)
        patches = self.proj_out(streams["video"])
        return {
            "video": unpatchify(patches, patch_grid(x["video"], PATCH), PATCH),
            "audio": self.audio_out(streams["audio"]),
        }


class Upsampler(nnx.Module):
    """Latents of twice the height and width."""

    def __init__(self, config: UpsamplerConfig, **kw):
        self.up = linear(config.channels, 4 * config.channels, ("conv_in", "conv_out"), **kw)

    def __call__(self, x):
        return depth_to_space(self.up(x), 2)


class SoundDecoder(nnx.Module):
    """Samples of sound [B S] of its latents [B L C]."""

    def __init__(self, config: SoundConfig, **kw):
        self.out = linear(config.channels, config.samples, ("conv_in", "conv_out"), **kw)

    def __call__(self, x):
        return self.out(x).reshape(len(x), -1)
