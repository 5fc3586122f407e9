# SPDX-License-Identifier: Apache-2.0
"""`generate --extend-prompt URL`: the prompts that are asked for, extended before the model is loaded."""

import json
from collections.abc import Mapping
from typing import Any

from wanjax.cli.report import Report
from wanjax.errors import WanjaxError
from wanjax.pipelines.text.extending import Extended, cleaned, extend_prompt
from wanjax.stores.places import Place, local_copy
from wanjax.stores.writing import check_folder, writing

KEPT = "extended_prompts.json"  # in the folder of many videos, so that a list that goes on asks nobody again


class Extender:
    """Extends prompts at an address, and tells each; those of a list are kept in a file and asked for once."""

    def __init__(self, report: Report, url: str, model: str | None, *, picture: bool):
        self.report, self.url, self.model, self.picture = report, url, model, picture

    def __call__(self, prompt: str) -> Extended:
        """Returns an extended prompt."""
        made = extend_prompt(prompt, self.url, model=self.model, picture=self.picture)
        self.report.note(f"the prompt is extended: {made}")
        return made

    def all_of(self, prompts: list[str], folder: Place) -> list[Extended]:
        """Returns the extended prompts of a list; those that the folder keeps are not asked for again."""
        check_folder(folder)
        file, found = folder / KEPT, []
        kept = _kept(file)
        with self.report.stage("extend", at_once=True):
            for done, prompt in enumerate(prompts):
                self.report.count("prompt", done, len(prompts))
                name = f"{self.model or ''} {'picture' if self.picture else 'text'}: {prompt}"
                if name not in kept:
                    kept[name] = self(prompt)
                    with writing(file) as beside:
                        beside.write_text(json.dumps(kept, indent=2, ensure_ascii=False), encoding="utf-8")
                found.append(Extended(kept[name], prompt))
            self.report.count("prompt", len(prompts), len(prompts))
        return found


def extended(report: Report, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `generate` with its prompts extended, if an address is given, and without the address.

    A list of prompts is left to `many`, which finds `extend` among the options. Raises WanjaxError as `extend_prompt`.
    """
    given = dict(given)
    url, model = given.pop("extend_prompt"), given.pop("extend_model")
    if url is None:
        if model is not None:
            raise WanjaxError(f"--extend-model {model} is given without --extend-prompt, the address that has it")
        return given
    if given.get("processes"):
        raise WanjaxError("--extend-prompt is for one process: each of several would be answered another prompt")
    extender = Extender(report, url, model, picture=bool(given.get("image")))
    if given.get("prompts") is not None:
        return given | {"extend": extender}
    if isinstance(given["prompt"], Extended):  # that of the record
        return given
    later = (given["then"] or "").splitlines()
    with report.stage("extend", at_once=True):
        prompt, *then = (extender(text) for text in (given["prompt"], *later))
    original = "\n".join([prompt.original, *later])
    return given | {"prompt": Extended(prompt, original), "then": "\n".join(then) or None}


def _kept(file: Place) -> dict[str, str]:
    """Returns the extended prompts that a file keeps; none where it cannot be read as such."""
    try:
        with local_copy(file) as copy:
            found = json.loads(copy.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    texts = found.items() if isinstance(found, dict) else ()
    return {name: line for name, text in texts if isinstance(text, str) and (line := cleaned(text))}
