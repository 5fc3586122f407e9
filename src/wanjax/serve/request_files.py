# SPDX-License-Identifier: Apache-2.0
"""The fields of a request from a file that a client has: a workflow of ComfyUI, or a video of wanjax.

The file may name models, LoRAs, pictures and clips. The server never opens these files. It compares their names with
its own models and LoRAs, or writes notes for the client.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from wanjax.checkpoints.lora_source import Lora
from wanjax.errors import SettingError, WanjaxError, comma_list, printable
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.metadata import find_metadata
from wanjax.media.pictures import DECODE_LOCK
from wanjax.pipelines.request import FIELD_SETTINGS, LORA_STRENGTH, MODEL, SCHEDULER, VideoRequest
from wanjax.pipelines.settings import LOAD_SETTINGS, RANDOM_SEED, Settings, schema
from wanjax.serve.limits import Limits
from wanjax.serve.served_models import ServedModels
from wanjax.stores.temporary import temp_dir
from wanjax.workflows import SUFFIXES
from wanjax.workflows.graph import short_text
from wanjax.workflows.reading import find_workflow
from wanjax.workflows.request import Missing, read_workflow
from wanjax.workflows.values import base_name

FIELD = "file"  # the field of the form with the file
FILE_SUFFIXES = (*SUFFIXES, ".gif")  # a video of wanjax may also be an animation
WORKFLOW, VIDEO = "workflow", "video"
ORIGINAL_PROMPT = "original_prompt"
EXPECTED_FILE = "send a workflow of ComfyUI, or a video or picture that ComfyUI or wanjax made"


class RequestFileParser:
    """Reads the fields of a request from a file, for the models of a server.

    Args:
        models: The models that requests may name.
        cards: The model cards, with the limits of the server.
        limits: Limits of a request.
    """

    def __init__(self, models: ServedModels, cards: Sequence[Mapping[str, Any]], limits: Limits):
        self.models, self.limits = models, limits
        self.cards = {card["id"]: card for card in cards}
        self.notes: list[str] = []

    def read(self, name: str, data: bytes) -> dict[str, Any]:
        """Read a file.

        Args:
            name: The name that the client gives the file; its suffix determines the format.
            data: The contents.

        Returns:
            The kind of the file, the fields of a request, and notes on what was left out.

        Raises:
            SettingError: The file has no request, or it is damaged or too large.
        """
        title, suffix = short_text(base_name(name)), PurePath(name).suffix.lower()
        if suffix not in FILE_SUFFIXES:
            expected_suffixes = ", ".join(each.removeprefix(".") for each in FILE_SUFFIXES)
            raise SettingError(f"{title} has none of the suffixes {expected_suffixes}: {EXPECTED_FILE}", FIELD)
        with DECODE_LOCK, temp_dir() as folder:  # only one file is in memory at a time
            path = folder / f"file{suffix}"
            path.write_bytes(data)
            try:
                kind, fields = self._read(path)
            except WanjaxError as error:
                raise SettingError(str(error).replace(str(path), title), FIELD) from error
        return {"object": "request", "source": kind, "fields": fields, "notes": list(dict.fromkeys(self.notes))}

    def _read(self, path: Path) -> tuple[str, dict[str, Any]]:
        if (graph := find_workflow(path)) is not None:
            try:
                return WORKFLOW, self._from_workflow(read_workflow(graph))
            except WanjaxError as error:
                raise WanjaxError(f"{path}: {error}") from error
        try:
            metadata = find_metadata(path)
        except WanjaxError as error:
            raise WanjaxError(f"{path} has no request for a video: {EXPECTED_FILE}") from error
        return VIDEO, self._from_metadata(metadata)

    def _from_workflow(self, workflow: Any) -> dict[str, Any]:
        """Return the fields of a workflow."""
        title = workflow.model or short_text(base_name(workflow.files[0].name))
        model = self._choose_model(workflow.model, f"the workflow is for {title}")
        values = {}
        for name, value in {**workflow.settings, SCHEDULER.name: workflow.scheduler}.items():
            if isinstance(value, Missing):
                self.notes.append(_without_options(value.sentence))
            else:
                values[name] = value
        fields = self._accepted(model, values)
        fields |= self._lora_strengths([(PurePath(base_name(x.file.name)).stem, x.strength) for x in workflow.loras])
        for name, value in workflow.inputs.items():
            if isinstance(value, Missing):
                self.notes.append(_without_options(value.sentence))
            else:
                files = value if isinstance(value, list) else [value]
                self._note_input(model, name, [base_name(file.name) for file in files])
        self.notes += map(_without_options, workflow.notes)
        return fields

    def _from_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a video's metadata."""
        recorded_model = str(metadata.get(MODEL.name))
        name = recorded_model if recorded_model in self.cards else base_name(recorded_model)
        model = self._choose_model(name, f"the video was made with {short_text(name)}")
        names = {*schema(Settings), SCHEDULER.name} - {*LOAD_SETTINGS, ORIGINAL_PROMPT}
        values = {name: value for name, value in metadata.items() if name in names}
        if isinstance(original := metadata.get(ORIGINAL_PROMPT), str) and original:
            values["prompt"] = original.partition("\n")[0]  # further prompts are for later windows
        fields = self._accepted(model, values)
        loras = metadata.get(LORA_STRENGTH.name)
        parsed = [Lora.parse(text) for text in (loras if isinstance(loras, list) else []) if isinstance(text, str)]
        fields |= self._lora_strengths([(lora.name, lora.strength) for lora in parsed])
        for name in INPUT_SPECS:
            if value := metadata.get(name):
                files = value if isinstance(value, list) else [value]
                self._note_input(model, name, [base_name(str(file)) for file in files])
        return fields

    def _choose_model(self, name: str | None, source: str) -> str:
        """Return the model that a file names, if the server has it; otherwise the served model."""
        if name in self.cards:
            return str(name)
        self.notes.append(f"{source}, but this server has {' and '.join(self.cards)}")
        return self.models.default_name

    def _accepted(self, model: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the model accepts. Note every other value, unless it is the model's default."""
        card, fields, unused = self.cards[model], {MODEL.name: model}, []
        settings, schedulers = card["settings"], card["schedulers"]
        bounded = self.limits.limit_settings(FIELD_SETTINGS)
        for name, value in values.items():
            if value is None or (name == "seed" and value == RANDOM_SEED):
                continue
            if name == SCHEDULER.name:
                if value in schedulers:
                    fields[name] = value
                else:
                    self.notes.append(f"{model} has no solver {short_text(str(value))}, and uses {schedulers[0]}")
                continue
            if name not in settings:
                unused += [] if value in ("", False, card["defaults"].get(name)) else [name.replace("_", " ")]
                continue
            try:
                parsed = VideoRequest.parse(
                    {name: value},
                    accepted_names=[name],
                    field_settings=bounded,
                    max_prompt_length=self.limits.prompt,
                    complete=False,
                )
            except WanjaxError as error:
                self.notes.append(printable(str(error)))
                continue
            choices = settings[name].get("enum")
            if choices and parsed.settings[name] not in choices:
                self.notes.append(f"{model} has no {name} {value}, and uses {settings[name]['default']}")
            else:
                fields[name] = parsed.settings[name]
        if unused:
            self.notes.append(f"{model} does not use {comma_list(unused)}")
        return fields

    def _lora_strengths(self, loras: Sequence[tuple[str, float]]) -> dict[str, Any]:
        """Return the strengths of the server's LoRAs, and note the LoRAs that the server lacks."""
        names = self.models.default_strengths
        self.notes += [f"this server has no LoRA {short_text(name)}" for name, _ in loras if name not in names]
        strengths = {name: strength for name, strength in loras if name in names}
        return {LORA_STRENGTH.name: strengths} if strengths else {}

    def _note_input(self, model: str, name: str, files: Sequence[str]) -> None:
        """Note a picture or clip: the client must send it, or the model does not take it."""
        file_names = comma_list([short_text(file) for file in files])
        if name in self.cards[model]["pictures"]:
            self.notes.append(f"the file does not contain {INPUT_SPECS[name].noun}: choose {file_names}")
        else:
            self.notes.append(f"{model} does not take {INPUT_SPECS[name].noun}: {file_names} is left out")


def _without_options(sentence: str) -> str:
    """Remove the advice at the end of a sentence if it names options of the command."""
    problem, separator, advice = sentence.rpartition(": ")
    return problem if separator and "--" in advice else sentence
