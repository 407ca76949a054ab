"""Trains the tiny LightOnOCR from nothing, on drawn pages, on a CPU.

    tests/vllm-cpu/.venv/bin/python -m tests.tiny_lightonocr.train --out tests/tiny_lightonocr/checkpoint

It takes less than an hour, in one thread of a busy machine. `vllm serve` loads the outcome like any other LightOnOCR.

Two helpers, which exist in training only, show the model where to look: a probe that must name each cell's character
from its image token, and one attention head that must point at the cell of the character to be written next.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn import functional
from transformers import (
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
)

from tests.tiny_lightonocr.drawn import ALPHABET, CELL_PX, draw, random_line, random_look

# The model: LightOnOCR's own architecture, as small as still reads.
PATCH_PX = CELL_PX // 2
HEAD_WIDTH = 32
VISION_WIDTH, VISION_LAYERS = 96, 3
TEXT_WIDTH, TEXT_LAYERS, TEXT_MLP_WIDTH = 128, 4, 256
POINTING_LAYER = 2  # of the decoder; its first head gets the pointer loss

# The data: a batch holds pages of one size, about CELLS_A_BATCH cells of them together.
MOST_ROWS, MOST_COLUMNS = 12, 16
CELLS_A_BATCH, LEAST_PAGES, MOST_PAGES = 1000, 6, 64
IMAGE_MEAN, IMAGE_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# The schedule, in shares of the whole.
VISION_ONLY_UNTIL = 0.07
ALL_ROWS_FROM = 0.57
HELPERS_LOUD_UNTIL = {"probe": 0.3, "pointer": 0.7}
NOISE_FROM, NOISE_SHARE = 0.25, 0.03
LINE_STARTS_FROM, LINE_START_WEIGHT = 0.7, 4.0
LEARNING_RATE, LEAST_LEARNING_RATE_SHARE, WARM_UP_STEPS = 2e-3, 0.02, 60

CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{%- for part in message.content -%}"
    "{%- if part.type in ('image', 'image_url') -%}<|image_pad|>"
    "{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_pad|>", "<|vision_end|>")
IGNORED = -100


# ----------------------------------------------------------------------------------------------------------- vocabulary


class Vocabulary:
    """The tokens (256 bytes and the specials), and the classes of a cell: empty, a character, line end, page end."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.size = math.ceil(len(self.tokenizer) / 64) * 64
        self.end, self.padding = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        self.before_image = self.encode("<|im_start|>user\n")
        self.after_image = self.encode("<|im_end|>\n<|im_start|>assistant\n")
        self.tokens = {character: self.encode(character)[0] for character in ALPHABET + " \n"}
        self.cell_classes = {character: 1 + index for index, character in enumerate(ALPHABET + " \n")}
        self.page_end_class = 1 + len(self.cell_classes)
        self.class_count = 1 + self.page_end_class

    def encode(self, text: str) -> list[int]:
        """Text to token ids."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def byte_tokenizer() -> Any:
    """Makes a byte-level tokenizer without merges, so that one character is one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------- model


def tiny_config(vocabulary: Vocabulary) -> Any:
    """The configuration of a LightOnOCR of one million parameters."""
    return LightOnOcrConfig(
        image_token_id=vocabulary.tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        spatial_merge_size=2,
        tie_word_embeddings=True,
        vision_config={
            "model_type": "pixtral",
            "hidden_size": VISION_WIDTH,
            "head_dim": HEAD_WIDTH,
            "intermediate_size": 2 * VISION_WIDTH,
            "num_attention_heads": VISION_WIDTH // HEAD_WIDTH,
            "num_hidden_layers": VISION_LAYERS,
            "patch_size": PATCH_PX,
            "image_size": 1540,
            "num_channels": 3,
            "rope_theta": 10_000.0,
            "hidden_act": "silu",
        },
        text_config={
            "model_type": "qwen3",
            "hidden_size": TEXT_WIDTH,
            "head_dim": HEAD_WIDTH,
            "intermediate_size": TEXT_MLP_WIDTH,
            "num_hidden_layers": TEXT_LAYERS,
            "num_attention_heads": TEXT_WIDTH // HEAD_WIDTH,
            "num_key_value_heads": TEXT_WIDTH // HEAD_WIDTH // 2,
            "vocab_size": vocabulary.size,
            "max_position_embeddings": 16_384,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "eos_token_id": vocabulary.end,
            "pad_token_id": vocabulary.padding,
            "bos_token_id": None,
        },
    )


