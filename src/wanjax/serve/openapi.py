# SPDX-License-Identifier: Apache-2.0
"""The description of the HTTP interface for other programs: OpenAPI 3.1, from what the server tells of its models."""

from collections.abc import Mapping, Sequence
from typing import Any

from wanjax.pipelines.request import SAME_IMAGE, SECONDS, STRENGTH
from wanjax.pipelines.settings import ALLOW_EMPTY, Setting
from wanjax.serve.model_info import json_schema

TEXT, NUMBER, INTEGER, FLAG = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))
NOT_OF_JSON_SCHEMA = ("several",)  # words of a setting that the page alone reads
BROKEN = (400, 413, 415, 422, 429, 502, 503, 507)  # answers to a request for a video that none is made of
STATUSES = ("queued", "in_progress", "completed", "failed")


def document(models: Sequence[Mapping[str, Any]], version: str, prompt: int) -> dict[str, Any]:
    """Return the description of a server.

    Args:
        models: What clients are told of each, the served one first.
        version: That of wanjax.
        prompt: Characters of a prompt.
    """
    schemas = {
        "VideoRequest": _request(models, prompt, form=False),
        "VideoForm": _request(models, prompt, form=True),
        "Video": _video(models),
        "Videos": _list_of("Video") | {"properties": _list_of("Video")["properties"] | _page()},
        "Model": {"type": "object", "required": ["id", "object"], "properties": {"id": TEXT, "object": TEXT}},
        "Models": _list_of("Model"),
        "Deleted": _object(id=TEXT, object={"const": "video.deleted"}, deleted=FLAG),
        "Error": _object(
            error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=TEXT),
        ),
        "Health": _object(status=_choice("loading", "ready", "failed"), model=TEXT, queue=INTEGER, version=TEXT)
        | {"description": "`waits_for_workers_of` names models of which videos wait and that no worker makes."},
    }
    schemas["Health"]["properties"]["waits_for_workers_of"] = {"type": "array", "items": TEXT}
    return {
        "openapi": "3.1.0",
        "info": {"title": "wanjax", "version": version, "description": "Videos in the shape of OpenAI's videos API."},
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _request(models: Sequence[Mapping[str, Any]], prompt: int, *, form: bool) -> dict[str, Any]:
    """Return the schema of a request: the settings of all models, and what stands beside them."""
    settings: dict[str, dict[str, Any]] = {}
    for model in reversed(models):  # the served one's words win
        settings |= {name: _setting(words) for name, words in model["settings"].items()}
    for name in ("prompt", "negative_prompt", "then"):
        if name in settings:
            settings[name]["maxLength"] = prompt
    settings["prompt"] |= {"description": "What the video shows."}
    settings["prompt"].pop("default", None)
    sizes = {name: size for model in models for name, size in model["sizes"].items()}
    listed = "; ".join(f"{name} is {size}" for name, size in sizes.items())
    beside = {
        "size": TEXT | {"description": f"WIDTHxHEIGHT in pixels, or a name: {listed}.", "examples": [*sizes.values()]},
        SECONDS.name: _bounds(SECONDS, "In place of frames."),
        "model": _choice(*(model["id"] for model in models)) | {"description": "The model, the first one by default."},
        "scheduler": _choice(*dict.fromkeys(name for model in models for name in model["schedulers"]))
        | {"description": "The solver; the model's own by default."},
        STRENGTH.name: {
            "type": ["object", "string"],
            "description": "The strength of each LoRA by name, or a text such as NAME:0.5.",
            "additionalProperties": _bounds(STRENGTH, ""),
        },
        ALLOW_EMPTY.name: FLAG | {"description": "Make a video from an empty prompt."},
    }
    pictures = {name: picture for model in models for name, picture in model["pictures"].items()}
    if "image" in pictures and not pictures["image"]["required"]:
        pictures[SAME_IMAGE] = pictures["image"] | {"description": f"As image. {pictures['image']['description']}"}
    files = {name: _file(picture, form) for name, picture in pictures.items()}
    needed = [name for name, picture in pictures.items() if picture["required"] and len(models) == 1]
    return {"type": "object", "required": ["prompt", *needed], "properties": settings | beside | files}


def _setting(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return a setting in the words of JSON Schema; one of several texts may be a list."""
    schema = {name: value for name, value in words.items() if name not in NOT_OF_JSON_SCHEMA}
    if words.get("several"):
        schema |= {"type": ["string", "array"], "items": TEXT}
    return schema


def _file(picture: Mapping[str, Any], form: bool) -> dict[str, Any]:
    """Return the schema of a picture or a clip: a file of a form, or a data: URL, alone or as OpenAI's image_url."""
    if form:
        one: dict[str, Any] = {"type": "string", "contentMediaType": "application/octet-stream"}
    else:
        url = {"type": "string", "pattern": "^data:", "description": "A data: URL; no address is fetched."}
        one = {"anyOf": [url, _object(image_url=url)]}
    schema = {"anyOf": [one, {"type": "array", "items": one}]} if picture["several"] else one
    return schema | {"description": picture["description"]}


def _video(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    settings = {name: {"description": words["description"]} for name, words in models[0]["settings"].items()}
    fields = {
        "id": TEXT,
        "object": {"const": "video"},
        "model": TEXT,
        "status": _choice(*STATUSES),
        "progress": INTEGER | {"minimum": 0, "maximum": 100},
        "created_at": INTEGER | {"description": "Seconds since 1970."},
        "completed_at": _or_null(INTEGER),
        "expires_at": {"type": "null"},
        "prompt": TEXT,
        "size": TEXT | {"description": "WIDTHxHEIGHT."},
        "seconds": TEXT,
        "error": _or_null(_object(code=TEXT, message=TEXT)),
        "remixed_from_video_id": {"type": "null"},
        "settings": {"type": "object", "properties": settings},
        "scheduler": _or_null(TEXT),
        "lora": {"type": "array", "items": _object(name=TEXT, strength=NUMBER)},
        "cancelled": FLAG | {"description": "Whether the video is to end, or was ended, before its time."},
        "pictures": {"type": "array", "items": TEXT, "description": "Variants of the content that it was made from."},
        "window": INTEGER | {"description": "The window that is made now, from 1."},
        "stage": _choice("", "extend", "compile", "encode", "denoise", "decode"),
        "stage_done": INTEGER | {"description": "Of stage_total programs, steps or chunks of the stage."},
        "stage_total": INTEGER,
        "stage_seconds": {"type": "object", "additionalProperties": NUMBER},
        "preview": INTEGER | {"description": "The steps after which the last preview was made; 0 where there is none."},
        "notes": {"type": "array", "items": TEXT},
        "version": INTEGER | {"description": "It grows with each change of any video."},
        "queue_position": _or_null(INTEGER) | {"description": "How many videos end before this one begins."},
    }
    return _object(**fields)


def _paths() -> dict[str, Any]:
    id = {"name": "id", "in": "path", "required": True, "schema": TEXT}
    limit = INTEGER | {"minimum": 1, "maximum": 100, "default": 20}
    page = [
        _query("limit", limit),
        _query("after", TEXT | {"description": "The id of the video before the page."}),
        _query("order", _choice("asc", "desc") | {"default": "desc"}),
        _query("query", TEXT | {"description": "Words that the prompt contains, all of them, in any case of letters."}),
    ]
    variant = _query("variant", TEXT | {"default": "video", "description": "video, thumbnail, preview or a picture."})
    binary = {"schema": {"type": "string", "contentMediaType": "video/mp4"}}
    events = {"text/event-stream": {"schema": TEXT | {"description": "Each event's data is a Video, or a Deleted."}}}
    json = {"application/json": {"schema": _ref("VideoRequest")}, "multipart/form-data": {"schema": _ref("VideoForm")}}
    body = {"requestBody": {"required": True, "content": json}}
    health = _operation("get_health", "Tell whether a worker is ready.", _answer("Health"), 503)
    return {
        "/v1/videos": {
            "post": body | _operation("create_video", "Ask for a video.", _answer("Video"), *BROKEN),
            "get": _operation("list_videos", "List videos.", _answer("Videos"), 404, 422, 503) | {"parameters": page},
        },
        "/v1/videos/{id}": {
            "parameters": [id],
            "get": _operation("get_video", "Show a video.", _answer("Video"), 404, 503),
            "delete": _operation("delete_video", "Cancel and remove a video.", _answer("Deleted"), 404, 503, 507),
        },
        "/v1/videos/{id}/cancel": {
            "parameters": [id],
            "post": _operation("cancel_video", "Cancel a video.", _answer("Video"), 404, 503, 507),
        },
        "/v1/videos/{id}/content": {
            "parameters": [id],
            "get": _operation("get_content", "Send a finished video, or a part of it by Range.",
                              {"content": {"video/mp4": binary, "image/webp": {}, "image/png": {}}}, 404, 409, 422, 502)
            | {"parameters": [variant]},
        },
        "/v1/videos/{id}/record": {
            "parameters": [id],
            "get": _operation("get_record", "Send all that shaped a finished video.",
                              {"content": {"application/json": {"schema": {"type": "object"}}}}, 404, 409, 502),
        },
        "/v1/videos/{id}/events": {
            "parameters": [id],
            "get": _operation("follow_video", "Stream the changes of a video.", {"content": events}, 404, 429),
        },
        "/v1/events": {"get": _operation("follow_all", "Stream the changes of all videos.", {"content": events}, 429)},
        "/v1/models": {"get": _operation("list_models", "List the models with all that they take.", _answer("Models"))},
        "/v1/models/{id}": {
            "parameters": [id],
            "get": _operation("get_model", "Show a model.", _answer("Model"), 404),
        },
        "/health": {"get": health | {"security": []}},
        "/metrics": {
            "get": _operation("get_metrics", "Count videos and answers, for Prometheus.",
                              {"content": {"text/plain": {"schema": TEXT}}}),
        },
    }  # fmt: skip


def _operation(id: str, summary: str, answer: Mapping[str, Any], *errors: int) -> dict[str, Any]:
    error = {"description": "An error in OpenAI's form.", **_answer("Error")}
    responses = {"200": {"description": summary, **answer}} | {str(status): error for status in errors}
    return {"operationId": id, "summary": summary, "responses": responses}


def _answer(schema: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": _ref(schema)}}}


def _ref(schema: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _query(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "properties": properties}


def _list_of(schema: str) -> dict[str, Any]:
    return _object(object={"const": "list"}, data={"type": "array", "items": _ref(schema)})


def _page() -> dict[str, Any]:
    return {"first_id": _or_null(TEXT), "last_id": _or_null(TEXT), "has_more": FLAG}


def _choice(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values]}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _bounds(setting: Setting, description: str) -> dict[str, Any]:
    return json_schema(setting) | ({"description": description} if description else {})
