# SPDX-License-Identifier: Apache-2.0
"""Videos by HTTP: requested, followed, downloaded, listed, cancelled, removed, and resumed after a kill."""

import base64
import io
import json
import shutil
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import wanjax
from tests.serve.conftest import SMALL
from tests.support.commands import refused, succeeded
from tests.support.commands import wanjax as wanjax_command
from tests.support.media import picture
from tests.support.quick import quick
from tests.support.tiny import tiny_animate_checkpoint, tiny_control_checkpoint, tiny_pose_checkpoint
from tests.support.toy.checkpoint import write_checkpoint
from tests.support.toy_sound import DRIVING, TOY_SOUND
from tests.support.words import has_line_with_words, line_with_words
from wanjax import registry
from wanjax.checkpoints.files import save_safetensors
from wanjax.checkpoints.lora_source import Lora
from wanjax.errors import WanjaxError
from wanjax.execution import TracedProgram
from wanjax.jobs.databases import Sqlite
from wanjax.jobs.maker import JobProgress
from wanjax.jobs.store import STOPPED, JobStore, NewJob, Signal
from wanjax.jobs.worker import HEARTBEAT_INTERVAL, Lease
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.pictures import read_clip
from wanjax.media.video import read_metadata, write_video
from wanjax.pipelines.previews.latent_preview import fit_colours
from wanjax.pipelines.run import Run
from wanjax.pipelines.text.prompt_extension import ExtendedPrompt
from wanjax.pipelines.video_metadata import digest_of
from wanjax.schedulers import UniPC
from wanjax.serve import maker, uploads
from wanjax.serve.error_details import strip_folders
from wanjax.serve.served_models import LoadedModels
from wanjax.serve.videos import new_id, output_path

pytestmark = pytest.mark.usefixtures("cached_programs")

OTHER_CHANNELS = ([1, 2], [0, 2], [0, 1])  # for red, green and blue


def test_a_video_equals_that_of_the_library(start, pipe, tmp_path):
    server = start()
    requested = server.post_video(seed=7)
    assert requested["object"] == "video"
    assert requested["model"] == "nano"
    assert requested["size"] == "32x32"
    result = server.wait_until_finished(requested["id"])
    assert result["status"] == "completed"
    assert result["progress"] == 100
    assert set(result["stage_seconds"]) == {"compile", "encode", "denoise", "decode"}
    content = server.client.get(f"/v1/videos/{requested['id']}/content")
    assert content.headers["content-type"] == "video/mp4"
    served = tmp_path / "served.mp4"
    served.write_bytes(content.content)
    expected = pipe("a red circle", size=(32, 32), frames=5, steps=2, seed=7)
    expected.save(tmp_path / "expected.mp4")
    np.testing.assert_array_equal(read_clip(served, 9, 8), read_clip(tmp_path / "expected.mp4", 9, 8))
    metadata = server.client.get(f"/v1/videos/{requested['id']}/record").json()
    assert read_metadata(served) == expected.settings == metadata
    thumbnail = server.client.get(f"/v1/videos/{requested['id']}/content?variant=thumbnail")
    assert Image.open(io.BytesIO(thumbnail.content)).size == (32, 32)
    part = server.client.get(f"/v1/videos/{requested['id']}/content", headers={"range": "bytes=0-9"})
    assert (part.status_code, part.content) == (206, content.content[:10])


@pytest.mark.parametrize(
    ("size", "steps"),
    quick([("32x32", 2)], [("32x32", 2), ("64x64", 12)]),  # only the longer run shows the prompt's colour
)
def test_a_running_job_has_previews(start, size, steps):
    server = start(preview=True)
    result = server.wait_until_finished(server.post_video(size=size, steps=steps, seed=42)["id"])
    assert result["preview"] == steps
    events = server.client.get(f"/v1/videos/{result['id']}/events").text
    assert f'"preview": {steps}' in events
    preview = server.client.get(f"/v1/videos/{result['id']}/content?variant=preview")
    assert preview.headers["content-type"] == "image/png"
    pixels = np.asarray(Image.open(io.BytesIO(preview.content)), np.float64).reshape(-1, 3)
    assert pixels.std() > 0
    red, green, blue = ((pixels[:, i] > pixels[:, rest].max(1) + 99).mean() for i, rest in enumerate(OTHER_CHANNELS))
    assert steps == 2 or red > 0.02 > 4 * max(green, blue)
    server.stop()
    without_previews = start()
    result = without_previews.wait_until_finished(without_previews.post_video()["id"])
    assert result["preview"] == 0
    assert without_previews.client.get(f"/v1/videos/{result['id']}/content?variant=preview").status_code == 404


def test_colours_of_previews_are_fitted_in_the_compile_stage(start, monkeypatch):
    """Their programs do not count as denoising."""
    order: list[str] = []
    enter = JobProgress.stage

    def fit(*arguments):
        order.append("fit")
        return fit_colours(*arguments)

    def stage(self, name):
        order.append(name)
        return enter(self, name)

    monkeypatch.setattr("wanjax.pipelines.pipeline.fit_colours", fit)
    monkeypatch.setattr(JobProgress, "stage", stage)
    server = start(preview=True)
    assert server.wait_until_finished(server.post_video()["id"])["status"] == "completed"
    assert order == ["compile", "fit", "encode", "denoise", "decode"]


