"""The catalogue: models.py and models.json say the same, and any name finds its profile."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.errors import UsageError
from src.models import (
    DEFAULT_MODEL_ID,
    PROMPT_WORDS,
    ModelProfile,
    Sampling,
    catalogue,
    find_profile,
    known_bad_engine,
    prompt_words,
    serve_option,
)
from tests.strategies import model_ids, names, recased, separators

CATALOGUE_FILE = Path(__file__).parent.parent / "models.json"
EVIDENCE = {"measured here", "vendor", "field", "claim"}


def read_catalogue() -> dict[str, Any]:
    catalogue_json: dict[str, Any] = json.loads(CATALOGUE_FILE.read_text(encoding="utf-8"))
    return catalogue_json


def values(facts: Any) -> Any:
    """The facts with only their values left."""
    if isinstance(facts, dict) and "evidence" in facts:
        return facts["value"]
    if isinstance(facts, dict):
        return {name: values(fact) for name, fact in facts.items()}
    return [values(fact) for fact in facts]


def as_in_the_file(profile: ModelProfile) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(profile)))
    plain["chat_template_kwargs"] = dict(profile.chat_template_kwargs)
    return plain


def models_of_the_file() -> dict[str, dict[str, Any]]:
    models = {}
    for family in read_catalogue()["models"]:
        for variant in family["variants"]:
            facts = values(family["facts"])
            facts["serve_args"] = [word for option in facts["serve_args"] for word in option]
            model_id = variant["model_id"]
            assert model_id not in models
            models[model_id] = {"model_id": model_id, "about": values(variant["about"]), **facts}
    return models


def all_facts(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, dict) and "evidence" in node:
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [fact for child in children for fact in all_facts(child)]


def test_models_py_and_models_json_say_the_same_of_every_model() -> None:
    assert models_of_the_file() == {profile.model_id: as_in_the_file(profile) for profile in catalogue()}
    assert read_catalogue()["default_model"] == DEFAULT_MODEL_ID


def test_the_file_has_every_field_of_the_profile_and_no_other() -> None:
    for facts in models_of_the_file().values():
        assert set(facts) == {field.name for field in fields(ModelProfile)}
        assert set(facts["sampling"]) == {field.name for field in fields(Sampling)}


def test_every_fact_carries_a_known_level_of_evidence_and_no_stray_key() -> None:
    facts = all_facts(read_catalogue()["models"])
    assert len(facts) > 80
    for fact in facts:
        assert fact["evidence"] in EVIDENCE
        assert {"value", "evidence"} <= set(fact) <= {"value", "evidence", "conditions", "note"}


def test_ids_are_unique_and_every_generation_is_there() -> None:
    ids = [profile.model_id for profile in catalogue()]
    assert len(set(ids)) == len(ids) == 12
    assert {profile.generation for profile in catalogue()} == {1, 2, 3}


@pytest.mark.parametrize("profile", catalogue(), ids=lambda profile: profile.model_id)
def test_serve_args_are_options_of_which_each_has_at_most_one_value(profile: ModelProfile) -> None:
    import argparse

    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--limit-mm-per-prompt", type=json.loads, required=True)
    parser.add_argument("--mm-processor-cache-gb", type=float, required=True)
    parser.add_argument("--no-enable-prefix-caching", action="store_true")
    parser.add_argument("--default-chat-template-kwargs", type=json.loads, default={})
    options = parser.parse_args(list(profile.serve_args))
    assert options.limit_mm_per_prompt == {"image": 1}
    assert options.mm_processor_cache_gb == 0
    assert options.no_enable_prefix_caching
    assert options.default_chat_template_kwargs == dict(profile.chat_template_kwargs)
    assert serve_option(profile, "--max-model-len") == str(options.max_model_len)
    assert serve_option(profile, "--seed") is None


@pytest.mark.parametrize("profile", catalogue(), ids=lambda profile: profile.model_id)
def test_a_page_at_its_largest_and_the_longest_answer_fit_the_context(profile: ModelProfile) -> None:
    page_tokens = (-(-profile.longest_edge_px // profile.pixels_per_token_side)) ** 2
    context = int(serve_option(profile, "--max-model-len") or 0)
    template_tokens = 100
    assert page_tokens + template_tokens + (profile.sampling.max_tokens or 4096) <= context


@pytest.mark.parametrize("profile", catalogue(), ids=lambda profile: profile.model_id)
def test_no_profile_decodes_greedily_or_runs_on_an_engine_known_to_be_bad(profile: ModelProfile) -> None:
    assert profile.sampling.temperature > 0
    assert known_bad_engine(profile, profile.image_tag) is None
    assert profile.image == f"vllm/vllm-openai:{profile.image_tag}"


@given(model_ids)
def test_an_exact_id_finds_its_own_profile(model_id: str) -> None:
    match = find_profile(model_id)
    assert (match.profile.model_id, match.how) == (model_id, "catalogue")


@given(recased(model_ids), names, separators, names)
def test_a_name_in_any_case_with_anything_around_it_finds_a_profile_of_its_family(
    model_id: str, before: str, separator: str, after: str
) -> None:
    bare_name = model_id.partition("/")[2]
    family = next(profile for profile in catalogue() if profile.model_id.lower() == model_id.lower())
    match = find_profile(f"{before}{separator}{bare_name}{separator}{after}")
    assert match.how == "by name"
    assert match.profile.serve_args == family.serve_args
    assert match.profile.generation == family.generation


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("me/LightOnOCR-2-1B-finetuned", "LightOnOCR-2-1B"),
        ("LightOnOCR-2-1B", "LightOnOCR-2-1B"),
        ("/models/lightonocr-3-4b", "LightOnOCR-3-4B"),
        ("/models/lightonocr-3-4b/", "LightOnOCR-3-4B"),
        ("C:\\models\\LightOnOCR-3-1B", "LightOnOCR-3-1B"),
        ("LightOnOCR-1B-1025-AWQ", "LightOnOCR-1B-1025"),
        ("org/LightOnOCR-1B-mine", "LightOnOCR-1B-1025"),
        ("mradermacher/LightOnOCR-3-0.8B-i1-GGUF", "LightOnOCR-3-0.8B"),
        ("someone/lightonocr_2_1b_bbox_soup_fp8", "LightOnOCR-2-1B-bbox-soup"),
        ("/cache/models--lightonai--LightOnOCR-2-1B-bbox/snapshots/0c1f", "LightOnOCR-2-1B-bbox"),
        ("/runs/from-LightOnOCR-3-4B/LightOnOCR-2-1B-mine", "LightOnOCR-2-1B"),
    ],
)
def test_a_fine_tune_a_copy_and_a_local_path_are_matched_by_name(asked: str, found: str) -> None:
    match = find_profile(asked)
    assert (match.profile.model_id, match.how) == (f"lightonai/{found}", "by name")
    assert asked in str(match)


@pytest.mark.parametrize("asked", ["", "/", "rapidocr", "Qwen/Qwen3-VL-2B", "lightonai/LightOnOCR-9-70B", "模型"])
def test_a_name_of_nothing_known_takes_the_default_and_says_so(asked: str) -> None:
    match = find_profile(asked)
    assert (match.profile.model_id, match.how) == (DEFAULT_MODEL_ID, "default")
    assert "default" in str(match)


@given(st.text(max_size=60))
def test_any_text_at_all_gives_a_profile(text: str) -> None:
    assert find_profile(text).profile in catalogue()


def test_prompts_are_the_trained_ones_and_grounding_came_with_generation_3() -> None:
    assert PROMPT_WORDS == {"text": "", "grounding": "grounding"}
    for profile in catalogue():
        assert prompt_words(profile, "text") == ""
        if profile.generation == 3:
            assert prompt_words(profile, "grounding") == "grounding"
        else:
            with pytest.raises(UsageError, match=f"{profile.model_id} has no mode 'grounding'"):
                prompt_words(profile, "grounding")


@pytest.mark.parametrize("version", ["0.27.1", "v0.27.1", "0.27.1+cu129", "0.27.1.post1"])
def test_0_27_1_is_bad_for_every_model(version: str) -> None:
    for profile in catalogue():
        bad = known_bad_engine(profile, version)
        assert bad is not None
        assert "loops" in bad.reason


@pytest.mark.parametrize("version", ["0.27.10", "0.27.0", "0.22.1", "0.32.0", "", "unknown"])
def test_other_versions_are_not_bad(version: str) -> None:
    assert all(known_bad_engine(profile, version) is None for profile in catalogue())


def test_0_30_0_is_bad_for_pixtral_only_and_only_with_transformers_5_17() -> None:
    for profile in catalogue():
        pixtral = profile.architecture == "pixtral"
        assert (known_bad_engine(profile, "0.30.0", "5.17.0") is not None) == pixtral
        assert (known_bad_engine(profile, "0.30.0") is not None) == pixtral  # not known to be good
        assert known_bad_engine(profile, "0.30.0", "5.16.1") is None