def fresh_model(config: Any) -> Any:
    """Makes an untrained model."""
    model = LightOnOcrForConditionalGeneration(config)
    with torch.no_grad():
        initialise(model)
    return model


def initialise(model: Any) -> None:
    """Sets the first weights for learning within minutes: with the stock scale of 0.02 it takes far longer."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            scale = module.weight.shape[1] ** -0.5
            if name.endswith(("o_proj", "down_proj")):
                scale *= (2 * (VISION_LAYERS if "vision" in name else TEXT_LAYERS)) ** -0.5
            module.weight.normal_(0, scale)
    language = model.model.language_model
    language.embed_tokens.weight.normal_(0, TEXT_WIDTH**-0.5)
    for layer in language.layers:  # sharper attention to begin with: pointing at one cell needs it
        layer.self_attn.q_norm.weight.fill_(2.0)
        layer.self_attn.k_norm.weight.fill_(2.0)
    filters = model.model.vision_encoder.patch_conv.weight
    filters.normal_(0, (3 * PATCH_PX**2) ** -0.5)
    filters.sub_(0.97 * filters.mean((1, 2, 3), keepdim=True))  # look at the ink, not at the brightness of the paper


class Reader:
    """The model in training: whole batches at once, with the two helpers."""

    def __init__(self, model: Any, vocabulary: Vocabulary) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.vision = model.model.vision_encoder
        self.projection = model.model.vision_projection
        self.language = model.model.language_model
        # The probe names the character of a cell and of its three neighbours to the left, so that a cell knows its
        # context; otherwise a repeated word can't be told from its twin.
        self.probe: Any = nn.Linear(TEXT_WIDTH, 4 * vocabulary.class_count)
        self.letters = torch.tensor(list(vocabulary.tokens.values()))

    def parameters(self) -> list[Any]:
        """All that is trained."""
        return [*self.model.parameters(), *self.probe.parameters()]

    def image_tokens(self, pixels: Any) -> Any:
        """Pixels to image tokens, one a cell.

        transformers packs a batch of images into one sequence and masks it, which is quadratic in the whole batch.
        Pages of one size need neither, so the modules are called one by one.
        """
        rows, columns = pixels.shape[2] // PATCH_PX, pixels.shape[3] // PATCH_PX
        patches = self.vision.ln_pre(self.vision.patch_conv(pixels).flatten(2).transpose(1, 2))
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        rotations = self.vision.patch_positional_embedding(patches, places)
        for layer in self.vision.transformer.layers:
            patches = layer(patches, None, position_embeddings=rotations)
        patches = self.projection.norm(patches)
        width = patches.shape[-1]
        merged = patches.view(-1, rows // 2, 2, columns // 2, 2, width).permute(0, 1, 3, 5, 2, 4)
        merged = merged.reshape(len(pixels), rows * columns // 4, 4 * width)
        merged = self.projection.patch_merger.merging_layer(merged)
        return self.projection.linear_2(self.projection.act(self.projection.linear_1(merged)))

    def probe_loss(self, image_tokens: Any, cells: Any) -> tuple[Any, Any]:
        """How badly the cells are named, and the share of those with something in them that are named rightly."""
        count = self.vocabulary.class_count
        scores = self.probe(image_tokens).view(*cells.shape, 4, count)
        loss = functional.cross_entropy(scores[..., 0, :].reshape(-1, count), cells.reshape(-1))
        for back in (1, 2, 3):
            neighbour = scores[:, :, back:, back, :].reshape(-1, count)
            loss = loss + 0.2 * functional.cross_entropy(neighbour, cells[:, :, :-back].reshape(-1))
        right = (scores[..., 0, :].argmax(-1) == cells)[cells > 0].float().mean()
        return loss, right

    def text_losses(self, image_tokens: Any, batch: Batch, *, noise: float, line_weight: float) -> tuple[Any, ...]:
        """The loss of the text and of the pointer, and the share of each that is right."""
        prompt_length = len(self.vocabulary.before_image) + image_tokens.shape[1] + len(self.vocabulary.after_image)
        hidden = self._prompt_and_text(image_tokens, self._noisy(batch.targets[:, :-1].clamp(min=0), noise))
        positions = torch.arange(hidden.shape[1])[None]
        rotations = self.language.rotary_emb(hidden, positions)
        weights = line_start_weights(batch.targets, self.vocabulary, line_weight)
        sources = torch.where(batch.sources >= 0, batch.sources + len(self.vocabulary.before_image), IGNORED)
        for index, layer in enumerate(self.language.layers):
            if index == POINTING_LAYER:
                pointing = self._pointing_scores(layer, hidden, rotations, prompt_length)
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotations)
        scores = self.model.lm_head(self.language.norm(hidden[:, prompt_length - 1 :]))
        return (
            weighted_cross_entropy(scores, batch.targets, weights),
            weighted_cross_entropy(pointing, sources, weights),
            share_right(scores, batch.targets),
            share_right(pointing, sources),
        )

    def _prompt_and_text(self, image_tokens: Any, text: Any) -> Any:
        def embedded(ids: Any) -> Any:
            return self.language.embed_tokens(ids).expand(len(text), -1, -1)

        before, after = torch.tensor([self.vocabulary.before_image]), torch.tensor([self.vocabulary.after_image])
        return torch.cat([embedded(before), image_tokens, embedded(after), self.language.embed_tokens(text)], dim=1)

    def _noisy(self, text: Any, share: float) -> Any:
        """Some letters replaced by others, so that one wrong letter does not lead the next astray."""
        changed = torch.rand(text.shape) < share
        return torch.where(changed, self.letters[torch.randint(len(self.letters), text.shape)], text)

    def _pointing_scores(self, layer: Any, hidden: Any, rotations: Any, prompt_length: int) -> Any:
        """How the first head of a decoder layer scores the places of the prompt, for each letter to be written."""
        attention, width = layer.self_attn, HEAD_WIDTH
        hidden = layer.input_layernorm(hidden)
        queries = attention.q_norm(attention.q_proj(hidden[:, prompt_length - 1 :])[..., :width])
        keys = attention.k_norm(attention.k_proj(hidden[:, :prompt_length])[..., :width])
        cos, sin = rotations
        queries = rotate(queries, cos[:, prompt_length - 1 :], sin[:, prompt_length - 1 :])
        keys = rotate(keys, cos[:, :prompt_length], sin[:, :prompt_length])
        return (queries @ keys.transpose(1, 2)) * attention.scaling


def rotate(vectors: Any, cos: Any, sin: Any) -> Any:
    """Rotary position embedding of one head."""
    half = vectors.shape[-1] // 2
    return vectors * cos + torch.cat((-vectors[..., half:], vectors[..., :half]), dim=-1) * sin


def line_start_weights(targets: Any, vocabulary: Vocabulary, weight: float) -> Any:
    """Weighs the start of a line (and, less, its end), the hardest thing to learn: there the pointer must jump."""
    newline = vocabulary.tokens["\n"]
    half = (1 + weight) / 2
    weights = torch.ones(targets.shape)
    weights[:, 1:][targets[:, :-1] == newline] = weight
    weights[:, 2:][targets[:, :-2] == newline] = half
    weights[(targets == newline) | (targets == vocabulary.end)] = half
    return weights * (targets != IGNORED)


def weighted_cross_entropy(scores: Any, targets: Any, weights: Any) -> Any:
    """Cross entropy with a weight for each target."""
    losses = functional.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    return (losses * weights).sum() / weights.sum()


def share_right(scores: Any, targets: Any) -> Any:
    """The share of targets that score highest."""
    return (scores.argmax(-1) == targets)[targets != IGNORED].float().mean()


# ----------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Batch:
    """Drawn pages of one size, as tensors."""

    pixels: Any  # page, channel, y, x
    cells: Any  # page, row, column: the class of the cell
    targets: Any  # page, place: the token to be written
    sources: Any  # page, place: the cell that the token is written from


class PageSource:
    """Draws batches from a seed."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self.vocabulary = vocabulary
        self.rng = random.Random(seed)
        self.noise_rng = np.random.default_rng(seed)

    def batch(self, most_rows: int) -> Batch:
        """Draws pages of one size, of at most so many rows."""
        least_rows = 1 if self.rng.random() < 0.5 else max(1, most_rows // 2)
        rows, columns = self.rng.randint(least_rows, most_rows), self.rng.randint(8, MOST_COLUMNS)
        count = max(LEAST_PAGES, min(MOST_PAGES, CELLS_A_BATCH // (rows * columns)))
        pages = [self._lines(rows, columns) for _ in range(count)]
        pixels = np.stack([self._pixels(lines, rows, columns) for lines in pages])
        return Batch(normalised(pixels), *self._labels(pages, rows, columns))

    def _lines(self, rows: int, columns: int) -> list[str]:
        count = rows if self.rng.random() < 0.7 else self.rng.randint(1, rows)
        return [random_line(self.rng, columns) for _ in range(count)]

    def _pixels(self, lines: list[str], rows: int, columns: int) -> Any:
        """Draws a page, and sometimes blurs it or lays noise over it."""
        image = draw(lines, rows, columns, random_look(self.rng), self.rng)
        if self.rng.random() < 0.3:
            share = self.rng.uniform(0.5, 0.9)
            small = (round(image.width * share), round(image.height * share))
            image = image.resize(small, Image.Resampling.LANCZOS).resize(image.size, Image.Resampling.BICUBIC)
        pixels = np.asarray(image, dtype=np.float32)
        if self.rng.random() < 0.4:
            strength = self.rng.uniform(1, 8)
            pixels = pixels + strength * self.noise_rng.standard_normal(pixels.shape, dtype=np.float32)
        return np.clip(np.round(pixels), 0, 255)

    def _labels(self, pages: list[list[str]], rows: int, columns: int) -> tuple[Any, Any, Any]:
        longest = max(sum(len(line) + 1 for line in lines) for lines in pages)
        cells = torch.zeros((len(pages), rows, columns), dtype=torch.long)
        targets = torch.full((len(pages), longest), IGNORED)
        sources = torch.full((len(pages), longest), IGNORED)
        for page, lines in enumerate(pages):
            place = 0
            for row, line in enumerate(lines):
                is_last = row == len(lines) - 1
                for column, character in enumerate(line + "\n"):
                    ends_page = is_last and character == "\n"
                    cells[page, row, column] = (
                        self.vocabulary.page_end_class if ends_page else self.vocabulary.cell_classes[character]
                    )
                    targets[page, place] = self.vocabulary.end if ends_page else self.vocabulary.tokens[character]
                    sources[page, place] = row * columns + column
                    place += 1
        return cells, targets, sources


def normalised(gray: Any) -> Any:
    """Gray pages to three channels, as the image processor does it."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGE_MEAN, IMAGE_STD))
    return (torch.from_numpy(gray).unsqueeze(1) / 255 - mean) / std


# ------------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Figures:
    """What a step reports."""

    text_loss: float
    probe_loss: float
    pointer_loss: float
    text_right: float
    cells_right: float
    pointer_right: float


def train(reader: Reader, pages: PageSource, options: argparse.Namespace, save: Callable[[], None]) -> int:
    """Trains until the schedule is through; returns the number of pages seen."""
    optimizer = make_optimizer(reader)
    progress_at = schedule_clock(options)
    page_count, step, recent, saved_at = 0, 0, [], time.monotonic()
    while (progress := progress_at(step)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step)
        batch = pages.batch(rows_at(progress))
        loss, figures = losses(reader, batch, progress)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        page_count, step = page_count + len(batch.pixels), step + 1
        recent.append(figures)
        if len(recent) == 50:
            report(step, page_count, progress, recent)
            recent.clear()
        if time.monotonic() - saved_at > 300:
            save()
            saved_at = time.monotonic()
    return page_count


def losses(reader: Reader, batch: Batch, progress: float) -> tuple[Any, Figures]:
    """The loss of a batch at this point of the schedule."""
    image_tokens = reader.image_tokens(batch.pixels)
    probe_loss, cells_right = reader.probe_loss(image_tokens, batch.cells)
    if progress < VISION_ONLY_UNTIL:
        return probe_loss, Figures(0, probe_loss.item(), 0, 0, cells_right.item(), 0)
    text_loss, pointer_loss, text_right, pointer_right = reader.text_losses(
        image_tokens,
        batch,
        noise=NOISE_SHARE if progress > NOISE_FROM else 0.0,
        line_weight=LINE_START_WEIGHT if progress > LINE_STARTS_FROM else 1.0,
    )
    loud = {helper: 1.0 if progress < until else 0.3 for helper, until in HELPERS_LOUD_UNTIL.items()}
    loss = text_loss + loud["probe"] * probe_loss + loud["pointer"] * pointer_loss
    figures = (text_loss, probe_loss, pointer_loss, text_right, cells_right, pointer_right)
    return loss, Figures(*(figure.item() for figure in figures))


def make_optimizer(reader: Reader) -> Any:
    """AdamW, with weight decay on matrices only."""
    groups = [
        {"params": [p for p in reader.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in reader.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)


def schedule_clock(options: argparse.Namespace) -> Callable[[int], float]:
    """Progress from 0 to 1: by steps, which can be repeated, or by the clock where `--minutes` is given."""
    started = time.monotonic()
    if options.minutes is None:
        return lambda step: step / options.steps
    return lambda step: (time.monotonic() - started) / (60 * options.minutes)


def rows_at(progress: float) -> int:
    """Pages grow with time, from 1 row to all; the vision alone is warmed up on up to 3."""
    if progress < VISION_ONLY_UNTIL:
        return 3
    grown = (progress - VISION_ONLY_UNTIL) / (ALL_ROWS_FROM - VISION_ONLY_UNTIL)
    return max(1, min(MOST_ROWS, 1 + int(MOST_ROWS * grown)))


def learning_rate(progress: float, step: int) -> float:
    """A short warm-up, a tenth of the time at the top, then down a cosine."""
    falling = min(1.0, max(0.0, (progress - 0.1) / 0.9))
    share = LEAST_LEARNING_RATE_SHARE + (1 - LEAST_LEARNING_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * falling))
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * share


def report(step: int, pages: int, progress: float, recent: list[Figures]) -> None:
    """Prints the means of the last steps."""
    means = {f.name: sum(getattr(figures, f.name) for figures in recent) / len(recent) for f in fields(Figures)}
    shown = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
    print(f"{progress:6.1%}  step {step}  pages {pages}  rows {rows_at(progress)}  {shown}", flush=True)


# --------------------------------------------------------------------------------------------------------------- saving


def save_checkpoint(model: Any, vocabulary: Vocabulary, out: Path) -> None:
    """Writes the checkpoint in bfloat16, with the configuration as the published LightOnOCR models have it."""
    copy = LightOnOcrForConditionalGeneration(tiny_config(vocabulary))
    copy.load_state_dict(model.state_dict())
    copy.generation_config.eos_token_id = vocabulary.end
    copy.generation_config.pad_token_id = vocabulary.padding
    copy.to(torch.bfloat16).save_pretrained(out)
    PixtralProcessor(
        image_processor=PixtralImageProcessor(
            size={"longest_edge": 1540}, patch_size={"height": PATCH_PX, "width": PATCH_PX}
        ),
        tokenizer=vocabulary.tokenizer,
        patch_size=PATCH_PX,
        spatial_merge_size=2,
        chat_template=CHAT_TEMPLATE,
        image_token="<|image_pad|>",
        image_break_token="<|vision_pad|>",
        image_end_token="<|vision_end|>",
    ).save_pretrained(out)
    rewrite_config(out / "config.json")


def rewrite_config(path: Path) -> None:
    """Renames what the published models name otherwise: vLLM picks its class by these."""
    config = json.loads(path.read_text())
    config |= {
        "architectures": ["LightOnOCRForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": config.pop("image_token_id"),
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
    }
    path.write_text(json.dumps(config, indent=1) + "\n")


# ----------------------------------------------------------------------------------------------------------------- main


def check_image_tokens(reader: Reader, batch: Batch) -> None:
    """Makes sure that the batched way to image tokens is the way transformers and vLLM go."""
    sizes = [tuple(batch.pixels.shape[2:])] * len(batch.pixels)
    with torch.no_grad():
        ours = reader.image_tokens(batch.pixels)
        theirs = reader.model.model.get_image_features(pixel_values=batch.pixels, image_sizes=sizes).pooler_output
    torch.testing.assert_close(ours, torch.stack(list(theirs)), rtol=1e-3, atol=1e-3)


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="train", description="Train the tiny LightOnOCR.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=1, help="of the pages and the first weights (default 1)")
    parser.add_argument("--steps", type=int, default=5000, help="length of the schedule (default 5000)")
    parser.add_argument("--minutes", type=float, help="set the length of the schedule by the clock instead")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    return parser.parse_args(argv)


def main() -> None:
    """Trains and saves."""
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    vocabulary = Vocabulary()
    model = fresh_model(tiny_config(vocabulary))
    reader = Reader(model, vocabulary)
    check_image_tokens(reader, PageSource(vocabulary, seed=0).batch(most_rows=3))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    started = time.monotonic()
    pages = train(
        reader, PageSource(vocabulary, options.seed), options, lambda: save_checkpoint(model, vocabulary, options.out)
    )
    save_checkpoint(model, vocabulary, options.out)
    print(f"{pages:,} pages in {(time.monotonic() - started) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