def test_each_window_is_reported_with_its_previews(start, monkeypatch):
    messages, report = [], Lease.report

    def record_report(lease, **progress):
        report(lease, **progress)
        if "stage_done" in progress:
            messages.append([lease.progress.get(name, 0) for name in ("stage", "window", "stage_done", "preview")])

    monkeypatch.setattr(Lease, "report", record_report)
    server = start(preview=True)
    result = server.wait_until_finished(server.post_video(windows=2)["id"])
    assert result["status"] == "completed", result["error"]
    steps = [(window, done) for stage, window, done, _ in messages if stage == "denoise" and done]
    assert steps == [(1, 1), (1, 2), (2, 1), (2, 2)]
    previews = [preview for *_, preview in messages]
    assert previews == sorted(previews)
    assert {2, 4} <= set(previews)


def test_a_warning_of_the_library_is_a_note_of_only_its_video(start, tmp_path):
    """The warning about a picture and a clip is a note of this video, and of no other."""
    server = start()
    inputs = {"image": picture((32, 32)), "video": write_clip(tmp_path / "a.mp4", 9).read_bytes()}
    data = {name: str(value) for name, value in SMALL.items()}
    response = server.client.post("/v1/videos", data=data, files=inputs)
    assert response.status_code == 200, response.text
    second_id = server.post_video()["id"]
    id = response.json()["id"]
    (note,) = (text for text in server.wait_until_finished(id)["notes"] if "clip" in text)
    assert has_line_with_words(note, "picture clip together")
    assert note in server.client.get(f"/v1/videos/{id}/events").text
    assert not any("clip" in text for text in server.wait_until_finished(second_id)["notes"])


def test_a_warning_about_a_request_is_a_note_from_the_start(start):
    """Its size is stored with the request, so that the worker does not warn about it."""
    server = start()
    files = {"image": picture((32, 64))}
    response = server.client.post("/v1/videos", data={"prompt": "a", "steps": "1", "frames": "5"}, files=files)
    for notes in (response.json()["notes"], server.wait_until_finished(response.json()["id"])["notes"]):
        assert has_line_with_words("\n".join(notes), "picture is cut off")


RANGES = {  # a Range header, the status, and the part of the file in the response
    "bytes=0-3": (206, slice(0, 4)),
    "bytes=-5": (206, slice(-5, None)),
    "bytes=x": (200, slice(None)),
    "bytes=5-2": (200, slice(None)),
    "items=0-3": (200, slice(None)),
    "bytes=0-3,6-7": (200, slice(None)),
}


def test_valid_invalid_and_unsatisfiable_ranges_are_answered(start):
    server = start()
    id = server.post_video()["id"]
    assert server.wait_until_finished(id)["status"] == "completed"
    content, url = server.content(id), f"/v1/videos/{id}/content"
    for header, (status, part) in RANGES.items():
        response = server.client.get(url, headers={"range": header})
        assert (response.status_code, response.content) == (status, content[part]), header
    response = server.client.get(url, headers={"range": "bytes=99999999-"})
    assert (response.status_code, response.headers["content-range"]) == (416, f"bytes */{len(content)}")
    assert has_line_with_words(response.json()["error"]["message"], f"'bytes=99999999-' outside {len(content):,}")


def test_unintended_settings_are_noted(start):
    server = start()
    prompts = {"then": ["a blue mountain"], "windows": 2, "prompt": "a dog"}
    notes = server.wait_until_finished(server.post_video(**prompts, guidance_scale=1, negative_prompt="grey")["id"])[
        "notes"
    ]
    assert any(has_line_with_words(note, "nano 'dog', 'mountain' trained") for note in notes)
    assert any(has_line_with_words(note, "nano 64x64 17 frames 32x32 5 frames") for note in notes)
    assert any(has_line_with_words(note, "guidance negative prompt no effect") for note in notes)
    unguided_notes = server.wait_until_finished(server.post_video(guidance_scale=1, cache="auto")["id"])["notes"]
    assert any(has_line_with_words(note, "cache auto nothing to reuse") for note in unguided_notes)
    assert not any(
        has_line_with_words(note, "guidance") for note in unguided_notes
    )  # without a negative prompt, guidance needs no note


def test_forms_and_json_make_the_same_request(start, pipe):
    server = start(work=False)
    data = {name: str(value) for name, value in SMALL.items()} | {"seed": "3", "negative_prompt": ""}
    form = server.client.post("/v1/videos", data=data, files={"input_reference": ("a.png", picture())}).json()
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    requested = [
        server.post_video(seed=3, input_reference={"image_url": url}),
        server.post_video(seed=3, image=url),
        form,
    ]
    assert all(job["settings"] == requested[0]["settings"] and job["pictures"] == ["image"] for job in requested)
    files = [(server.folder / id / "image.png").read_bytes() for id in server.jobs()]
    assert len(set(files)) == 1
    assert server.post_video(seconds="0.6", frames=None, fps=8)["settings"]["frames"] == 5
    assert [job["queue_position"] for job in server.client.get("/v1/videos?order=asc").json()["data"]] == [0, 1, 2, 3]
    assert server.post_video(seed=-1)["settings"]["seed"] >= 0


def test_a_picture_begins_a_video(start):
    server = start()
    url = "data:image/jpeg;base64," + base64.b64encode(picture(kind="JPEG")).decode()
    result = server.wait_until_finished(server.post_video(image=url)["id"])
    assert result["status"] == "completed", result["error"]
    folder = server.folder / result["id"]
    metadata = read_metadata(folder / "video.mp4")
    assert metadata["image"] == "image.png"
    assert metadata["digests"] == {"image.png": digest_of(folder / "image.png")}


