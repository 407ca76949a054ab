"""The profiles: everything that differs between the LightOnOCR generations.

| family           | generation | built on | modes           | longest edge | a token is | context | answer at most |
|------------------|------------|----------|-----------------|--------------|------------|---------|----------------|
| LightOnOCR-1B    | 1          | pixtral  | text            | 1540 px      | 28 x 28 px | 8192    | 4096           |
| LightOnOCR-2-1B  | 2          | pixtral  | text            | 1540 px      | 28 x 28 px | 16384   | 4096           |
| LightOnOCR-3-1B  | 3          | pixtral  | text, grounding | 1540 px      | 28 x 28 px | 16384   | what is left   |
| LightOnOCR-3-0.8B, -4B | 3    | qwen3.5  | text, grounding | 2048 px      | 32 x 32 px | 18000   | what is left   |

The evidence for each value stands in models.json, which a test holds equal to this room.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Literal

from .errors import UsageError

DEFAULT_MODEL_ID = "lightonai/LightOnOCR-2-1B"

# The trained prompts: a mode → the words beside the image. Anything else is out of distribution.
PROMPT_WORDS = {"text": "", "grounding": "grounding"}


@dataclass(frozen=True)
class Sampling:
    """How the model is sampled. Greedy decoding loops on hard pages, so no profile has temperature 0."""

    temperature: float
    top_p: float
    max_tokens: int | None  # None: the server gives what is left of the context


@dataclass(frozen=True)
class KnownBad:
    """An engine that starts and serves this model wrongly, or can't start it."""

    vllm: str
    transformers: str  # "": with any transformers
    reason: str


@dataclass(frozen=True)
class ModelProfile:
    """What the scripts have to know of one model."""

    model_id: str
    about: str  # what sets a variant apart from the model it is named after; "" for that model itself
    generation: int
    architecture: str  # "pixtral" or "qwen3.5"
    longest_edge_px: int
    pixels_per_token_side: int
    modes: tuple[str, ...]
    sampling: Sampling
    serve_args: tuple[str, ...]  # argv words after `vllm serve MODEL`
    chat_template_kwargs: tuple[tuple[str, bool], ...]  # for each request; dict() of it is the JSON object
    image_tag: str  # of vllm/vllm-openai
    known_bad_engines: tuple[KnownBad, ...]
    licence: str
    languages: tuple[str, ...]  # ISO 639-1, as stated by the vendor; () where nothing is stated

    @property
    def image(self) -> str:
        """The container image to run this model in."""
        return f"vllm/vllm-openai:{self.image_tag}"


@dataclass(frozen=True)
class ProfileMatch:
    """A profile and how it was found, for the log."""

    requested: str
    profile: ModelProfile
    how: Literal["catalogue", "by name", "default"]

    def __str__(self) -> str:
        if self.how == "catalogue":
            return f"profile {self.profile.model_id}"
        if self.how == "by name":
            return f"profile {self.profile.model_id}, taken by the name of {self.requested}"
        return f"profile {self.profile.model_id}, the default: {self.requested} names no model of the catalogue"


# 0.27.1 answers, and the GPU looks busy as usual: only the text shows it. Hence the canary page.
LOOPS_ON_0_27_1 = KnownBad(
    "0.27.1", "", "every LightOnOCR model loops in compiled mode, while the GPU looks normally busy"
)
NO_PIXTRAL_ON_0_30_0 = KnownBad(
    "0.30.0", "5.17", "PixtralRotaryEmbedding can't be imported, so no Pixtral-based 1B model starts; 5.16.1 works"
)

# One page a request, said in advance: no memory is set aside for more (JSON is the only spelling since vLLM 0.10).
ONE_IMAGE = ("--limit-mm-per-prompt", '{"image": 1}')
# Pages never repeat, so both caches only cost memory; and a processor cache under concurrency has killed engines
# ("Expected a cached item for mm_hash").
NO_CACHES = ("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching")
# The Qwen3.5 models were trained without thinking; also sent with each request, for servers started by others.
NO_THINKING = (("enable_thinking", False),)
NO_THINKING_ARGS = ("--default-chat-template-kwargs", '{"enable_thinking": false}')

LIGHTONOCR_1B = ModelProfile(
    model_id="lightonai/LightOnOCR-1B-1025",
    about="",
    generation=1,
    architecture="pixtral",
    longest_edge_px=1540,
    pixels_per_token_side=28,
    modes=("text",),
    # 4096 of the 4096 to 6500 in use: with a page of 55 x 55 image tokens, 6500 would not fit the 8192 below.
    sampling=Sampling(temperature=0.2, top_p=0.9, max_tokens=4096),
    serve_args=("--max-model-len", "8192", *ONE_IMAGE, *NO_CACHES),
    chat_template_kwargs=(),
    image_tag="v0.22.1",
    known_bad_engines=(LOOPS_ON_0_27_1, NO_PIXTRAL_ON_0_30_0),
    licence="apache-2.0",
    languages=("en", "fr", "de", "es", "it", "nl", "pt", "sv", "da"),
)

LIGHTONOCR_2_1B = replace(
    LIGHTONOCR_1B,
    model_id="lightonai/LightOnOCR-2-1B",
    generation=2,
    # 8192 fits a page and its 4096 tokens; 16384 leaves room to ask a truncated page again for more.
    serve_args=("--max-model-len", "16384", *ONE_IMAGE, *NO_CACHES),
    languages=(*LIGHTONOCR_1B.languages, "zh", "ja"),
)

