# SPDX-License-Identifier: Apache-2.0
"""Links through subgraphs, reroutes and bypassed nodes, and workflows that are damaged or hostile."""

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.workflows import api_form, graph_of, nodes_of, request_of, template
from wanjax.errors import WanjaxError
from wanjax.pipelines.guidance import ZeroStar, guidance_rule
from wanjax.workflows import arithmetic, composing_nodes, node_types
from wanjax.workflows.evaluate import MediaSize
from wanjax.workflows.graph import MAX_NODES, Output
from wanjax.workflows.node_functions import FUNCTIONS
from wanjax.workflows.request import Missing, Workflow, read_workflow

T2V = "text_to_video_wan"


def editor_node(number: int, kind: str, widgets: Any = (), inputs: Any = (), outputs: Any = (), **more: Any) -> dict:
    """Return a node of the editor: inputs and outputs as (name, type, link)."""
    return {
        "id": number,
        "type": kind,
        "mode": 0,
        "widgets_values": list(widgets),
        "inputs": [{"name": name, "type": kind, "link": link} for name, kind, link in inputs],
        "outputs": [{"name": name, "type": kind, "links": []} for name, kind in outputs],
        **more,
    }


def model_chain(*middle: dict, links: list[list[Any]]) -> dict[str, Any]:
    """Return a graph from a loader, number 1, through nodes to a shift, number 9."""
    loader = editor_node(1, "UNETLoader", ["a.safetensors", "default"], outputs=[("MODEL", "MODEL")])
    shift = editor_node(9, "ModelSamplingSD3", [8], [("model", "MODEL", links[-1][0])], [("MODEL", "MODEL")])
    return {"nodes": [loader, *middle, shift], "links": links}


def test_a_bypassed_node_passes_on_its_input():
    middle = editor_node(2, "LoraLoaderModelOnly", ["x", 1], [("model", "MODEL", 10)], [("MODEL", "MODEL")], mode=4)
    graph = graph_of(model_chain(middle, links=[[10, 1, 0, 2, 0, "MODEL"], [11, 2, 0, 9, 0, "MODEL"]]))
    assert graph.nodes["9"].inputs == {"shift": 8, "model": Output("1", 0)}
    assert "2" not in graph.nodes


def test_a_bypassed_node_passes_on_the_input_of_its_output():
    inputs = [("clip", "CLIP", None), ("model", "MODEL", 10)]
    middle = editor_node(2, "LoraLoader", ["x", 1, 1], inputs, [("MODEL", "MODEL"), ("CLIP", "CLIP")], mode=4)
    graph = graph_of(model_chain(middle, links=[[10, 1, 0, 2, 1, "MODEL"], [11, 2, 0, 9, 0, "MODEL"]]))
    assert graph.nodes["9"].inputs["model"] == Output("1", 0)


def test_a_muted_node_passes_on_nothing():
    middle = editor_node(2, "LoraLoaderModelOnly", ["x", 1], [("model", "MODEL", 10)], [("MODEL", "MODEL")], mode=2)
    graph = graph_of(model_chain(middle, links=[[10, 1, 0, 2, 0, "MODEL"], [11, 2, 0, 9, 0, "MODEL"]]))
    assert "model" not in graph.nodes["9"].inputs


def test_reroutes_and_named_links_are_followed():
    first = editor_node(2, "Reroute", [], [("", "*", 10)], [("", "*")])
    setter = editor_node(3, "SetNode", ["model"], [("MODEL", "MODEL", 11)], [("*", "*")])
    getter = editor_node(4, "GetNode", ["model"], [], [("MODEL", "MODEL")])
    links = [[10, 1, 0, 2, 0, "*"], [11, 2, 0, 3, 0, "MODEL"], [12, 4, 0, 9, 0, "MODEL"]]
    assert graph_of(model_chain(first, setter, getter, links=links)).nodes["9"].inputs["model"] == Output("1", 0)


def test_a_linked_primitive_overrides_the_widget():
    primitive = editor_node(2, "PrimitiveNode", [3.5, "fixed"], [], [("FLOAT", "FLOAT")])
    shift = editor_node(9, "ModelSamplingSD3", [8], [("shift", "FLOAT", 10)], [("MODEL", "MODEL")])
    graph = graph_of({"nodes": [primitive, shift], "links": [[10, 2, 0, 9, 0, "FLOAT"]]})
    assert graph.nodes["9"].inputs["shift"] == 3.5