def write_clip(path, frames, shade=0):
    """Write a clip with different frames, and return its path."""
    steps = np.arange(frames, dtype=np.uint8)[:, None, None, None] * 20 + shade
    return write_video(path, np.broadcast_to(steps, (frames, 32, 32, 3)), 8)


# Without a worker, nothing is made: test_an_input_of_one_family_is_a_field makes a video of an input of its model.
WITH_WORKER = pytest.mark.parametrize("with_worker", quick([False], [False, True]))


def url(data):
    return "data:;base64," + base64.b64encode(data).decode()


def test_a_clip_begins_a_video(start, pipe, tmp_path):
    """An mp4 in a form and an animation in JSON give the frames of the library, and can be downloaded."""
    server, clips = start(), [write_clip(tmp_path / "a.mp4", 9), write_clip(tmp_path / "a.gif", 9)]
    fields = {name: str(value) for name, value in SMALL.items()} | {"strength": "0.5", "seed": "3"}
    response = server.client.post("/v1/videos", data=fields, files={"video": ("any", clips[0].read_bytes())})
    requested = [response.json(), server.post_video(video=url(clips[1].read_bytes()), strength=0.5, seed=3)]
    for job, clip in zip(requested, clips, strict=True):
        result = server.wait_until_finished(job["id"])
        assert result["status"] == "completed", result["error"]
        assert result["pictures"] == ["clip"]
        assert server.content(job["id"], variant="clip") == clip.read_bytes()
        (tmp_path / "served.mp4").write_bytes(server.content(job["id"]))
        expected = pipe("a red circle", size=(32, 32), frames=5, steps=2, seed=3, strength=0.5, video=clip)
        expected.save(tmp_path / "expected.mp4")
        np.testing.assert_array_equal(
            read_clip(tmp_path / "served.mp4", 9, 8), read_clip(tmp_path / "expected.mp4", 9, 8)
        )


def test_an_input_of_one_family_is_a_field(start, tmp_path, monkeypatch):
    """A registered family adds the field, and the frames equal those of the library."""
    monkeypatch.setattr(registry, "FAMILIES", [*registry.FAMILIES])
    monkeypatch.setitem(INPUT_SPECS, DRIVING.name, DRIVING)
    wanjax.register(TOY_SOUND)
    pipe = wanjax.load(write_checkpoint(tmp_path / "toy", TOY_SOUND))
    server, clip = start(loaded_models=LoadedModels(pipe)), write_clip(tmp_path / "a.gif", 5)
    reference_picture = url(picture((64, 64)))
    [model] = server.client.get("/v1/models").json()["data"]
    assert not model["pictures"]["driving"]["required"]
    requested = server.post_video(image=reference_picture, driving=url(clip.read_bytes()), size=None, seed=3)
    assert server.wait_until_finished(requested["id"])["status"] == "completed"
    (tmp_path / "served.mp4").write_bytes(server.content(requested["id"]))
    (tmp_path / "page.png").write_bytes(picture((64, 64)))
    expected = pipe("a red circle", frames=5, steps=2, seed=3, image=tmp_path / "page.png", driving=clip)
    expected.save(tmp_path / "expected.mp4")
    np.testing.assert_array_equal(read_clip(tmp_path / "served.mp4", 5, 8), read_clip(tmp_path / "expected.mp4", 5, 8))
    assert "driving" in start(tmp_path / "nano", work=False).refused(422, json=SMALL | {"driving": reference_picture})


@WITH_WORKER
def test_a_clip_a_mask_and_references_guide_a_video(start, tmp_path, with_worker):
    """The model is VACE."""
    server = start(
        loaded_models=LoadedModels(wanjax.load(tiny_control_checkpoint(tmp_path / "control"))), work=with_worker
    )
    [model] = server.client.get("/v1/models").json()["data"]
    assert list(model["pictures"]) == ["image", "last_image", "video", "mask", "references"]
    assert "strength" not in model["settings"]
    assert model["settings"]["outpaint"]["default"] == "0,0,0,0"
    assert has_line_with_words(server.refused(422, json=SMALL | {"outpaint": "8,8"}), "outpaint four 120,0,120,0")
    message = server.refused(422, json=SMALL | {"references": ["data:;base64,AAAA"] * 9})
    assert has_line_with_words(message, "9 references 4")
    fields = {"video": url(write_clip(tmp_path / "a.mp4", 5).read_bytes()), "mask": url(picture((32, 32)))}
    fields |= {"references": [url(picture()), url(picture((20, 20)))]}
    requested = server.post_video(**fields, fps=8, outpaint="8,0,8,0")
    assert requested["pictures"] == ["clip", "mask", "references_0", "references_1"]
    if with_worker:
        assert server.wait_until_finished(requested["id"])["status"] == "completed"
        metadata = server.client.get(f"/v1/videos/{requested['id']}/record").json()
        files = [Path(file).stem for file in (metadata["video"], metadata["mask"], *metadata["references"])]
        assert files == requested["pictures"]
        assert metadata["outpaint"] == "8,0,8,0"


