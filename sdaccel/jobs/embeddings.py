"""What the pipeline reads from the prompts of a batch: each is encoded once, and by itself.

So what is kept from earlier batches cannot show in an image, and a run taken up again gives the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from sdaccel.runtime import RunReport

PROMPTS = ("prompt", "negative_prompt")
KEPT = 256
_NAMES = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")

Values = dict[str, Any]
"""Embeddings of one prompt by their name in the pipeline's call: (1, tokens, width), pooled ones (1, width)."""


Key = tuple[bool, str | None, Hashable]
"""Whether it is a negative one, the prompt, and what the text encoders' weights were."""


class Embeddings:
    """Keeps the last `KEPT` with the report of what encoded them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, tuple[Values, RunReport]] = OrderedDict()

    def of(
        self,
        pipe: Any,
        arguments: Mapping[str, Any],
        weights: Hashable,
        run: Callable[[Callable[[], Any]], tuple[Any, RunReport]],
    ) -> tuple[Values, list[RunReport]]:
        """The arguments that stand for the prompts of a call, a row an image, and the reports of what encoded them.

        arguments: of the call; prompts are a list, negative ones too or None.
        weights: what the text encoders' weights are, as their LoRAs tell.
        run: calls what it is given and reports.
        """
        texts = arguments["prompt"]
        negatives = arguments["negative_prompt"] or [None] * len(texts)
        images: list[list[Key]] = [[(False, text, weights)] for text in texts]
        if _guided(pipe, arguments):
            for keys, text in zip(images, negatives, strict=True):
                keys.append((True, text, weights))
        needed = dict.fromkeys(key for keys in images for key in keys)
        found = {key: self._kept[key] for key in needed if key in self._kept}
        missing = [key for key in needed if key not in found]
        if missing:
            values, report = run(lambda: [_encoded(pipe, text, negative) for negative, text, _ in missing])
            new = {key: (value, report) for key, value in zip(missing, values, strict=True)}
            found |= new
            if report.ok:
                self._kept |= new
        for key in needed:
            if key in self._kept:
                self._kept.move_to_end(key)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        rows = [{name: value for key in keys for name, value in found[key][0].items()} for keys in images]
        reports = {id(found[key][1]): found[key][1] for key in needed}
        return _stacked(rows), list(reports.values())


def _guided(pipe: Any, arguments: Mapping[str, Any]) -> bool:
    return arguments["guidance_scale"] > 1 and getattr(pipe.unet.config, "time_cond_proj_dim", None) is None


def _encoded(pipe: Any, text: str | None, negative: bool) -> Values:
    """The half of it that the pipeline makes of a prompt, or of a negative one (None: of its absence)."""
    found = pipe.encode_prompt(
        prompt=[text or ""],
        device=pipe._execution_device,
        num_images_per_prompt=1,
        do_classifier_free_guidance=negative,
        negative_prompt=[text] if negative and text is not None else None,
    )
    named = zip(_NAMES, found, strict=False)
    return {name: value for name, value in named if value is not None and name.startswith("negative") == negative}


def _stacked(rows: Sequence[Values]) -> Values:
    import torch

    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
