# SPDX-License-Identifier: Apache-2.0
"""Find the files that a workflow names.

A file is only looked up by its name in the folders that the user gives. A file of weights may also come from the hub,
by its URL in the workflow.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from wanjax.checkpoints.files import SUFFIXES
from wanjax.checkpoints.hub import HUB_FILE, hub_files
from wanjax.errors import WanjaxError
from wanjax.figures import format_bytes
from wanjax.workflows.graph import short_text
from wanjax.workflows.values import INPUT, File, base_name

FOLDERS_BY_KIND = {
    "diffusion_models": ("diffusion_models", "unet", "checkpoints"),
    "checkpoints": ("checkpoints", "diffusion_models", "unet"),
    "loras": ("loras",),
}
"""The folders of ComfyUI in which a denoiser or a LoRA may be."""
MAX_ENTRIES = 200_000  # the maximum number of files in a folder that is searched
HUB_ADDRESS = re.compile(
    r"https://huggingface\.co/(?P<repository>[\w.-]+/[\w.-]+)/(?:resolve|blob)/main/(?P<file>[\w./ +%-]+)(?:\?.*)?",
    re.ASCII,
)


@dataclass(frozen=True)
class Folders:
    """The folders in which files are looked up.

    Args:
        models: ComfyUI's folder `models`, or its parent folder; None looks only on the hub.
        inputs: A folder with pictures and clips; None if there is none.
    """

    models: Path | None = None
    inputs: Path | None = None

    def folders_of_kind(self, kind: str) -> list[Path]:
        """List the folders that may have files of a kind.

        Args:
            kind: A key of `FOLDERS_BY_KIND`, or `INPUT`.
        """
        if kind == INPUT:
            folders = [self.inputs] if self.inputs else []
            folders += [self.models / INPUT] if self.models and (self.models / "models").is_dir() else []
        elif self.models is None:
            folders = []
        else:
            root = self.models / "models" if (self.models / "models").is_dir() else self.models
            folders = [root / name for name in FOLDERS_BY_KIND[kind]]
        return [folder for folder in folders if folder.is_dir()]


class FileLocation(NamedTuple):
    """The location of a file that a workflow names.

    Args:
        name: The path, or OWNER/NAME/FILE on the hub; the value of an option.
        description: The location, for a message.
        needs_download: Whether it must be downloaded.
    """

    name: str
    description: str
    needs_download: bool = False


def checked_name(file: File) -> str:
    """Return the base name of a file. Raises WanjaxError for a name that leads out of a folder.

    Args:
        file: The file.
    """
    parts, name = file.name.replace("\\", "/").split("/"), base_name(file.name)
    is_absolute = parts[0] == "" or re.match(r"[A-Za-z]:", file.name)
    if ".." in parts or is_absolute or not file.name.isprintable() or name in ("", ".."):
        raise WanjaxError(
            f"{file.node} names the file {file.name!r:.80}, and a name may not lead out of ComfyUI's folders: "
            "write the name alone"
        )
    return name


def locate(file: File, folders: Folders, addresses: Mapping[str, str]) -> FileLocation:
    """Find a file of weights in a folder, in the hub's cache, or by its URL in the workflow.

    Args:
        file: The file.
        folders: The folders of the user.
        addresses: The workflow's URLs of files, by file name.

    Raises:
        WanjaxError: The file is in none of these places.
    """
    name = checked_name(file)
    if (path := find_file(file, folders)) is not None:
        return FileLocation(str(path), str(path))
    address = addresses.get(name) or addresses.get(file.name)
    match = HUB_ADDRESS.fullmatch(address) if address is not None else None
    problem = f"{file.node} loads {short_text(name)}, which is not in {folders.models or 'a folder given by --models'}"
    if address is not None and match is None:
        raise WanjaxError(f"{problem}: download it from {short_text(address)} to the folder {file.kind} there")
    if address is None or match is None:
        raise WanjaxError(f"{problem}, and the workflow has no address of it: give --models FOLDER, ComfyUI's models")
    hub_name = f"{match['repository']}/{match['file']}".replace("%20", " ")
    if not HUB_FILE.fullmatch(hub_name) or PurePosixPath(hub_name).suffix not in SUFFIXES or ".." in hub_name:
        raise WanjaxError(
            f"{problem}, and its address {short_text(address)} is not that of weights: give --models FOLDER"
        )
    if is_cached(hub_name):
        return FileLocation(hub_name, f"{hub_name}, in the hub's cache")
    return FileLocation(hub_name, f"{hub_name} on the hub", needs_download=True)


def find_file(file: File, folders: Folders) -> Path | None:
    """Find a file in the folders of its kind, or return None.

    Args:
        file: The file.
        folders: The folders of the user.

    Raises:
        WanjaxError: The name leads out of the folder, several files have it, or a link leads out of the folder.
    """
    name, relative = checked_name(file), PurePosixPath(file.name.replace("\\", "/"))
    for folder in folders.folders_of_kind(file.kind):
        exact_path = folder / relative
        paths = [exact_path] if os.path.lexists(exact_path) else list(_with_name(folder, name))
        if len(paths) > 1:
            raise WanjaxError(
                f"{folder} has {name} at {paths[0].relative_to(folder)} and at {paths[1].relative_to(folder)}: "
                "remove one, or name its folder in ComfyUI"
            )
        if paths and not paths[0].resolve().is_relative_to(folder.resolve()):
            raise WanjaxError(
                f"{paths[0]} is a link out of {folder}: copy the file there, or give its path by an option"
            )
        if paths and paths[0].is_file():
            return paths[0]
    return None


def _with_name(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files with this name in a folder and its subfolders. Links to folders are not followed."""
    num_entries = 0
    for parent, folder_names, names in os.walk(folder):
        folder_names.sort()
        num_entries += len(names)
        if num_entries > MAX_ENTRIES:
            raise WanjaxError(f"{folder} has more than {MAX_ENTRIES:,} files: give the folder `models` of ComfyUI")
        if name in names:
            yield Path(parent) / name