@WITH_WORKER
def test_a_character_moves_as_in_a_driving_clip(start, tmp_path, with_worker):
    """The model is Wan Animate 2. The video is as long as the clip, and its frames equal those of the library."""
    pipe = wanjax.load(tiny_animate_checkpoint(tmp_path / "animate"), dtype="float32")
    server, clip, character = (
        start(loaded_models=LoadedModels(pipe), work=with_worker),
        write_clip(tmp_path / "a.mp4", 5),
        picture((48, 64)),
    )
    [model] = server.client.get("/v1/models").json()["data"]
    assert [name for name, schema in model["pictures"].items() if schema["required"]] == ["image", "video"]
    assert "clip_prompt" in model["settings"]
    settings = {"prompt": "a woman", "steps": 2, "seed": 3, "clip_prompt": "a dancer"}
    assert has_line_with_words(server.refused(422, json=settings | {"image": url(character)}), "driving clip video")
    response = server.client.post(
        "/v1/videos",
        data={name: str(value) for name, value in settings.items()},
        files={"image": ("a.png", character), "video": ("a.mp4", clip.read_bytes())},
    )
    assert response.status_code == 200, response.text
    assert response.json()["pictures"] == ["image", "clip"]
    if with_worker:
        result = server.wait_until_finished(response.json()["id"])
        assert result["status"] == "completed", result["error"]
        (tmp_path / "served.mp4").write_bytes(server.content(result["id"]))
        (tmp_path / "character.png").write_bytes(character)
        expected = pipe(image=tmp_path / "character.png", video=clip, **settings)
        expected.save(tmp_path / "expected.mp4")
        served = read_clip(tmp_path / "served.mp4", 99, 24)
        assert len(served) == len(expected.frames) == 15
        np.testing.assert_array_equal(served, read_clip(tmp_path / "expected.mp4", 99, 24))


@WITH_WORKER
def test_clips_of_poses_and_of_a_face_move_a_character(start, tmp_path, with_worker):
    """The video is as long as the pose clip."""
    server = start(loaded_models=LoadedModels(wanjax.load(tiny_pose_checkpoint(tmp_path / "pose"))), work=with_worker)
    [model] = server.client.get("/v1/models").json()["data"]
    needs = {name: entry["required"] for name, entry in model["pictures"].items()}
    assert needs == {"image": True, "video": True, "face": True, "background": False, "mask": False}
    clips = {name: url(write_clip(tmp_path / f"{name}.gif", 9).read_bytes()) for name in ("video", "face")}
    assert "face" in server.refused(422, json=SMALL | {"image": url(picture()), "video": clips["video"]})
    requested = server.post_video(**clips, image=url(picture()), fps=8)
    assert requested["pictures"] == ["image", "clip", "face"]
    assert requested["settings"]["windows"] == 2
    if with_worker:
        result = server.wait_until_finished(requested["id"])
        assert result["status"] == "completed", result["error"]
        assert result["settings"]["windows"] == 2
        (tmp_path / "served.mp4").write_bytes(server.content(requested["id"]))
        assert len(read_clip(tmp_path / "served.mp4", 100, 8)) == 9


def test_models_and_settings_are_listed(start, pipe):
    [model] = start(work=False).client.get("/v1/models").json()["data"]
    assert model["defaults"] == pipe.defaults.to_json()
    assert next(iter(model["sizes"].items())) == ("64p", "64x64")
    assert {"guidance_scale_2", "boundary", "dynamic_guidance", "dtype"}.isdisjoint(model["settings"])
    assert model["settings"]["resize"]["enum"] == ["crop", "pad", "stretch"]
    assert model["settings"]["steps"]["default"] == pipe.defaults.steps
    assert {name: model["settings"][name]["maximum"] for name in ("steps", "fps")} == {"steps": 200, "fps": 240}
    assert all(setting["description"] for name, setting in model["settings"].items() if name != "prompt")
    assert (model["schedulers"][0], model["started_with"]["dtype"]) == ("unipc", "float32")


def test_a_seed_is_drawn_if_none_is_requested(start):
    server = start(work=False)
    drawn = [server.post_video()["settings"]["seed"] for _ in range(3)]
    assert len(set(drawn)) == 3
    assert server.post_video(seed=42)["settings"]["seed"] == 42
    assert server.post_video(size="64p")["size"] == "64x64"