def subgraph(values: list[Any], link: int | None = None) -> dict[str, Any]:
    """Return a graph that uses a subgraph of a shift, whose widget is promoted."""
    inner = editor_node(5, "ModelSamplingSD3", [8], [("shift", "FLOAT", 1)], [("MODEL", "MODEL")])
    inner["inputs"][0]["widget"] = {"name": "shift"}
    definition = {
        "id": "sub",
        "nodes": [inner],
        "inputs": [{"name": "shift", "type": "FLOAT", "linkIds": [1]}],
        "links": [
            {"id": 1, "origin_id": -10, "origin_slot": 0, "target_id": 5, "target_slot": 0, "type": "FLOAT"},
            {"id": 2, "origin_id": 5, "origin_slot": 0, "target_id": -20, "target_slot": 0, "type": "MODEL"},
        ],
    }
    primitive = editor_node(1, "PrimitiveFloat", [3], [], [("FLOAT", "FLOAT")])
    use = editor_node(2, "sub", values, [("shift", "FLOAT", link)], [("MODEL", "MODEL")])
    end = editor_node(3, "LoraLoaderModelOnly", ["x", 1], [("model", "MODEL", 11)], [("MODEL", "MODEL")])
    links = [[10, 1, 0, 2, 0, "FLOAT"], [11, 2, 0, 3, 0, "MODEL"]]
    return {"nodes": [primitive, use, end], "links": links, "definitions": {"subgraphs": [definition]}}


@pytest.mark.parametrize(
    ("values", "link", "expected"), [([], None, 8), ([5], None, 5), ([5], 10, Output("1", 0)), ([5, 6], None, 8)]
)
def test_a_promoted_widget_has_the_value_of_its_subgraph_node(values, link, expected):
    graph = graph_of(subgraph(values, link))
    assert graph.nodes["2:5"].inputs["shift"] == expected
    assert graph.nodes["3"].inputs["model"] == Output("2:5", 0)


def test_a_subgraph_that_contains_itself_is_refused():
    workflow = subgraph([])
    workflow["definitions"]["subgraphs"][0]["nodes"].append(editor_node(6, "sub"))
    with pytest.raises(WanjaxError, match="the subgraph sub has itself inside"):
        graph_of(workflow)


def test_large_subgraphs_are_counted_before_they_are_read():
    nodes, links = [editor_node(k, "X") for k in range(10_000)], [[k, 1, 0, 2, 0, "*"] for k in range(200_000)]
    for contents in ({"nodes": nodes, "links": []}, {"nodes": nodes[:1], "links": links}):
        definition = {"id": "s", "inputs": [], **contents}
        uses = [editor_node(k, "s") for k in range(1000)]
        start = time.process_time()
        with pytest.raises(WanjaxError, match=f"more than {MAX_NODES:,} nodes, or too much"):
            graph_of({"nodes": uses, "links": [], "definitions": {"subgraphs": [definition]}})
        assert time.process_time() - start < 5


def test_an_endless_link_is_refused():
    workflow = model_chain(links=[[10, 1, float("inf"), 9, 0, "MODEL"]])
    with pytest.raises(WanjaxError, match="is damaged, at OverflowError"):
        graph_of(workflow)


def test_a_url_of_another_scheme_is_ignored():
    models = [{"name": "a"}, {"name": "a", "url": "https://b"}, {"name": "c", "url": 3}]
    node = editor_node(1, "UNETLoader", properties={"models": models})
    assert graph_of({"nodes": [node], "links": []}).addresses.keys() == {"a"}


def test_a_text_of_a_workflow_is_printable_and_short_in_a_message():
    nodes = edited_template(T2V, n48__model=["P", 0])
    nodes["P"] = {"class_type": "\x1b[2J" + "a" * 10_000, "inputs": {"model": ["37", 0]}}
    assert error_message(nodes).startswith(f"node P (\\x1b[2J{'a' * 75}…) is not known")
    message = error_message(edited_template(T2V, n37__unet_name="ltx\x1b\n.safetensors"))
    assert r"loads ltx\x1b\n.safetensors" in message


