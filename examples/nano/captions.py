# SPDX-License-Identifier: Apache-2.0
"""Captions of clips: one plain wording for evaluation, and many wordings for training."""

from itertools import product

import numpy as np
from clips import COLOURS, MOTIONS, SHAPES, Spec

_NAMES = {
    "circle": ("circle", "circle", "circle", "disc"),
    "square": ("square", "square", "square", "box"),
    "triangle": ("triangle",),
    "cross": ("cross", "cross", "cross", "plus sign"),
}
_TAUGHT_NAMES = {"bar": ("bar",)}  # not in the model's vocabulary

# A travelling motion is a verb and a direction; each verb has two forms, "moving" and "moves".
_TRAVEL_VERBS = (
    ("moving", "moves"),
    ("moving", "moves"),
    ("going", "goes"),
    ("sliding", "slides"),
    ("travelling", "travels"),
    ("drifting", "drifts"),
)
_DIRECTIONS = {
    "left": ("left", "left", "to the left", "leftwards"),
    "right": ("right", "right", "to the right", "rightwards"),
    "up": ("up", "up", "upwards", "to the top"),
    "down": ("down", "down", "downwards", "to the bottom"),
}
_CHANGE_WORDINGS = {
    "grows": (
        ("growing", "grows"),
        ("growing", "grows"),
        ("getting bigger", "gets bigger"),
        ("getting larger", "gets larger"),
        ("expanding", "expands"),
    ),
    "shrinks": (
        ("shrinking", "shrinks"),
        ("shrinking", "shrinks"),
        ("getting smaller", "gets smaller"),
    ),
    "stays": (
        ("staying still", "stays still"),
        ("staying still", "stays still"),
        ("standing still", "stands still"),
        ("not moving", "does not move"),
        ("staying in place", "stays in place"),
    ),
}
_SIZES = {"grows": ("small", "little"), "shrinks": ("big", "large")}  # at the start of the clip

_BACKGROUNDS = {
    "dark": ("a dark background", "a dark background", "a black background"),
    "grey": ("a grey background", "a grey background", "a gray background"),
    "light": ("a light background", "a light background", "a white background"),
    "vertical gradient": ("a gradient", "a vertical gradient", "a soft gradient background"),
    "horizontal gradient": ("a gradient", "a horizontal gradient", "a soft gradient background"),
}


def _motion_wordings(motion: str) -> tuple[tuple[str, str], ...]:
    """Return the wordings of a motion, each in two forms: "moving left" and "moves left"."""
    if motion in _CHANGE_WORDINGS:
        return _CHANGE_WORDINGS[motion]
    return tuple(
        (f"{participle} {direction}", f"{verb} {direction}")
        for (participle, verb), direction in product(_TRAVEL_VERBS, _DIRECTIONS[motion])
    )


_WORDINGS = {motion: _motion_wordings(motion) for motion in MOTIONS}


def plain_caption(colour: str, shape: str, motion: str) -> str:
    """Return the wording used in evaluation, such as "a red circle moving right"."""
    return f"{_article(colour)} {colour} {shape} {plain_motion(motion)}"


def plain_motion(motion: str) -> str:
    """Return the wording of a motion that evaluation uses with a picture, such as "moving right"."""
    return _WORDINGS[motion][0][0]


def caption(spec: Spec, rng: np.random.Generator) -> str:
    """Draw one of the many wordings of a clip. A third of them name the background, and a few are capitalised."""
    participle, verb = _pick(rng, _WORDINGS[spec.motion])
    text = _sentence(_subject(spec, rng), participle, verb, rng)
    if rng.random() < 0.35:
        background = _pick(rng, _BACKGROUNDS[spec.background])
        text = f"on {background}, {text}" if rng.random() < 0.2 else f"{text} on {background}"
    if rng.random() < 0.15:
        text += "."
    return _pick(rng, (*[str] * 14, *[_capitalise] * 4, str.title, str.upper))(text)


def motion_caption(spec: Spec, rng: np.random.Generator) -> str:
    """Draw a wording of only the motion, such as "moving right", for a clip whose first frame is an input."""
    return _pick(rng, (str, str, _capitalise))(_pick(rng, _pick(rng, _WORDINGS[spec.motion])))


def _subject(spec: Spec, rng: np.random.Generator) -> str:
    """Draw a wording of the colour and the shape, with or without an article, sometimes with the initial size."""
    name = _pick(rng, (_NAMES | _TAUGHT_NAMES)[spec.shape])
    article = _pick(rng, ("a", "a", "a", "the", ""))
    if rng.random() < 0.1:
        return f"{article} {name}, {spec.colour},".strip()
    words = f"{spec.colour} {name}"
    if spec.motion in _SIZES and rng.random() < 0.25:
        words = f"{_pick(rng, _SIZES[spec.motion])} {words}"
    return f"{_article(words) if article == 'a' else article} {words}".strip()


def _sentence(subject: str, participle: str, verb: str, rng: np.random.Generator) -> str:
    """Draw a sentence from the subject and the motion. The plain wording is the most likely."""
    forms = (f"{subject} {participle}", f"{subject} {participle}", f"{subject} {verb}", f"{subject} that {verb}")
    if subject.endswith(","):  # other forms would give "a circle, red, is moving"
        return forms[0]
    return _pick(
        rng, (*forms, f"{subject} is {participle}", f"{subject}, {participle}", f"a video of {subject} {participle}")
    )


def _article(words: str) -> str:
    return "an" if words[0] in "aeiou" else "a"


def _capitalise(text: str) -> str:
    return text[0].upper() + text[1:]


def _pick(rng: np.random.Generator, options):
    return options[int(rng.integers(len(options)))]


def vocabulary() -> list[str]:
    """Return every word that a caption may contain, in lower case, sorted."""
    phrases = [*COLOURS, *SHAPES, "a an the on is that video of"]
    for group in (_NAMES, _SIZES, _BACKGROUNDS):
        phrases += [phrase for options in group.values() for phrase in options]
    phrases += [phrase for wordings in _WORDINGS.values() for pair in wordings for phrase in pair]
    return sorted({word for phrase in phrases for word in phrase.split()})
