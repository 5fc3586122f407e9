# SPDX-License-Identifier: Apache-2.0
"""Clips and masks that nodes compose, as inputs of a controlled video."""

import time
from typing import Any

import pytest

from tests.support.workflows import api_form, graph_of, request_of, template
from wanjax.workflows.evaluate import MediaSize
from wanjax.workflows.request import Missing, Workflow, read_workflow

FRAMES = 9
SIZE = MediaSize(100, 60, 20, 16.0)  # of all clips and pictures


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def compose_workflow(video: Any, mask: Any, *, is_measured: Any = False, **nodes: Any) -> Workflow:
    """Return the workflow of a controlled video of nine frames whose clip and mask are outputs of nodes."""
    workflow = api_form(graph_of(template("video_wan_vace_14B_t2v")))
    [control] = [each for each in workflow.values() if each["class_type"] == "WanVaceToVideo"]
    control["inputs"] |= {"length": FRAMES, "control_video": video, "control_masks": mask}
    workflow |= {
        "A": node("LoadImage", image="a.png"),
        "Z": node("LoadImage", image="z.png"),
        "C": node("VHS_LoadVideo", video="c.mp4"),
        "black": node("SolidMask", value=0, width=64, height=64),
        "white": node("SolidMask", value=1, width=64, height=64),
        "grey": node("EmptyImage", width=64, height=64, batch_size=1, color=0x808080),
        "7 grey": node("RepeatImageBatch", image=["grey", 0], amount=7),
        "9 white": node("RepeatImageBatch", image=["white", 0], amount=9),
        **nodes,
    }
    return read_workflow(graph_of(workflow), lambda file: SIZE if is_measured else None)


def input_files(workflow: Workflow) -> dict[str, str]:
    """Return the file names of inputs."""
    assert not any(isinstance(value, Missing) for value in workflow.inputs.values())
    return {name: value.name for name, value in workflow.inputs.items()}


def batch(*names: str) -> dict[str, Any]:
    return node("BatchImagesNode", **{f"images.image{number}": [name, 0] for number, name in enumerate(names)})


FIRST_AND_LAST = batch("A", "7 grey", "Z")
MASK = batch("black", "7 white", "black")
SEVEN_WHITE = {"7 white": node("RepeatImageBatch", image=["white", 0], amount=7)}


def test_a_first_and_a_last_picture_are_inputs():
    workflow = compose_workflow(["V", 0], ["M", 0], V=FIRST_AND_LAST, M=MASK, **SEVEN_WHITE)
    assert input_files(workflow) == {"image": "a.png", "last_image": "z.png"}
    assert not any("made anew" in note for note in workflow.notes)
    pairs = {
        "V": node("ImageBatch", image1=["P", 0], image2=["Z", 0]),
        "P": node("ImageBatch", image1=["A", 0], image2=["7 grey", 0]),
    }
    assert input_files(compose_workflow(["V", 0], ["M", 0], M=MASK, **pairs, **SEVEN_WHITE)) == {
        "image": "a.png",
        "last_image": "z.png",
    }


@pytest.mark.parametrize("mask", [["black", 0], ["M", 0]])
def test_frames_after_the_end_are_generated(mask):
    """ComfyUI continues a short clip with grey and a short mask with white."""
    nodes = {"M": batch("black", "7 white", "white"), **SEVEN_WHITE}
    for video in ("A", "V"):
        assert input_files(compose_workflow([video, 0], mask, V=batch("A", "7 grey"), **nodes)) == {"image": "a.png"}


def test_frames_of_another_colour_give_a_note():
    nodes = {"V": batch("A", "7 white", "Z"), "M": MASK, **SEVEN_WHITE}
    workflow = compose_workflow(["V", 0], ["M", 0], **nodes)
    assert input_files(workflow) == {"image": "a.png", "last_image": "z.png"}
    assert any(
        note.startswith("node white (SolidMask) sets the colour of the frames that the model replaces")
        for note in workflow.notes
    )


def test_a_fully_white_mask_is_dropped():
    assert input_files(compose_workflow(["C", 0], ["9 white", 0])) == {"video": "c.mp4"}
    inverted = {"I": node("InvertMask", mask=["black", 0])}
    assert input_files(
        compose_workflow(["C", 0], ["R", 0], R=node("RepeatImageBatch", image=["I", 0], amount=9), **inverted)
    ) == {"video": "c.mp4"}


def test_one_picture_is_the_mask_of_all_frames():
    nodes = {"T": node("ImageToMask", image=["A", 0], channel="red"), "M": node("MaskToImage", mask=["T", 0])}
    nodes |= {"R": node("RepeatImageBatch", image=["M", 0], amount=9), "K": node("ImageToMask", image=["R", 0])}
    assert input_files(compose_workflow(["C", 0], ["K", 0], **nodes)) == {"video": "c.mp4", "mask": "a.png"}