def test_nested_subgraphs_are_limited():
    levels = [
        {"id": f"s{i}", "nodes": [editor_node(k, f"s{i + 1}") for k in (1, 2)], "inputs": [], "links": []}
        for i in range(30)
    ]
    workflow = {"nodes": [editor_node(1, "s0")], "links": [], "definitions": {"subgraphs": levels}}
    start = time.process_time()
    with pytest.raises(WanjaxError, match=f"more than {MAX_NODES:,} nodes"):
        graph_of(workflow)
    assert time.process_time() - start < 3


def test_a_cycle_of_reroutes_is_refused():
    nodes = [editor_node(k, "Reroute", [], [("", "*", 10 + k)], [("", "*")]) for k in (2, 3)]
    links = [[12, 3, 0, 2, 0, "*"], [13, 2, 0, 3, 0, "*"], [14, 3, 0, 9, 0, "MODEL"]]
    with pytest.raises(WanjaxError, match="form a circle"):
        graph_of(model_chain(*nodes, links=links))


def edited_template(name: str, **changes: Any) -> dict[str, Any]:
    """Return a template in the API's form with some inputs changed, as NODE__INPUT=value."""
    nodes = api_form(graph_of(template(name)))
    for key, value in changes.items():
        node, _, name = key.removeprefix("n").partition("__")
        nodes[node]["inputs"][name] = value
    return nodes


def error_message(workflow: dict[str, Any]) -> str:
    with pytest.raises(WanjaxError) as error:
        request_of(workflow)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_cycle_of_nodes_is_refused():
    assert "form a circle" in error_message(edited_template(T2V, n48__model=["48", 0]))


def test_a_dangling_link_is_refused():
    assert "lacks" in error_message(edited_template(T2V, n48__model=["77", 0]))


def test_a_long_chain_is_refused():
    nodes = edited_template(T2V, n48__model=["L0", 0])
    for k in range(5000):
        nodes[f"L{k}"] = {"class_type": "LoraLoaderModelOnly", "inputs": {"model": [f"L{k + 1}", 0], "lora_name": "x"}}
    nodes["L5000"] = nodes["37"]
    assert "too many nodes in a row" in error_message(nodes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n3__steps": "many"}, "has 'many' as its steps, which is not a number"),
        ({"n3__steps": None}, "which is not a number"),
        ({"n3__steps": 2**70}, "which is too large"),
        ({"n3__steps": ["48", 0]}, "has something else as its steps"),
        ({"n3__steps": float("nan")}, "has nan as its steps"),
        ({"n3__denoise": 0.5}, "has a denoise of 0.5"),
        ({"n37__unet_name": ""}, "names no file"),
        ({"n37__unet_name": 7}, "names no file"),
        ({"n3__latent_image": 1}, "has nothing linked to latent_image"),
        ({"n3__model": None}, "has nothing linked to model"),
    ],
)
def test_a_wrong_value_is_refused(changes, words):
    assert words in error_message(edited_template(T2V, **changes))


def test_the_message_for_an_unknown_node_describes_the_rest_of_the_workflow():
    nodes = edited_template(T2V, n48__model=["P", 0])
    nodes["P"] = {"class_type": "SomethingNew", "inputs": {"model": ["37", 0]}}
    assert error_message(nodes) == (
        "node P (SomethingNew) is not known to wanjax: without it the workflow is a video of wan2.1-t2v-1.3b, 832x480, "
        "33 frames, 30 steps"
    )


def test_an_unknown_node_outside_the_path_does_not_matter():
    nodes = edited_template(T2V)
    nodes["P"] = {"class_type": "SomethingNew", "inputs": {"model": ["37", 0]}}
    assert request_of(nodes) == request_of(edited_template(T2V))


ENTRIES = [{"type": "Header"}, {"on": True, "lora": "a.safetensors", "strength": 0.5}, {"on": False, "lora": "b"}]