def test_events_report_the_progress_of_a_video(start):
    server = start()
    response = server.client.get(f"/v1/videos/{server.post_video(steps=99)['id']}/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    progress = [event["progress"] for event in events]
    assert progress == sorted(progress)
    assert events[-1]["status"] == "completed"
    stages = list(dict.fromkeys(event["stage"] for event in events if event["stage"]))
    assert set(stages) <= {"compile", "encode", "denoise", "decode"}
    assert "denoise" in stages


def test_videos_are_listed_in_pages(start):
    server = start(work=False)
    ids = [server.post_video(seed=seed)["id"] for seed in range(5)]
    reference_picture = server.client.get("/v1/videos?limit=2").json()
    assert (
        [job["id"] for job in reference_picture["data"]]
        == [ids[4], ids[3]]
        == [reference_picture["first_id"], reference_picture["last_id"]]
    )
    assert reference_picture["has_more"]
    rest = server.client.get(f"/v1/videos?limit=3&after={ids[3]}").json()
    assert [job["id"] for job in rest["data"]] == ids[2::-1]
    assert not rest["has_more"]


def test_the_list_is_in_the_order_of_requests(start):
    """The order does not depend on the clock, and stays after a restart."""
    server = start(work=False)
    ids = [server.post_video()["id"] for _ in range(3)]
    for id, seconds in zip(ids, (3000.0, 1000.0, 2000.0), strict=True):
        update_row(server, id, created_at=seconds)

    def ids_of(server, **query):
        return [job["id"] for job in server.client.get("/v1/videos", params=query).json()["data"]]

    assert (ids_of(server), ids_of(server, order="asc")) == (ids[::-1], ids)
    assert ids_of(server, after=ids[1]) == ids[:1]
    server.stop()
    assert ids_of(start(work=False)) == ids[::-1]


def test_queued_and_running_jobs_are_cancelled(start, monkeypatch):
    server = start()
    started, go = threading.Event(), threading.Event()
    latents = Run.latents

    def slow(*arguments, **options):
        started.set()
        assert go.wait(60)
        yield from latents(*arguments, **options)

    heartbeat, cancellations = JobStore.heartbeat, threading.Semaphore(0)

    def count_cancellations(*arguments):
        signal = heartbeat(*arguments)
        if signal is Signal.CANCEL:
            cancellations.release()
        return signal

    monkeypatch.setattr(Run, "latents", slow)
    monkeypatch.setattr(JobStore, "heartbeat", count_cancellations)
    ids = [server.post_video(seed=seed)["id"] for seed in range(4)]
    assert started.wait(60)
    for id in ids[:2]:
        assert server.client.post(f"/v1/videos/{id}/cancel").status_code == 200
    for _ in range(2):  # after the second, the worker has stored the first
        assert cancellations.acquire(timeout=60)
    for id in ids[2:3]:
        assert server.client.delete(f"/v1/videos/{id}").json() == {
            "id": id, "object": "video.deleted", "deleted": True
        }  # fmt: skip
    go.set()
    ends = [server.wait_until_finished(id) for id in (ids[0], ids[1], ids[3])]
    assert [end["status"] for end in ends] == ["failed", "failed", "completed"]
    assert ends[0]["error"] == ends[1]["error"] == {"code": "cancelled", "message": "the video was cancelled"}
    assert server.client.get(f"/v1/videos/{ids[2]}").status_code == 404
    assert server.is_cleared(ids[2])
    assert server.client.get(f"/v1/videos/{ids[0]}/content").status_code == 409


def test_a_video_is_cancelled_between_two_programs(start, monkeypatch):
    """Only the programs that already compile are finished. The server reports how many have started."""
    server, started, go, names = start(), threading.Event(), threading.Event(), []
    compiled = TracedProgram.compile

    def slow(instance, *options):
        names.append(instance.program.name)
        if len(names) > 1:  # two programs compile at a time
            if len(names) == 3:
                started.set()
            assert go.wait(60)
        return compiled(instance, *options)

    monkeypatch.setattr(TracedProgram, "compile", slow)
    id = server.post_video(size="48x32", frames=9)["id"]
    assert started.wait(60)
    while (video := server.client.get(f"/v1/videos/{id}").json())["stage_done"] < 3:
        time.sleep(0.02)  # the worker reports it twice a second
    assert (video["stage"], video["stage_done"], video["progress"]) == ("compile", 3, 0)
    assert video["stage_total"] > 3
    assert not video["cancelled"]
    body = server.client.post(f"/v1/videos/{id}/cancel").json()
    assert body["cancelled"]
    assert body["version"] > video["version"]
    time.sleep(2.5 * HEARTBEAT_INTERVAL)  # until the worker knows of the cancellation
    go.set()
    assert server.wait_until_finished(id)["error"]["code"] == "cancelled"
    assert len(names) == 3


def test_a_request_may_choose_another_scheduler(start, pipe):
    server = start()
    result = server.wait_until_finished(server.post_video(scheduler="euler")["id"])
    assert result["status"] == "completed", result["error"]
    assert (result["scheduler"], pipe.model.scheduler) == ("euler", UniPC())
    assert server.client.get(f"/v1/videos/{result['id']}/record").json()["scheduler"] == "euler"


def write_lora(file):
    """Write a random LoRA for nano, and return its file."""
    random, factors = np.random.default_rng(0), {"down": (2, 192), "up": (192, 2)}
    tensors = {f"blocks.1.self_attn.q.lora_{part}.weight": random.normal(size=shape) for part, shape in factors.items()}
    save_safetensors(file, {f"diffusion_model.{name}": x.astype(np.float32) for name, x in tensors.items()})
    return file


def with_lora(model, file):
    """Return the loaded models of a server with a LoRA of strength 0.5."""

    def load(name, loras):
        return wanjax.load(name, lora=loras)

    loras = [Lora(str(file), 0.5)]
    return LoadedModels(load(model, loras), loras, load)


def test_metadata_is_a_valid_request(start, pipe):
    """Settings that only the server can choose are accepted if they equal the server's, and else refused."""
    server = start(work=False)
    metadata = pipe.metadata(pipe.settings(prompt="a red circle", size=(32, 32), frames=5, steps=2, seed=7), {})
    assert metadata["strength"] == pipe.defaults.strength
    response = server.client.post("/v1/videos", json=metadata)
    assert response.status_code == 200, response.text
    video = response.json()
    assert (video["settings"]["seed"], video["settings"]["steps"]) == (7, 2)
    assert has_line_with_words(server.refused(422, json=SMALL | {"dtype": "float64"}), "'dtype' server started_with")


def test_metadata_names_no_folder(start, tmp_path, monkeypatch):
    """Metadata names files without folders, with their digests. A user with the files can reproduce the video."""
    packaged = wanjax.load("nano").components.source
    model, lora = tmp_path / "models" / "my-nano", tmp_path / "loras" / "red.safetensors"
    shutil.copytree(packaged.root, model)
    lora.parent.mkdir()
    server = start(loaded_models=with_lora(str(model), write_lora(lora)))
    requested = server.post_video(
        image=url(picture()), seed=3, model="my-nano", lora="red:2"
    )  # this loads the model again
    result = server.wait_until_finished(requested["id"])
    assert result["status"] == "completed", result["error"]
    video_file = tmp_path / "film.mp4"
    video_file.write_bytes(server.content(result["id"]))
    metadata = server.client.get(f"/v1/videos/{result['id']}/record").json()
    assert read_metadata(video_file) == metadata
    assert (metadata["model"], metadata["lora"], metadata["image"]) == ("my-nano", ["red.safetensors:2.0"], "image.png")
    png = server.folder / result["id"] / "image.png"
    files = {"my-nano": model, "red.safetensors": lora, "image.png": png}
    assert metadata["digests"] == {name: digest_of(file) for name, file in files.items()}
    paths = [
        "videos",
        "models",
        f"videos/{result['id']}",
        f"videos/{result['id']}/record",
        f"videos/{result['id']}/events",
    ]
    everything = "".join(server.client.get(f"/v1/{path}").text for path in paths)
    everything += server.client.get("/health").text + server.client.get("/metrics").text + str(video_file.read_bytes())
    assert str(tmp_path) not in everything
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    options: list[str] = []
    for name, option, file in (("image.png", "--image", png), ("red.safetensors", "--lora", lora)):
        assert has_line_with_words(refused("generate", "--from", str(video_file), *options), f"{name} {option}")
        options += [option, f"{file}:2" if option == "--lora" else str(file)]
    assert has_line_with_words(refused("generate", "--from", str(video_file), *options), "my-nano --model")
    succeeded(
        wanjax_command("generate", "--from", video_file, *options, "--model", model, "--out", tmp_path / "again.mp4")
    )
    np.testing.assert_array_equal(read_clip(video_file, 9, 8), read_clip(tmp_path / "again.mp4", 9, 8))


def test_a_request_may_choose_the_strength_of_a_lora(start, tmp_path):
    """Each strength gives another video; the other networks stay loaded."""
    file = tmp_path / "more red.safetensors"
    variants = with_lora("nano", write_lora(file))
    server, encoder = start(loaded_models=variants), variants.model(None).text_encoder
    assert server.client.get("/v1/models").json()["data"][0]["loras"] == [{"name": "more_red", "strength": 0.5}]
    for wrong, words in (("more_red", "lora 'more_red' more_red:0.5"), ({"x": 1}, "LoRA 'x' more_red")):
        assert has_line_with_words(server.refused(422, json=SMALL | {"lora": wrong}), words)
    assert has_line_with_words(server.refused(422, json=SMALL | {"lora": {"more_red": True}}), "lora true")
    requested = [{}, {"lora": "more_red:2"}, {"lora": {"more_red": 0}}, {}]
    result = [server.wait_until_finished(server.post_video(seed=3, **more)["id"]) for more in requested]
    assert [job["lora"] for job in result] == [[{"name": "more_red", "strength": x}] for x in (0.5, 2.0, 0.0, 0.5)]
    lora_metadata = [server.client.get(f"/v1/videos/{job['id']}/record").json()["lora"] for job in result]
    assert lora_metadata == [[str(Lora(file.name, x))] for x in (0.5, 2.0, 0.0, 0.5)]
    contents = [server.content(job["id"]) for job in result]
    assert len(set(contents[:3])) == 3
    assert contents[3] == contents[0]
    assert variants.model(None).text_encoder is encoder


def test_a_running_job_that_is_removed_leaves_nothing(start, monkeypatch):
    server = start()
    started, go = threading.Event(), threading.Event()
    encode = Run.encode
    monkeypatch.setattr(Run, "encode", lambda *a, **k: (started.set(), go.wait(60), encode(*a, **k))[2])
    id = server.post_video()["id"]
    assert started.wait(60)
    assert server.client.delete(f"/v1/videos/{id}").status_code == 200
    go.set()
    assert server.wait_until_finished(server.post_video(seed=1)["id"])["status"] == "completed"
    assert server.is_cleared(id)


def test_a_failure_ends_only_its_job(start, monkeypatch, caplog):
    server = start()
    encode = Run.encode
    failures = [RuntimeError("a bug"), MemoryError()]

    def failing(*arguments, **options):
        if failures:
            raise failures.pop(0)
        return encode(*arguments, **options)

    monkeypatch.setattr(Run, "encode", failing)
    errors = [server.wait_until_finished(server.post_video()["id"])["error"] for _ in range(2)]
    assert [error["code"] for error in errors] == ["server_error"] * 2
    assert "a bug" not in errors[0]["message"]
    assert "memory" in errors[1]["message"]
    assert server.wait_until_finished(server.post_video()["id"])["status"] == "completed"


def test_jobs_of_a_killed_server_are_resumed(start, tmp_path):
    """After a kill, one video is finished, one is made but its job is not finished, one is running, one queued."""
    first = start()
    ids = [first.wait_until_finished(first.post_video(seed=seed)["id"])["id"] for seed in range(2)]
    first.stop()
    waiting = start(work=False)
    update_row(waiting, ids[1], status="in_progress", worker="a dead worker")
    ids += [waiting.post_video(seed=seed)["id"] for seed in (2, 3)]
    waiting.store.add(NewJob(half_received := new_id(), {}, "nano", output_path(half_received)), is_arriving=True)
    update_row(waiting, half_received, created_at=0.0)
    for id in (half_received, "video_of_another_server"):
        (waiting.folder / id).mkdir()
    assert waiting.lease() == [ids[2]]
    waiting.kill()
    again = start()
    assert [again.wait_until_finished(id)["status"] for id in ids] == ["completed"] * 4
    assert all(again.client.get(f"/v1/videos/{id}/content").status_code == 200 for id in ids)
    assert again.is_cleared(half_received)
    assert (again.folder / "video_of_another_server").exists()  # no row of the database names it


def test_a_large_clip_keeps_its_place_in_the_queue(start, tmp_path, monkeypatch):
    """Another request arrives during its upload; the order stays after a restart."""
    server, save = start(work=False), uploads.save_pictures

    def slow(pictures, *how, **options):
        if pictures:
            server.post_video(seed=1)
        return save(pictures, *how, **options)

    monkeypatch.setattr(uploads, "save_pictures", slow)
    server.post_video(seed=2, video=url(write_clip(tmp_path / "a.mp4", 9).read_bytes()))
    before = server.queue
    assert len(before) == 2
    server.kill()
    assert start(work=False).queue == before


def update_row(server, id, **columns):
    """Change the row of a job in the database."""
    server.store._run(lambda db: db.update(id, **columns))


def test_removed_and_cancelled_jobs_do_not_return(start):
    """The server is killed after its responses, before it removes files."""
    server = start(work=False)
    ids = [server.post_video(seed=seed)["id"] for seed in range(4)]
    assert server.lease(2) == ids[:2]
    for id in (ids[0], ids[2]):
        assert server.client.post(f"/v1/videos/{id}/cancel").status_code == 200
    for id in (ids[1], ids[3]):
        assert server.client.delete(f"/v1/videos/{id}").status_code == 200
    server.kill()
    again = start()
    states = {id: again.client.get(f"/v1/videos/{id}") for id in ids}
    assert [states[id].status_code for id in ids] == [200, 404, 200, 404]
    assert [states[id].json()["error"]["code"] for id in (ids[0], ids[2])] == ["cancelled"] * 2
    assert all(again.is_cleared(id) for id in (ids[1], ids[3]))


def test_a_second_server_on_a_folder_is_refused(start):
    first = start(work=False)
    with pytest.raises(WanjaxError, match=line_with_words(f"server {first.folder} --dir")):
        start(work=False)
    first.stop()
    start(work=False)


def set_writable(server, allowed):
    """Allow or forbid writing to the database."""
    database, connect = server.store._database, Sqlite._connect

    def read_only():
        connection = connect(database)
        connection.execute("PRAGMA query_only = ON")
        return connection

    database._writer._connect = (lambda: connect(database)) if allowed else read_only
    database._writer._drop()


def test_a_full_disk_refuses_requests_and_loses_none(start):
    server = start(work=False)
    id = server.post_video()["id"]
    set_writable(server, False)
    answers = [server.client.post("/v1/videos", json=SMALL), server.client.post(f"/v1/videos/{id}/cancel")]
    answers.append(server.client.delete(f"/v1/videos/{id}"))
    assert [result.status_code for result in answers] == [507] * 3
    assert all(result.json()["error"]["code"] == "storage" for result in answers)
    set_writable(server, True)
    server.worker.start()
    assert server.wait_until_finished(id)["status"] == "completed"


def test_no_path_of_the_server_is_revealed(start, tmp_path):
    server = start(work=False)
    with_clip = server.client.post(
        "/v1/videos", data=SMALL, files={"video": write_clip(tmp_path / "a.mp4", 5).read_bytes()}
    ).json()["id"]
    (server.folder / with_clip / "clip.mp4").unlink()
    broken = server.post_video()["id"]
    server.worker.start()
    assert server.wait_until_finished(broken)["status"] == "completed"
    (server.folder / broken / "video.mp4").write_bytes(b"no film")
    response = server.client.get(f"/v1/videos/{broken}/record")
    assert response.status_code == 422
    failed = server.wait_until_finished(with_clip)
    assert failed["status"] == "failed"
    assert has_line_with_words(failed["error"]["message"], "clip.mp4")
    everything = response.text + server.client.get("/v1/videos").text + server.client.get("/v1/models").text
    assert str(server.folder) not in everything


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("there is no file /srv/my videos/video_1/a b.png", "there is no file a b.png"),
        ("'/home/someone/loras/x.safetensors' and (/etc/y.bin) cannot be read", "'x.safetensors' and (y.bin) cannot"),
        ("16/9 or and/or http://localhost:8000/v1/videos", "16/9 or and/or http://localhost:8000/v1/videos"),
    ],
)
def test_paths_in_messages_become_file_names(message, expected):
    assert strip_folders(message, [Path("/srv/my videos/video_1"), Path("/srv")]).startswith(expected)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB, and a function that fills or empties it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    result = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder], capture_output=True, check=False)
    if result.returncode:
        pytest.skip("no file system may be mounted here")

    def fill(full):
        (folder / "rest").unlink(missing_ok=True)
        with suppress(OSError), (folder / "rest").open("wb", buffering=0) as file:
            while full:
                file.write(bytes(4096))

    yield folder, fill
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_server_recovers_from_a_full_disk(start, small_disk, tmp_path):
    folder, fill = small_disk
    server = start(folder / "served")
    done = server.wait_until_finished(server.post_video()["id"])["id"]
    fill(True)
    accepted, answers = 0, []
    while len(answers) < 3:  # three in a row: the log of the database has reserved space, and the worker frees some
        answers.append(server.client.post("/v1/videos", json=SMALL))
        if answers[-1].status_code == 200:
            accepted, answers = accepted + 1, []
        assert accepted < 1000
    answers.append(
        server.client.post("/v1/videos", data=SMALL, files={"video": write_clip(tmp_path / "a.mp4", 5).read_bytes()})
    )
    assert {result.status_code for result in answers} == {507}
    assert all(result.json()["error"]["code"] == "storage" for result in answers)
    assert not any(str(folder) in result.text for result in answers)
    assert server.client.delete(f"/v1/videos/{done}").status_code == 200  # deleting must work on a full disk
    fill(False)
    waiting = server.post_video(steps=60)["id"]
    while not server.client.get(f"/v1/videos/{waiting}").json()["stage_done"]:
        time.sleep(0.01)
    fill(True)
    failed = server.wait_until_finished(waiting)
    assert failed["error"]["code"] == "storage"
    assert str(folder) not in json.dumps(failed)
    fill(False)
    assert server.wait_until_finished(server.post_video()["id"])["status"] == "completed"


