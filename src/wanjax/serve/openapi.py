# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI 3.1 description of the HTTP interface, generated from the model cards."""

from collections.abc import Mapping, Sequence
from typing import Any

from wanjax.pipelines.request import LORA_STRENGTH, OPENAI_IMAGE, SECONDS
from wanjax.pipelines.settings import ALLOW_EMPTY, Setting
from wanjax.serve.model_info import json_schema

TEXT, NUMBER, INTEGER, BOOLEAN = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))
PAGE_ONLY_KEYS = ("several",)  # keys in a setting's description that only the web page uses
COMMON_STATUSES = (401, 403, 413, 500, 503)  # errors of all operations: access, size, and failures of the server
READ_STATUSES = (422, 507)  # errors of all operations that read jobs: unknown query parameters, and a full disk
CREATE_STATUSES = (400, 408, 415, 429, 502, *READ_STATUSES)
STATUSES = ("queued", "in_progress", "completed", "failed")


def build_document(models: Sequence[Mapping[str, Any]], version: str, prompt: int) -> dict[str, Any]:
    """Return the OpenAPI description of a server.

    Args:
        models: The model cards, the served model first.
        version: The version of wanjax.
        prompt: The maximal length of a prompt, in characters.
    """
    schemas = {
        "VideoRequest": _request_schema(models, prompt, is_form=False),
        "VideoForm": _request_schema(models, prompt, is_form=True),
        "Video": _video_schema(models),
        "Videos": _list_schema("Video") | {"properties": _list_schema("Video")["properties"] | _page_fields()},
        "Model": {"type": "object", "required": ["id", "object"], "properties": {"id": TEXT, "object": TEXT}},
        "Models": _list_schema("Model"),
        "FileForm": _object_schema(file={"type": "string", "contentMediaType": "application/octet-stream"}),
        "FileFields": _object_schema(
            object={"const": "request"},
            source=_enum("workflow", "video"),
            fields={"type": "object", "description": "Fields of POST /v1/videos."},
            notes={"type": "array", "items": TEXT, "description": "What was left out, and what differs."},
        ),
        "Deleted": _object_schema(id=TEXT, object={"const": "video.deleted"}, deleted=BOOLEAN),
        "Error": _object_schema(
            error=_object_schema(message=TEXT, type=TEXT, param=_nullable(TEXT), code=TEXT),
        ),
        "Health": _object_schema(status=_enum("loading", "ready", "failed"), model=TEXT, queue=INTEGER, version=TEXT)
        | {"description": "`waits_for_workers_of` lists models with waiting videos but without a worker."},
    }
    schemas["Health"]["properties"]["waits_for_workers_of"] = {"type": "array", "items": TEXT}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "wanjax",
            "version": version,
            "description": "Video generation, with endpoints like those of OpenAI's videos API.",
        },
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _request_schema(models: Sequence[Mapping[str, Any]], prompt: int, *, is_form: bool) -> dict[str, Any]:
    """Return the schema of a request: the settings of all models, and the other fields."""
    settings: dict[str, dict[str, Any]] = {}
    for model in reversed(models):  # the served model's descriptions take precedence
        settings |= {name: _setting_schema(schema) for name, schema in model["settings"].items()}
    for name in ("prompt", "negative_prompt", "then"):
        if name in settings:
            settings[name]["maxLength"] = prompt
    settings["prompt"] |= {"description": "Text that describes the video."}
    settings["prompt"].pop("default", None)
    sizes = {name: size for model in models for name, size in model["sizes"].items()}
    size_list = "; ".join(f"{name} is {size}" for name, size in sizes.items())
    request_fields = {
        "size": TEXT
        | {"description": f"WIDTHxHEIGHT in pixels, or a name: {size_list}.", "examples": [*sizes.values()]},
        SECONDS.name: _bounded_number(SECONDS, "Length of the video, instead of frames.")
        | {"type": ["number", "string"]},  # clients of OpenAI's API send a text
        "model": _enum(*(model["id"] for model in models))
        | {"description": "The model. Default: the first of /v1/models."},
        "scheduler": _enum(*dict.fromkeys(name for model in models for name in model["schedulers"]))
        | {"description": "The scheduler. Default: the model's own."},
        LORA_STRENGTH.name: {
            "type": ["object", "string"],
            "description": "Strength of each LoRA by name, or a text such as NAME:0.5.",
            "additionalProperties": _bounded_number(LORA_STRENGTH, ""),
        },
        ALLOW_EMPTY.name: BOOLEAN | {"description": "Accept an empty prompt."},
    }
    pictures = {name: picture for model in models for name, picture in model["pictures"].items()}
    if "image" in pictures and not pictures["image"]["required"]:
        pictures[OPENAI_IMAGE] = pictures["image"] | {
            "description": f"Same as image. {pictures['image']['description']}"
        }
    files = {name: _file_schema(picture, is_form) for name, picture in pictures.items()}
    required = [name for name, picture in pictures.items() if picture["required"] and len(models) == 1]
    return {"type": "object", "required": ["prompt", *required], "properties": settings | request_fields | files}