def test_a_loader_of_several_loras_is_read_in_both_forms():
    inputs = [("model", "MODEL", 10), ("clip", "CLIP", None)]
    kind = "Power Lora Loader (rgthree)"
    middle = editor_node(2, kind, [{}, *ENTRIES, ""], inputs, [("MODEL", "MODEL"), ("CLIP", "CLIP")])
    graph = graph_of(model_chain(middle, links=[[10, 1, 0, 2, 0, "MODEL"], [11, 2, 0, 9, 0, "MODEL"]]))
    nodes = edited_template(T2V, n48__model=["2", 0])
    for loader in (graph.nodes["2"].inputs, {"lora_1": ENTRIES[1], "lora_2": ENTRIES[2]}):
        nodes["2"] = {"class_type": kind, "inputs": {**loader, "model": ["37", 0]}}
        assert [(use.file.name, use.strength) for use in request_of(nodes).loras] == [("a.safetensors", 0.5)]


@pytest.mark.parametrize("strength", [float("nan"), float("inf"), "1", True])
def test_a_strength_that_is_not_a_number_is_refused(strength):
    nodes = edited_template(T2V, n48__model=["2", 0])
    entry = {"on": True, "lora": "a.safetensors", "strength": strength}
    nodes["2"] = {"class_type": "Power Lora Loader (rgthree)", "inputs": {"lora_1": entry, "model": ["37", 0]}}
    assert f"has {strength!r} as a strength" in error_message(nodes)


def two_samplers(**second: Any) -> dict[str, Any]:
    """Return a workflow with a SamplerCustom for each expert, the second with changed inputs."""
    nodes = edited_template("video_wan2_2_14B_t2v")
    models = {name: node for name, node in nodes.items() if node["class_type"] == "KSamplerAdvanced"}
    (low_id, low), (high_id, high) = sorted(models.items(), key=lambda item: item[1]["inputs"]["add_noise"])
    assert (high["inputs"]["add_noise"], low["inputs"]["add_noise"]) == ("enable", "disable")
    nodes["B"] = {"class_type": "BasicScheduler", "inputs": {"scheduler": "simple", "steps": 4, "denoise": 1}}
    nodes["S"] = {"class_type": "SplitSigmas", "inputs": {"sigmas": ["B", 0], "step": 2}}
    nodes["K"] = {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}}
    for number, (key, node) in enumerate([(high_id, high), (low_id, low)]):
        names = ("model", "positive", "negative", "latent_image", "noise_seed")
        inputs = {name: node["inputs"][name] for name in names} | {"cfg": 1, "add_noise": number == 0}
        inputs |= {"sigmas": ["S", number], "sampler": ["K", 0], **(second if number else {})}
        nodes[key] = {"class_type": "SamplerCustom", "inputs": inputs}
    nodes["Z"] = {"class_type": "CFGZeroStar", "inputs": {"model": low["inputs"]["model"]}}
    return nodes


def test_experts_may_be_sampled_by_different_nodes():
    assert request_of(two_samplers()).settings["boundary_step"] == 2
    assert "adds noise to what node" in error_message(two_samplers(add_noise=True))


def test_a_guidance_rule_of_only_one_expert_is_refused():
    assert "has another guidance rule than node" in error_message(two_samplers(model=["Z", 0]))


@pytest.mark.parametrize(
    ("schedule", "sigmas"),
    [
        *(
            ("simple", "comfy"),
            ("normal", "comfy-normal"),
            ("sgm_uniform", "comfy-sgm-uniform"),
            ("beta", "comfy-beta"),
            ("karras", "comfy-karras"),
            ("exponential", "comfy-exponential"),
            ("kl_optimal", "comfy-kl-optimal"),
            ("linear_quadratic", "comfy-linear-quadratic"),
        ),
        *(("ddim_uniform", None), (["48", 0], None)),
    ],
)
def test_an_unsupported_schedule_gives_a_note(schedule, sigmas):
    workflow = request_of(edited_template(T2V, n3__scheduler=schedule))
    assert workflow.settings["sigmas"] == (sigmas or "comfy")
    notes = [note for note in workflow.notes if "wanjax uses the noise levels of the schedule simple" in note]
    assert len(notes) == (sigmas is None)