def test_a_job_that_kills_the_server_is_retried_a_limited_number_of_times(start):
    first = start(work=False)
    ids = [first.post_video()["id"] for _ in range(2)]
    first.stop()
    again = start(work=False)
    for id, attempts in zip(ids, (1, 2), strict=True):
        update_row(again, id, status="in_progress", worker="one that died", attempts=attempts)
    again.worker.start()
    assert [again.wait_until_finished(id)["status"] for id in ids] == ["completed", "failed"]
    assert again.jobs()[ids[1]].error["code"] == STOPPED


def test_a_stopped_server_keeps_its_running_job(start, monkeypatch):
    server = start()
    latents = Run.latents

    def stop_then_denoise(*arguments, **options):
        server.worker.stop()
        yield from latents(*arguments, **options)

    monkeypatch.setattr(Run, "latents", stop_then_denoise)
    id = server.post_video()["id"]
    server.stop()
    monkeypatch.undo()
    again = start()
    result = again.wait_until_finished(id)
    assert result["status"] == "completed"
    assert again.jobs()[id].attempts == 1


def test_many_clients_at_once_get_their_videos(start):
    """A small version of benchmarks/serving.py: no request is lost, and no client gets another video."""
    server = start(queue=4)
    outcomes: Counter[str] = Counter()

    def post_until_accepted(**more):
        while (result := server.client.post("/v1/videos", json=SMALL | more)).status_code == 429:
            outcomes["full"] += 1
            time.sleep(0.02)
        return result

    def run_client(number):
        if number % 4 == 3:
            return f"refused by {post_until_accepted(steps='many').status_code}"
        result = post_until_accepted(seed=number)
        id = result.json()["id"]
        if number % 4 == 2:
            server.client.post(f"/v1/videos/{id}/cancel")
        output = server.wait_until_finished(id)
        metadata = output["status"] == "completed" and read_metadata(server.folder / id / "video.mp4")
        assert not metadata or metadata["seed"] == number == output["settings"]["seed"]
        return output["status"]

    with ThreadPoolExecutor(6) as pool:
        outcomes.update(pool.map(run_client, range(12)))
    assert outcomes["refused by 422"] == 3
    assert outcomes["completed"] >= 6
    assert outcomes["completed"] + outcomes["failed"] == 9
    assert server.client.get("/health").json()["status"] == "ready"


