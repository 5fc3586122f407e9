# SPDX-License-Identifier: Apache-2.0
"""`generate --extend-prompt URL`: a language model extends the prompts before the video model is loaded."""

import json

from wanjax.cli.parsed import CommandOptions, PipelineOptions
from wanjax.cli.report import Report
from wanjax.errors import WanjaxError
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.text.prompt_extension import ExtendedPrompt, extend_prompt, one_line
from wanjax.stores.paths import AnyPath, local_copy
from wanjax.stores.writing import atomic_write, check_folder

# a file in the folder of the videos, so that a resumed command does not extend prompts twice
CACHE_FILE = "extended_prompts.json"


class Extender:
    """Extends prompts by a language model at an address. The extended prompts of a list are cached in a file."""

    def __init__(self, report: Report, url: str, model: str | None, *, has_picture: bool):
        self.report, self.url, self.model, self.has_picture = report, url, model, has_picture

    @classmethod
    def from_options(
        cls, report: Report, request: VideoRequest, options: PipelineOptions, command: CommandOptions
    ) -> "Extender | None":
        """Build the extender of a command, or None if no address is given.

        Raises:
            WanjaxError: A model is given without an address, or there are several processes.
        """
        if command.extend_prompt is None:
            if (model := command.extend_model) is not None:
                problem = f"--extend-model {model} without --extend-prompt: also give the address of the language model"
                raise WanjaxError(problem)
            return None
        if options.processes:
            raise WanjaxError(
                "--extend-prompt works only in a single process, because each process would get a different "
                "prompt: leave out --processes"
            )
        return cls(report, command.extend_prompt, command.extend_model, has_picture="image" in request.inputs)

    def __call__(self, prompt: str) -> ExtendedPrompt:
        """Extend a prompt, and print the result."""
        extended_prompt = extend_prompt(prompt, self.url, model=self.model, picture=self.has_picture)
        self.report.note(f"extended prompt: {extended_prompt}")
        return extended_prompt

    def extend_all(self, prompts: list[str], folder: AnyPath) -> list[ExtendedPrompt]:
        """Extend the prompts of a list, except prompts that are in the folder's cache already."""
        check_folder(folder)
        file, extended_prompts = folder / CACHE_FILE, []
        saved = _read_cache(file)
        with self.report.stage("extend", at_once=True):
            for index, prompt in enumerate(prompts):
                self.report.set_progress("prompt", index, len(prompts))
                name = f"{self.model or ''} {'picture' if self.has_picture else 'text'}: {prompt}"
                if name not in saved:
                    saved[name] = self(prompt)
                    with atomic_write(file) as partial_path:
                        partial_path.write_text(json.dumps(saved, indent=2, ensure_ascii=False), encoding="utf-8")
                extended_prompts.append(ExtendedPrompt(saved[name], prompt))
            self.report.set_progress("prompt", len(prompts), len(prompts))
        return extended_prompts


def extend_request(request: VideoRequest, extend: Extender | None) -> VideoRequest:
    """Extend the prompts of a request, unless they are extended already or there is no extender."""
    if extend is None or "original_prompt" in request.settings:
        return request
    then_lines = request.settings.get("then", "").splitlines()
    with extend.report.stage("extend", at_once=True):
        prompt, *then = (extend(text) for text in (request.settings["prompt"], *then_lines))
    settings = {"prompt": str(prompt), "original_prompt": "\n".join([prompt.original, *then_lines])}
    return request.updated(settings | ({"then": "\n".join(then)} if then else {}))


def _read_cache(file: AnyPath) -> dict[str, str]:
    """Read the cache of extended prompts. A file that cannot be read counts as an empty cache."""
    try:
        with local_copy(file) as copy:
            content = json.loads(copy.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    items = content.items() if isinstance(content, dict) else ()
    return {name: cleaned_text for name, value in items if isinstance(value, str) and (cleaned_text := one_line(value))}