def with_model_node(kind: str, cfg: float, **inputs: Any) -> Workflow:
    """Return a workflow whose model goes through a node."""
    nodes = edited_template(T2V, n48__model=["P", 0], n3__cfg=cfg)
    nodes["P"] = {"class_type": kind, "inputs": {"model": ["37", 0], **inputs}}
    nodes["N"] = {"class_type": "CLIPTextEncode", "inputs": {"text": "blurry", "clip": ["38", 0]}}
    return request_of(nodes)


def test_cfg_zero_has_no_zero_steps_and_needs_guidance():
    workflow = with_model_node("CFGZeroStar", 6)
    assert workflow.settings["guidance_rule"] == "cfg-zero:zero_steps=0"
    assert guidance_rule(workflow.settings["guidance_rule"]) == ZeroStar(zero_steps=0)
    assert any("close but not the same" in note for note in workflow.notes)
    assert "guidance_rule" not in with_model_node("CFGZeroStar", 1).settings


@pytest.mark.parametrize("cfg", [1, 6])
def test_nag_has_a_separate_negative_prompt(cfg):
    numbers = {"nag_scale": 11, "nag_alpha": 0.25, "nag_tau": 2.5}
    workflow = with_model_node("WanVideoNAG", cfg, conditioning=["N", 0], **numbers)
    assert workflow.settings["guidance_rule"] == "nag:scale=11,alpha=0.25,tau=2.5"
    assert workflow.settings["negative_prompt"] == "blurry"
    assert any("different negative prompts in the workflow" in note for note in workflow.notes) == (cfg == 6)
    without = with_model_node("WanVideoNAG", cfg, **numbers).settings["negative_prompt"]
    assert without == edited_template(T2V)["7"]["inputs"]["text"]


ANIMATE = "video_wan_animate2_distilled"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"pose_strength": 0.5}, "has 0.5 as its pose_strength, but wanjax supports only 1"),
        ({"video_frame_offset": 77}, "has 77 as its video_frame_offset, but wanjax supports only 0"),
        ({"continue_motion": ["189", 0]}, "continues other frames"),
        ({"pose_end_percent": "x"}, "has 'x' as its pose_end_percent, which is not a number"),
    ],
)
def test_an_unsupported_character_is_refused(inputs, words):
    nodes = api_form(graph_of(template(ANIMATE)))
    [animate] = [node for node in nodes.values() if node["class_type"] == "WanAnimate2ToVideo"]
    animate["inputs"] |= inputs
    assert f"(WanAnimate2ToVideo) {words}" in error_message(nodes)


def test_a_loop_of_other_nodes_is_refused():
    nodes = edited_template(T2V)
    [save] = [node for node in nodes.values() if node["class_type"] == "CreateVideo"]
    nodes["E"] = {"class_type": "EndLoop", "inputs": {"output_value": save["inputs"]["images"]}}
    save["inputs"]["images"] = ["E", 0]
    assert "node E (EndLoop) repeats other nodes" in error_message(nodes)


def test_the_noise_of_lcm_gives_a_note():
    notes = request_of(edited_template(T2V, n3__sampler_name="lcm")).notes
    assert any("its later noise differs" in note for note in notes)


@pytest.mark.parametrize("node", ["n6", "n7"])
@pytest.mark.parametrize(
    ("text", "special"),
    [
        ("a (red circle:1.3) moves", "(red circle:1.3)"),
        ("a (red) circle", "(red)"),
        ("a cat embedding:style.pt", "embedding:style.pt"),
        (r"a cat \(a tabby\)", None),
        ("a red circle: it moves", None),
    ],
)
def test_weights_of_words_give_a_note(node, text, special):
    notes = [note for note in request_of(edited_template(T2V, **{f"{node}__text": text})).notes if "weight" in note]
    assert len(notes) == (special is not None)
    assert special is None or special in notes[0]


def test_each_type_of_node_in_the_table_has_a_function():
    assert {*FUNCTIONS, *composing_nodes.FUNCTIONS} == node_types.NODE_TYPES.keys()


