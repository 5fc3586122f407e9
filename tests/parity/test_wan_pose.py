# SPDX-License-Identifier: Apache-2.0
"""Wan Animate's transformer against that of diffusers: the motion encoder, the face encoder, an adapter, a step."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from tests.parity.pose_references import SIZES, pose_transformer
from tests.parity.references import channels_last, relative_l2, run, wan_transformer
from wanjax.layers.stack import block_at
from wanjax.models.wan.faces import same_frame_bias
from wanjax.models.wan.pose import WanPoseTransformer

FRAMES, HEIGHT, WIDTH, FACE_FRAMES = 3, 6, 10, 9  # of the pose clip's latents, and of the face
BOUND = 1e-5
RANDOM = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


FACE_SHAPE = (2, FACE_FRAMES, SIZES["motion_encoder_size"], SIZES["motion_encoder_size"], 3)
FACES = torch.randint(0, 256, FACE_SHAPE, generator=RANDOM, dtype=torch.uint8)
X, POSE = normal(2, 36, FRAMES + 1, HEIGHT, WIDTH), normal(2, 16, FRAMES, HEIGHT, WIDTH)
TEXT, IMAGE = normal(2, 512, SIZES["text_dim"]), normal(2, 17, SIZES["image_dim"])


@pytest.fixture(scope="module")
def reference() -> Any:
    return pose_transformer()


@pytest.fixture(scope="module")
def network(reference) -> Any:
    return wan_transformer(reference)


def float_pictures(faces: torch.Tensor) -> torch.Tensor:
    """Return pictures [B T H W 3] of 8 bits as inputs of diffusers' transformer."""
    return faces.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def from_torch(x: torch.Tensor) -> jnp.ndarray:
    return jnp.asarray(x.detach().numpy())


@torch.no_grad()
def test_motions_equal_those_of_diffusers(reference, network):
    faces = float_pictures(FACES)[0].transpose(0, 1)
    exact = reference.motion_encoder(faces)
    assert relative_l2(exact[0], exact[1]) > 0.1  # the motions depend on the picture
    result = run(network.motion_encoder, from_torch(faces.permute(0, 2, 3, 1)))
    assert relative_l2(result, exact) <= BOUND


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 5, FACE_FRAMES, 77])
def test_the_face_encoder_equals_that_of_diffusers(reference, network, frames):
    motions = normal(2, frames, SIZES["motion_encoder_dim"])
    exact = reference.face_encoder(motions)
    assert exact.shape[1] == (frames - 1) // 4 + 1
    assert relative_l2(run(network.face_encoder, from_torch(motions)), exact) <= BOUND


@torch.no_grad()
def test_the_face_adapters_equal_those_of_diffusers(reference, network):
    """Each token attends to the face of its frame; the face of the first frame is zeros."""
    width, tokens = 96, (FRAMES + 1) * HEIGHT * WIDTH // 4
    x, faces = normal(2, tokens, width), normal(2, FRAMES + 1, SIZES["face_encoder_num_heads"] + 1, width)
    faces[:, 0] = 0
    for index, adapter in enumerate(reference.face_adapter):
        exact = x + adapter(x, faces)

        @nnx.jit
        def adapt(adapters: Any, x: Any, faces: Any, index: int = index) -> Any:
            adapter = block_at(adapters, index)
            keys = adapter.context(faces.reshape(2, -1, width))
            bias = same_frame_bias(x.shape[1], HEIGHT * WIDTH // 4, keys.k.shape[1], faces.shape[2])
            return adapter(x, keys, bias)

        result = adapt(network.face_adapters, from_torch(x), from_torch(faces))
        assert relative_l2(result, exact) <= BOUND


@nnx.jit
def predict(network: WanPoseTransformer, x: Any, pose: Any, text: Any, image: Any, faces: Any) -> Any:
    context = network.context(text, image, network.face_tokens(network.motions(faces)))
    return network(x, jnp.full(len(x), 700.0), context, pose=pose)


@torch.no_grad()
def velocities(reference: Any, network: Any, **changes: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the velocity and that of diffusers."""
    inputs = {"x": X, "pose": POSE, "text": TEXT, "image": IMAGE, "faces": FACES} | changes
    exact = reference(
        hidden_states=inputs["x"], timestep=torch.full((2,), 700.0), encoder_hidden_states=inputs["text"],
        encoder_hidden_states_image=inputs["image"], pose_hidden_states=inputs["pose"],
        face_pixel_values=float_pictures(inputs["faces"]), return_dict=False,
    )[0]  # fmt: skip
    pose = torch.nn.functional.pad(inputs["pose"], (0, 0, 0, 0, 1, 0), value=7.0)  # the first frame is not used
    x, pose = (from_torch(y.permute(0, 2, 3, 4, 1)) for y in (inputs["x"], pose))
    result = predict(network, x, pose, *(from_torch(inputs[name]) for name in ("text", "image", "faces")))
    return np.asarray(result), channels_last(exact)


def test_a_step_equals_that_of_diffusers(reference, network):
    result, exact = velocities(reference, network)
    assert relative_l2(result, exact) <= BOUND
    for changes in ({"pose": POSE.flip(2)}, {"faces": FACES.flip(1)}, {"image": IMAGE.flip(0)}):
        changed, changed_exact = velocities(reference, network, **changes)
        assert relative_l2(changed_exact, exact) > 1e-2
        assert relative_l2(changed, changed_exact) <= BOUND