def _setting_schema(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a setting. A setting of several lines may also be a list of texts."""
    schema = {name: value for name, value in setting.items() if name not in PAGE_ONLY_KEYS}
    if setting.get("several"):
        schema |= {"type": ["string", "array"], "items": TEXT}
    return schema


def _file_schema(picture: Mapping[str, Any], is_form: bool) -> dict[str, Any]:
    """Return the schema of a picture or a clip.

    In a form it is a file, and in JSON a data: URL, alone or in OpenAI's {"image_url": ...}.
    """
    if is_form:
        file: dict[str, Any] = {"type": "string", "contentMediaType": "application/octet-stream"}
    else:
        url = {"type": "string", "pattern": "^data:", "description": "A data: URL. Other URLs are not fetched."}
        file = {"anyOf": [url, _object_schema(image_url=url)]}
    schema = {"anyOf": [file, {"type": "array", "items": file}]} if picture["several"] else file
    return schema | {"description": picture["description"]}


def _video_schema(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    settings = {name: {"description": schema["description"]} for name, schema in models[0]["settings"].items()}
    fields = {
        "id": TEXT,
        "object": {"const": "video"},
        "model": TEXT,
        "status": _enum(*STATUSES),
        "progress": INTEGER | {"minimum": 0, "maximum": 100},
        "created_at": INTEGER | {"description": "Seconds since 1970."},
        "completed_at": _nullable(INTEGER),
        "expires_at": {"type": "null"},
        "prompt": TEXT,
        "size": TEXT | {"description": "WIDTHxHEIGHT."},
        "seconds": TEXT,
        "error": _nullable(_object_schema(code=TEXT, message=TEXT)),
        "remixed_from_video_id": {"type": "null"},
        "settings": {"type": "object", "properties": settings},
        "scheduler": _nullable(TEXT),
        "lora": {"type": "array", "items": _object_schema(name=TEXT, strength=NUMBER)},
        "cancelled": BOOLEAN | {"description": "Whether the video was cancelled, or will be after the current step."},
        "inputs": {
            "type": "object",
            "additionalProperties": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
            "description": "The file names of the request's pictures and clips by field, as in /record.",
        },
        "pictures": {
            "type": "array",
            "items": TEXT,
            "description": "Variants of /content with the pictures and clips of the request.",
        },
        "window": INTEGER | {"description": "The current window of the video, starting at 1."},
        "stage": _enum("", "extend", "compile", "encode", "denoise", "decode"),
        "stage_done": INTEGER | {"description": "Finished programs, steps or chunks of the stage, out of stage_total."},
        "stage_total": INTEGER,
        "stage_seconds": {"type": "object", "additionalProperties": NUMBER},
        "preview": INTEGER | {"description": "The step after which the last preview was written; 0 without a preview."},
        "notes": {"type": "array", "items": TEXT},
        "version": INTEGER | {"description": "A counter that increases with each change of any video."},
        "queue_position": _nullable(INTEGER)
        | {"description": "Number of videos that must end before this one starts."},
    }
    return _object_schema(**fields)


def _paths() -> dict[str, Any]:
    id = {"name": "id", "in": "path", "required": True, "schema": TEXT}
    limit = INTEGER | {"minimum": 1, "maximum": 100, "default": 20}
    page_parameters = [
        _query_parameter("limit", limit),
        _query_parameter("after", TEXT | {"description": "The id of the last video of the previous page."}),
        _query_parameter("order", _enum("asc", "desc") | {"default": "desc"}),
        _query_parameter("query", TEXT | {"description": "Words that must all occur in the prompt; case is ignored."}),
    ]
    variant = _query_parameter(
        "variant",
        TEXT | {"default": "video", "description": "video, thumbnail, preview, or one of the video's `pictures`."},
    )
    after = _query_parameter(
        "after",
        TEXT | {"description": "The server ignores the value. A new value makes a browser load the preview again."},
    )
    binary = {"schema": {"type": "string", "contentMediaType": "video/mp4"}}
    events = {
        "text/event-stream": {
            "schema": TEXT | {"description": "Server-sent events. The data of each is a Video or a Deleted."}
        }
    }
    request_formats = {
        "application/json": {"schema": _ref("VideoRequest")},
        "multipart/form-data": {"schema": _ref("VideoForm")},
    }
    body = {"requestBody": {"required": True, "content": request_formats}}
    files = {"content": {"video/mp4": binary, "image/webp": {}, "image/png": {}}}
    content = _operation(
        "get_content", "Download a completed video, or a byte range of it.", files, 404, 409, 416, 502, *READ_STATUSES
    )
    content["responses"]["206"] = {"description": "The part of the file that the header Range selects.", **files}
    health = _operation("get_health", "Get the state of the server.", _json_response("Health"))
    metrics = {"content": {"text/plain": {"schema": TEXT}}}
    video, record = _json_response("Video"), {"content": {"application/json": {"schema": {"type": "object"}}}}
    changes = {"content": events}
    return {
        "/v1/videos": {
            "post": body | _operation("create_video", "Request a video.", video, *CREATE_STATUSES),
            "get": _operation("list_videos", "List videos.", _json_response("Videos"), 404, *READ_STATUSES)
            | {"parameters": page_parameters},
        },
        "/v1/videos/{id}": {
            "parameters": [id],
            "get": _operation("get_video", "Get a video.", video, 404, *READ_STATUSES),
            "delete": _operation("delete_video", "Delete a video.", _json_response("Deleted"), 404, *READ_STATUSES),
        },
        "/v1/videos/{id}/cancel": {
            "parameters": [id],
            "post": _operation("cancel_video", "Cancel a video.", video, 404, *READ_STATUSES),
        },
        "/v1/videos/{id}/content": {"parameters": [id], "get": content | {"parameters": [variant, after]}},
        "/v1/videos/{id}/record": {
            "parameters": [id],
            "get": _operation(
                "get_record", "Get the metadata of a completed video.", record, 404, 409, 502, *READ_STATUSES
            ),
        },
        "/v1/videos/{id}/events": {
            "parameters": [id],
            "get": _operation("follow_video", "Stream the changes of a video.", changes, 404, 429, *READ_STATUSES),
        },
        "/v1/events": {"get": _operation("follow_all", "Stream the changes of all videos.", changes, 422, 429)},
        "/v1/requests": {
            "post": {
                "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _ref("FileForm")}}}
            }
            | _operation(
                "read_request",
                "Read the fields of a request from a workflow of ComfyUI or a video of wanjax. No video is made.",
                _json_response("FileFields"),
                *(400, 408, 415, 422, 507),
            )
        },
        "/v1/models": {
            "get": _operation("list_models", "List the models and their settings.", _json_response("Models"), 422)
        },
        "/v1/models/{id}": {
            "parameters": [id],
            "get": _operation("get_model", "Get a model.", _json_response("Model"), 404, 422),
        },
        "/health": {"get": health | {"security": []}},
        "/metrics": {
            "get": _operation("get_metrics", "Get metrics in the text format of Prometheus.", metrics, 507),
        },
    }


def _operation(id: str, summary: str, response: Mapping[str, Any], *errors: int) -> dict[str, Any]:
    error = {"description": "An error in OpenAI's format.", **_json_response("Error")}
    responses = {"200": {"description": summary, **response}} | {
        str(status): error for status in sorted({*COMMON_STATUSES, *errors})
    }
    return {"operationId": id, "summary": summary, "responses": responses}


def _json_response(schema: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": _ref(schema)}}}


def _ref(schema: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _query_parameter(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


def _object_schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "properties": properties}


def _list_schema(schema: str) -> dict[str, Any]:
    return _object_schema(object={"const": "list"}, data={"type": "array", "items": _ref(schema)})


def _page_fields() -> dict[str, Any]:
    return {"first_id": _nullable(TEXT), "last_id": _nullable(TEXT), "has_more": BOOLEAN}


def _enum(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values]}


def _nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _bounded_number(setting: Setting, description: str) -> dict[str, Any]:
    return json_schema(setting) | ({"description": description} if description else {})