def widen_clip(source: str = "C", feathering: int = 0, amount: int = 9, **nodes: Any) -> Workflow:
    pad = node("ImagePadForOutpaint", image=[source, 0], left=10, top=0, right=20, bottom=6, feathering=feathering)
    nodes |= {"P": pad, "M": node("MaskToImage", mask=["P", 1])}
    nodes |= {"R": node("RepeatImageBatch", image=["M", 0], amount=amount), "K": node("ImageToMask", image=["R", 0])}
    nodes |= {"G": node("GetImageSize", image=["P", 0])}
    return compose_workflow(["P", 0], ["K", 0], is_measured=True, **nodes)


def test_margins_of_a_clip_become_the_outpaint_setting():
    workflow = widen_clip()
    assert (input_files(workflow), workflow.settings["outpaint"]) == ({"video": "c.mp4"}, "10,0,20,6")
    assert not any("fades" in note for note in workflow.notes)
    assert any("node P (ImagePadForOutpaint) fades the mask" in note for note in widen_clip(feathering=40).notes)


def test_margins_of_a_resized_clip_are_in_the_pixels_of_its_file():
    scaled = node("ImageScale", image=["C", 0], width=50, height=30)
    assert widen_clip("S", S=scaled).settings["outpaint"] == "20,0,40,12"
    cropped = widen_clip("S", S=node("ImageScale", image=["C", 0], width=50, height=50))
    assert "adds margins to a clip that was cropped or stretched before" in cropped.settings["outpaint"].sentence


def test_the_size_of_a_widened_clip_is_computed():
    nodes = api_form(graph_of(template("video_wan_vace_outpainting")))
    nodes["G"] = node("GetImageSize", image=["110", 0])
    nodes["49"]["inputs"] |= {"width": ["G", 0], "height": ["G", 1]}
    settings = read_workflow(graph_of(nodes), lambda file: SIZE).settings
    assert (settings["width"], settings["height"]) == (340, 380)
    assert "which is missing" in request_of(nodes).settings["width"].sentence


@pytest.mark.parametrize(
    ("video", "mask", "nodes"),
    [
        ("V", "M", {"V": batch("A", "C", "Z"), "M": MASK}),  # a clip is fixed
        (
            "V",
            "M",
            {"V": batch("A", "Z", "7 grey"), "M": batch("black", "black", "7 white")},
        ),  # the second frame is fixed
        ("V", "M", {"V": batch("7 grey", "A", "Z"), "M": batch("7 white", "white", "black")}),  # only the last one
        ("V", "black", {"V": batch("7 grey", "A", "Z")}),  # grey frames are fixed
        ("V", "M", {"V": FIRST_AND_LAST, "M": batch("half", "7 white", "half"), "half": node("SolidMask", value=0.5)}),
        ("V", "A", {"V": FIRST_AND_LAST}),
        ("V", "U", {"V": FIRST_AND_LAST, "U": node("SomethingNew")}),
        ("V", "M", {"V": FIRST_AND_LAST, "M": node("InvertMask", mask=["A", 0])}),
    ],
)
def test_unsupported_compositions_are_refused(video, mask, nodes):
    workflow = compose_workflow([video, 0], [mask, 0], **nodes, **SEVEN_WHITE)
    assert "composes a video when it runs" in workflow.inputs["video"].sentence


def test_a_continued_clip_is_refused():
    """wanjax cannot compose a mask that is black in some frames, so the user has to save both files."""
    nodes = {
        "start": node("ImageFromBatch", image=["C", 0], batch_index=11, length=5),
        "4 grey": node("RepeatImageBatch", image=["grey", 0], amount=4),
        "5 black": node("RepeatImageBatch", image=["black", 0], amount=5),
        "4 white": node("RepeatImageBatch", image=["white", 0], amount=4),
    }
    for first in (11, 0):
        nodes["start"]["inputs"]["batch_index"] = first
        inputs = compose_workflow(
            ["V", 0], ["M", 0], **nodes, V=batch("start", "4 grey"), M=batch("5 black", "4 white")
        ).inputs
        assert inputs["video"] == inputs["mask"]
        assert "with 5 frames of a longer clip" in inputs["video"].sentence
        assert "--video FILE and --mask FILE" in inputs["video"].sentence


def test_margins_whose_mask_ends_early_are_refused():
    """ComfyUI replaces the later frames completely."""
    assert "node P (ImagePadForOutpaint) composes a video" in widen_clip(amount=1).inputs["video"].sentence


def test_nested_batches_are_read_quickly():
    doubling = {f"D{k}": node("ImageBatch", image1=[f"D{k + 1}", 0], image2=[f"D{k + 1}", 0]) for k in range(30)}
    start = time.process_time()
    workflow = compose_workflow(
        ["D0", 0], ["9 white", 0], **doubling, D30=node("EmptyImage", width=8, height=8, color=0)
    )
    assert time.process_time() - start < 1
    assert input_files(workflow) == {}
    huge = node("RepeatImageBatch", image=["E", 0], amount=2**60)
    workflow = compose_workflow(["R", 0], ["9 white", 0], R=huge, E=node("ImageFromBatch", image=["grey", 0], length=0))
    assert input_files(workflow) == {}
    assert time.process_time() - start < 2