def test_compiled_programs_are_cleared_after_too_many_shapes(start, monkeypatch):
    monkeypatch.setattr(maker, "MAX_PROGRAM_KEYS", 1)
    dropped = []
    monkeypatch.setattr(maker.EXECUTE, "clear_programs", lambda: dropped.append(True))
    server = start()
    for size in ("32x32", "32x32", "64x64"):
        assert server.wait_until_finished(server.post_video(size=size)["id"])["status"] == "completed"
    assert len(dropped) == 1


@pytest.mark.parametrize("path", ["/v1/events", "/v1/videos/{}/events"])
def test_the_number_of_event_streams_is_limited(start, path):
    server = start(work=False, streams=0)
    response = server.client.get(path.format(server.post_video()["id"]))
    assert response.status_code == 429
    assert "events" in response.json()["error"]["message"]


def test_clients_choose_windows_and_the_operator_extends_prompts(start):
    """A client cannot choose the server that extends its prompt."""
    server = start()
    refused = server.client.post("/v1/videos", json=SMALL | {"extend_prompt": "http://127.0.0.1:1/v1"})
    assert refused.status_code == 422
    assert not server.client.get("/v1/models").json()["data"][0]["extends_prompts"]
    server.maker.extend_prompt = lambda text, has_picture: ExtendedPrompt(f"{text} moving", text)
    result = server.wait_until_finished(server.post_video(windows=3, then=["a blue circle"])["id"])
    assert result["status"] == "completed", result["error"]
    assert float(result["seconds"]) == 13 / result["settings"]["fps"]
    metadata = server.client.get(f"/v1/videos/{result['id']}/record").json()
    assert metadata["prompt"] == "a red circle moving"
    assert metadata["then"] == "a blue circle moving"
    assert metadata["original_prompt"] == "a red circle\na blue circle"
    again = server.wait_until_finished(
        server.post_video(prompt="a red circle moving", original_prompt="a red circle")["id"]
    )
    metadata = server.client.get(f"/v1/videos/{again['id']}/record").json()  # an extended prompt is not extended again
    assert (metadata["prompt"], metadata["original_prompt"]) == ("a red circle moving", "a red circle")
    assert len(read_clip(server.folder / result["id"] / "video.mp4", 100, 100)) == 13
