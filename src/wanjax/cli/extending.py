# SPDX-License-Identifier: Apache-2.0
"""`generate --extend-prompt URL`: the prompts that are asked for, extended before the model is loaded."""

import json

from wanjax.cli.parsed import CommandOptions, PipelineOptions
from wanjax.cli.report import Report
from wanjax.errors import WanjaxError
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.text.prompt_extension import ExtendedPrompt, extend_prompt, one_line
from wanjax.stores.paths import AnyPath, local_copy
from wanjax.stores.writing import check_folder, writing

CACHE_FILE = "extended_prompts.json"  # in the folder of many videos, so that a list that goes on asks nobody again


class Extender:
    """Extends prompts at an address, and tells each; those of a list are kept in a file and asked for once."""

    def __init__(self, report: Report, url: str, model: str | None, *, picture: bool):
        self.report, self.url, self.model, self.picture = report, url, model, picture

    @classmethod
    def from_options(
        cls, report: Report, request: VideoRequest, options: PipelineOptions, command: CommandOptions
    ) -> "Extender | None":
        """Return what extends the prompts of a command, None where no address is given.

        Raises:
            WanjaxError: A model is given without an address, or there are several processes.
        """
        if command.extend_prompt is None:
            if (model := command.extend_model) is not None:
                problem = f"--extend-model {model} is given without --extend-prompt, the address that has it"
                raise WanjaxError(problem)
            return None
        if options.processes:
            raise WanjaxError("--extend-prompt is for one process: each of several would be answered another prompt")
        return cls(report, command.extend_prompt, command.extend_model, picture="image" in request.inputs)

    def __call__(self, prompt: str) -> ExtendedPrompt:
        """Return an extended prompt."""
        extended_prompt = extend_prompt(prompt, self.url, model=self.model, picture=self.picture)
        self.report.note(f"the prompt is extended: {extended_prompt}")
        return extended_prompt

    def all_of(self, prompts: list[str], folder: AnyPath) -> list[ExtendedPrompt]:
        """Return the extended prompts of a list; those that the folder keeps are not asked for again."""
        check_folder(folder)
        file, extended_prompts = folder / CACHE_FILE, []
        saved = _read_cache(file)
        with self.report.stage("extend", at_once=True):
            for done, prompt in enumerate(prompts):
                self.report.count("prompt", done, len(prompts))
                name = f"{self.model or ''} {'picture' if self.picture else 'text'}: {prompt}"
                if name not in saved:
                    saved[name] = self(prompt)
                    with writing(file) as partial_path:
                        partial_path.write_text(json.dumps(saved, indent=2, ensure_ascii=False), encoding="utf-8")
                extended_prompts.append(ExtendedPrompt(saved[name], prompt))
            self.report.count("prompt", len(prompts), len(prompts))
        return extended_prompts


def extended(request: VideoRequest, extend: Extender | None) -> VideoRequest:
    """Return a request with its prompts extended; as it is where nobody extends, or somebody did."""
    if extend is None or "original_prompt" in request.settings:
        return request
    later = request.settings.get("then", "").splitlines()
    with extend.report.stage("extend", at_once=True):
        prompt, *then = (extend(text) for text in (request.settings["prompt"], *later))
    settings = {"prompt": str(prompt), "original_prompt": "\n".join([prompt.original, *later])}
    return request.updated(settings | ({"then": "\n".join(then)} if then else {}))


def _read_cache(file: AnyPath) -> dict[str, str]:
    """Return the extended prompts that a file keeps; none where it cannot be read as such."""
    try:
        with local_copy(file) as copy:
            content = json.loads(copy.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    texts = content.items() if isinstance(content, dict) else ()
    return {name: line for name, text in texts if isinstance(text, str) and (line := one_line(text))}