def with_clip_node(kind: str, **inputs: Any) -> dict[str, Any]:
    """Return a workflow whose clip goes through a node, or is loaded by it."""
    nodes = api_form(graph_of(template("video_wan_vace_14B_v2v")))
    nodes["C"] = {"class_type": "VHS_LoadVideo", "inputs": {"video": "a.mp4"}}
    nodes["N"] = {"class_type": kind, "inputs": {"video": "a.mp4", "image": ["C", 0], **inputs}}
    nodes["49"]["inputs"]["control_video"] = ["N", 0]
    return nodes


def test_changes_of_a_clip_are_noted():
    assert "changes a clip to 12 frames per second" in error_message(with_clip_node("VHS_LoadVideo", force_rate=12))
    notes = request_of(with_clip_node("ImageFromBatch", length=7)).notes
    assert any("takes 7 frames of a clip" in note for note in notes)
    assert request_of(with_clip_node("VHS_LoadVideo", force_rate=0)).inputs["video"].name == "a.mp4"


def with_resized_clip(kind: str, **inputs: Any) -> Workflow:
    """Return the workflow whose size is that of a clip of 100 x 60 pixels behind a node."""
    nodes = with_clip_node(kind, **inputs)
    nodes["G"] = {"class_type": "GetImageSize", "inputs": {"image": ["N", 0]}}
    nodes["49"]["inputs"] |= {"width": ["G", 0], "height": ["G", 1]}
    return read_workflow(graph_of(nodes), lambda file: MediaSize(100, 60, 5, 8.0))


@pytest.mark.parametrize(
    ("kind", "inputs", "size"),
    [
        ("ImageScale", {"width": 50, "height": 50}, (50, 50)),
        ("ImageScale", {"width": 0, "height": 30}, (50, 30)),
        ("ImageScale", {"width": 33, "height": 0}, (33, 20)),
        ("ImageScale", {"width": 0, "height": 0}, (100, 60)),
        ("ImageScaleBy", {"scale_by": 1.5}, (150, 90)),
        ("ImageResizeKJv2", {"width": 50, "height": 50}, (50, 50)),
        ("ImageResizeKJv2", {"width": 50, "height": 50, "keep_proportion": "crop"}, (50, 50)),
        ("ImageResizeKJv2", {"width": 50, "height": 0, "keep_proportion": "crop"}, (50, 60)),
        ("ImageResizeKJv2", {"width": 50, "height": 50, "keep_proportion": "resize"}, (50, 30)),
        ("ImageResizeKJv2", {"width": 0, "height": 45, "keep_proportion": "resize"}, (75, 45)),
        ("ImageResizeKJv2", {"width": 50, "height": 50, "keep_proportion": "resize", "divisible_by": 16}, (48, 16)),
        ("ImageResizeKJv2", {"width": 50, "height": 0, "keep_proportion": "pad"}, (50, 30)),
        ("ImageResizeKJv2", {"width": 50, "height": 50, "keep_proportion": "pad"}, (50, 50)),
    ],
)
def test_the_size_of_a_resized_clip_is_computed(kind, inputs, size):
    settings = with_resized_clip(kind, **inputs).settings
    assert (settings["width"], settings["height"]) == size


def test_a_size_computed_at_run_time_is_missing():
    settings = with_resized_clip("ImageResizeKJv2", width=50, height=50, keep_proportion="total_pixels").settings
    assert "resizes by the number of pixels" in settings["width"].sentence
    nodes = with_clip_node("ImageScale", width=0, height=64)
    nodes["G"] = {"class_type": "GetImageSize", "inputs": {"image": ["N", 0]}}
    nodes["49"]["inputs"] |= {"width": ["G", 0], "height": ["G", 1]}
    settings = request_of(nodes).settings
    assert "node C (VHS_LoadVideo) loads a.mp4" in settings["width"].sentence
    assert settings["height"] == 64


def test_a_checkpoint_with_several_networks_is_one_file():
    nodes = edited_template(T2V, n6__clip=["37", 1], n7__clip=["37", 1], n8__vae=["37", 2])
    nodes["37"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "wan2.2-t2v-high-aio.safetensors"}}
    workflow = request_of(nodes)
    assert [file.name for file in workflow.files] == ["wan2.2-t2v-high-aio.safetensors"]
    assert workflow.other_files == ()