def is_cached(hub_name: str) -> bool:
    """Return True if OWNER/NAME/FILE is in the cache of the hub's client.

    Args:
        hub_name: The name.
    """
    from huggingface_hub import try_to_load_from_cache  # imported late, because the import takes long

    owner, name, file = hub_name.split("/", 2)
    return isinstance(try_to_load_from_cache(f"{owner}/{name}", file), str)


def describe_download(hub_names: Sequence[str]) -> str:
    """Describe downloads with their sizes and licences, if the hub lists these.

    Args:
        hub_names: OWNER/NAME/FILE of each file.
    """
    return "; ".join(map(_describe, hub_names))


def _describe(hub_name: str) -> str:
    owner, name, file = hub_name.split("/", 2)
    sizes = [entry.size for entry in hub_files(f"{owner}/{name}", [file])]
    size = format_bytes(sizes[0]) if sizes else "of unknown size"
    return f"{file.rpartition('/')[2]} of {owner}/{name} ({size}, licence {_licence(f'{owner}/{name}') or 'unknown'})"


def _licence(repository: str) -> str | None:
    with suppress(Exception):  # the download will report an unreachable hub
        from huggingface_hub import HfApi

        card = HfApi().model_info(repository).card_data
        return str(card.license) if card is not None and card.license else None
    return None


def check_pair(high: str, low: str, companion_files: Callable[[str], Sequence[str]]) -> None:
    """Raise WanjaxError unless loading the file of one expert also finds the file of the other expert.

    Args:
        high: The path, or the name on the hub, of the expert at high noise.
        low: The path, or the name on the hub, of the expert at low noise.
        companion_files: Lists the paths of the files that belong to a file, relative to the file's folder.
    """
    folder = PurePath(high).parent
    if os.path.normpath(low) not in (os.path.normpath(folder / other) for other in companion_files(high)):
        raise WanjaxError(
            f"the experts are {high} and {low}: put them into one folder, with names that differ only by high and low"
        )