LIGHTONOCR_3_1B = replace(
    LIGHTONOCR_2_1B,
    model_id="lightonai/LightOnOCR-3-1B",
    generation=3,
    modes=("text", "grounding"),
    # The vendor's tip and its example request say 0.1 (its client defaults to 0.2): the steadier of the two.
    sampling=Sampling(temperature=0.1, top_p=1.0, max_tokens=None),
    image_tag="v0.32.0",  # the image of v0.30.0 ships the transformers that breaks this architecture
    languages=(),
)

LIGHTONOCR_3_08B = replace(
    LIGHTONOCR_3_1B,
    model_id="lightonai/LightOnOCR-3-0.8B",
    architecture="qwen3.5",
    longest_edge_px=2048,
    pixels_per_token_side=32,
    serve_args=("--max-model-len", "18000", *ONE_IMAGE, *NO_CACHES, *NO_THINKING_ARGS),
    chat_template_kwargs=NO_THINKING,
    image_tag="v0.30.0",
    known_bad_engines=(LOOPS_ON_0_27_1,),
)

LIGHTONOCR_3_4B = replace(LIGHTONOCR_3_08B, model_id="lightonai/LightOnOCR-3-4B")


@functools.cache
def catalogue() -> tuple[ModelProfile, ...]:
    """Every model known, a family's own model before its variants."""
    return (
        LIGHTONOCR_1B,
        replace(LIGHTONOCR_1B, model_id="lightonai/LightOnOCR-0.9B-32k-1025"),
        replace(LIGHTONOCR_1B, model_id="lightonai/LightOnOCR-0.9B-16k-1025"),
        LIGHTONOCR_2_1B,
        *(
            replace(LIGHTONOCR_2_1B, model_id=f"{LIGHTONOCR_2_1B.model_id}-{suffix}", about=about)
            for suffix, about in (
                ("base", "before reinforcement learning"),
                ("bbox", "also boxes embedded figures"),
                ("bbox-base", "also boxes embedded figures; before reinforcement learning"),
                ("ocr-soup", "a merge"),
                ("bbox-soup", "a merge; also boxes embedded figures"),
            )
        ),
        LIGHTONOCR_3_08B,
        LIGHTONOCR_3_1B,
        LIGHTONOCR_3_4B,
    )


def find_profile(model_id: str) -> ProfileMatch:
    """The profile of a model: by its exact id, else by the model named in it, else the default one.

    A name is looked for in the last part of a path first, then in the whole, without regard to case and punctuation:
    `me/LightOnOCR-2-1B-letters`, `/models/lightonocr-3-4b/` and a snapshot folder of the Hub's cache are all found.
    """
    by_id = {profile.model_id: profile for profile in catalogue()}
    if model_id in by_id:
        return ProfileMatch(model_id, by_id[model_id], "catalogue")
    last_part = re.split(r"[/\\]", model_id.rstrip("/\\"))[-1]
    for text in (_letters_and_digits(last_part), _letters_and_digits(model_id)):
        named = [profile for profile in catalogue() if _name_key(profile) in text]
        if named:
            # The longest name wins: LightOnOCR-2-1B stands in LightOnOCR-2-1B-bbox too.
            return ProfileMatch(model_id, max(named, key=lambda profile: len(_name_key(profile))), "by name")
    return ProfileMatch(model_id, by_id[DEFAULT_MODEL_ID], "default")


def _letters_and_digits(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _name_key(profile: ModelProfile) -> str:
    name = profile.model_id.partition("/")[2]
    return _letters_and_digits(name.removesuffix("-1025"))


def prompt_words(profile: ModelProfile, mode: str) -> str:
    """The words beside the image in this mode ("" for none); a mode the model was not trained on is refused."""
    if mode not in profile.modes:
        raise UsageError(
            f"{profile.model_id} has no mode {mode!r}, only {', '.join(profile.modes)}: "
            f"leave the mode out, or choose a model that has it"
            + (" (grounding came with LightOnOCR-3)" if mode == "grounding" else "")
        )
    return PROMPT_WORDS[mode]


def serve_option(profile: ModelProfile, name: str) -> str | None:
    """The value of one of the profile's serve_args, such as `--max-model-len`; None if it isn't among them."""
    if name not in profile.serve_args:
        return None
    return profile.serve_args[profile.serve_args.index(name) + 1]


def known_bad_engine(profile: ModelProfile, vllm: str, transformers: str | None = None) -> KnownBad | None:
    """The entry that warns of this engine, if there is one.

    Where an entry depends on the transformers version and ours is unknown (a remote server does not tell), the entry is
    returned, and its `transformers` says what to check.
    """
    for bad in profile.known_bad_engines:
        transformers_fits = not bad.transformers or transformers is None or _is_release(transformers, bad.transformers)
        if _is_release(vllm, bad.vllm) and transformers_fits:
            return bad
    return None


def _is_release(version: str, release: str) -> bool:
    """Whether a version is that release or a build of it: 0.27.1+cu129 is of 0.27.1, 5.17.2 of 5.17, 0.27.10 is not."""
    return re.match(re.escape(release) + r"(?!\d)", version.strip().removeprefix("v")) is not None