@pytest.mark.parametrize(
    ("name", "is_same"),
    [
        ("umt5_xxl_fp16.safetensors", True),
        ("umt5-xxl-encoder-Q8_0.gguf", True),
        ("models_t5_umt5-xxl-enc-bf16.pth", True),
        ("umt5_xxl_abliterated_fp16.safetensors", False),
        ("t5xxl_fp16.safetensors", False),
    ],
)
def test_a_text_encoder_of_another_model_gives_a_note(name, is_same):
    workflow = request_of(edited_template(T2V, n38__clip_name=f"wan/{name}"))
    notes = [note for note in workflow.notes if name in note]
    assert ([file.name for file in workflow.other_files] == [f"wan/{name}", "wan_2.1_vae.safetensors"]) == is_same
    if not is_same:
        assert notes == [
            f"node 38 (CLIPLoader) loads {name}, and wanjax uses the text encoder of the model's own repository, from "
            "which it may differ"
        ]
    else:
        assert not notes


def test_a_vae_of_another_program_gives_a_note():
    workflow = request_of(edited_template(T2V, n39__vae_name="Wan2.1_VAE_upscale2x_imageonly_real_v1.safetensors"))
    assert any("node 39 (VAELoader) loads Wan2.1_VAE_upscale2x" in note for note in workflow.notes)
    assert [file.kind for file in workflow.other_files] == ["text_encoders"]


def starting_from_clip(**inputs: Any) -> dict[str, Any]:
    """Return a workflow whose sampler starts from a clip."""
    nodes = edited_template(T2V, n3__latent_image=["E", 0])
    nodes["C"] = {"class_type": "VHS_LoadVideo", "inputs": {"video": "a.mp4", "frame_load_cap": 20}}
    nodes["S"] = {"class_type": "ImageScale", "inputs": {"image": ["C", 0], "width": 64, "height": 32}}
    nodes["E"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["S", 0], "vae": ["39", 0]}}
    nodes["3"]["inputs"] |= inputs
    return nodes


@pytest.mark.parametrize("steps", [1, 3, 6, 7, 20, 30])
@pytest.mark.parametrize("denoise", [0.05, 0.3, 0.55, 0.6, 0.7, 0.999, 1])
def test_a_sampler_may_start_from_a_clip(steps, denoise):
    """ComfyUI runs the last steps of a longer schedule; a strength runs the same ones."""
    workflow = request_of(starting_from_clip(steps=steps, denoise=denoise))
    settings = workflow.settings
    assert settings["steps"] == int(steps / denoise)
    assert int(settings["steps"] * settings["strength"]) == steps
    assert [settings[name] for name in ("width", "height", "frames")] == [64, 32, 17]
    assert workflow.inputs["video"].name == "a.mp4"


def test_a_sampler_may_start_later_from_a_clip():
    nodes = starting_from_clip()
    sampler = {name: value for name, value in nodes["3"]["inputs"].items() if name not in ("seed", "denoise")}
    sampler |= {"steps": 10, "noise_seed": 5, "start_at_step": 4, "end_at_step": 10000}
    nodes["3"] = {"class_type": "KSamplerAdvanced", "inputs": sampler}
    settings = request_of(nodes).settings
    assert (settings["steps"], settings["strength"]) == (10, 0.6)
    nodes["3"]["inputs"]["latent_image"] = ["40", 0]
    assert "runs only the steps from 4 to 10" in error_message(nodes)


def test_latents_of_other_pictures_are_refused():
    nodes = starting_from_clip()
    nodes["C"] = {"class_type": "LoadImage", "inputs": {"image": "a.png"}}
    assert "node E (VAEEncode) encodes something else than a clip" in error_message(nodes)
    for denoise in (0, 1e-320, -1):
        assert f"has a denoise of {denoise:g}" in error_message(starting_from_clip(denoise=denoise))
    assert request_of(starting_from_clip(steps=0, denoise=0.5)).settings["steps"] == 0  # which the request refuses


def test_a_mask_from_a_file_is_an_input():
    nodes = api_form(graph_of(template("video_wan_vace_14B_v2v")))
    nodes["M"] = {"class_type": "LoadImage", "inputs": {"image": "mask.png"}}
    nodes["T"] = {"class_type": "ImageToMask", "inputs": {"image": ["M", 0], "channel": "red"}}
    nodes["49"]["inputs"]["control_masks"] = ["T", 0]
    assert request_of(nodes).inputs["mask"].name == "mask.png"


def test_an_unsupported_solver_is_a_missing_value():
    workflow = request_of(edited_template(T2V, n3__sampler_name="res_multistep"))
    assert isinstance(workflow.scheduler, Missing)
    assert "res_multistep" in workflow.scheduler.sentence


def test_the_number_of_frames_is_rounded_like_in_comfyui():
    workflow = request_of(edited_template(T2V, n40__length=80))
    assert workflow.settings["frames"] == 77
    assert any("asks for 80 frames" in note for note in workflow.notes)
    assert request_of(edited_template(T2V, n40__length=0)).settings["frames"] == 1


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("floor(a * b) + 1", 81),
        ("max(4, (int(a) // 16) * 16)", 16),
        ("a % b if b > 0 else 0", 1),
        ("(a % 4 == 1) and ((b - 1) % 4 == 0)", False),
        ("a & ~1", 16),
        ("4 * ceil((a - b) / 4) + 1", 13),
        ("round(2.5) + abs(-a)", 18),
        ("2 ** 10", 1024),
        ("round(5, -3000000)", 0),
        ("round(2.345, 1)", 2.3),
    ],
)
def test_expressions_are_computed(expression, value):
    assert arithmetic.compute(expression, {"a": 16, "b": 5}) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "a.real",
        "[a][0]",
        "(lambda: 1)()",
        "f'{a}'",
        "open('x')",
        "9 ** 9 ** 9 ** 9",
        "1 / 0",
        "1 << 99999999",
        "9" * 400,
        "-" * 200 + "1",
        "a +",
        "",
        "'a' * 999999999",
        "max()",
        "b",
        "a" * 600,
    ],
)
def test_invalid_expressions_are_refused(expression):
    start = time.process_time()
    with pytest.raises(WanjaxError):
        arithmetic.compute(expression, {"a": 16})
    assert time.process_time() - start < 0.5


@given(st.text("ab0123.+-*/%&|~()<>=, ifelsndormaxincgt'\"[]{}_:", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_expression_gives_a_number_or_an_error(expression):
    try:
        value = arithmetic.compute(expression, {"a": 3, "b": 0.5})
    except WanjaxError:
        return
    assert isinstance(value, int | float)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["nodes", "links", "definitions", "prompt", "1"]), JSON, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_json_is_a_request_or_an_error(value):
    with pytest.raises(WanjaxError):
        request_of(value)


TEMPLATE_NAMES = [T2V, "video_wan2_2_14B_t2v", "video_wan_vace_flf2v", "video_hunyuan_video_1.5_720p_i2v"]


@given(st.sampled_from(TEMPLATE_NAMES), st.booleans(), st.integers(0, 2**32), JSON)
@settings(max_examples=300, deadline=None)
def test_a_changed_workflow_is_a_request_or_an_error(name, editor, seed, value):
    """Change a random part of a workflow: a value, a link, a mode or a type."""
    rng = random.Random(seed)
    workflow = template(name) if editor else api_form(graph_of(template(name)))
    parts: list[Any] = [workflow]
    positions = []
    for part in parts:  # the list grows while it is read
        for key in part.keys() if isinstance(part, dict) else range(len(part)):
            positions.append((part, key))
            if isinstance(part[key], dict | list):
                parts.append(part[key])
    for part, key in rng.sample(positions, 3):
        part[key] = rng.choice([value, None, 4, -1, "x", [], rng.choice(positions)[1]])
    assert "\n" not in error_or_empty(json.loads(json.dumps(workflow)))


def error_or_empty(workflow: Any) -> str:
    """Return the error of a workflow, or an empty text."""
    try:
        request_of(workflow)
    except WanjaxError as error:
        return str(error)
    return ""


def test_all_modes_of_all_nodes_give_a_request_or_an_error():
    for mode in (2, 4):
        for name in TEMPLATE_NAMES:
            for position in range(len(nodes_of(template(name)))):
                workflow = template(name)
                nodes_of(workflow)[position]["mode"] = mode
                assert "\n" not in error_or_empty(workflow)
