"""Published weights under their names in transformers."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from torchtitan_lite.checkpoint.convert.hugging_face import expand_key, export_tensors, match_key
from torchtitan_lite.core.errors import PublishError
from torchtitan_lite.nn.spec import HuggingFaceForm, HuggingFaceKey, HuggingFaceModel
from torchtitan_lite.serving.publish.subscriber import Subscriber, Target

HUGGING_FACE = "hugging_face"
"""Key of the model in transformers, in the description of a publication."""


def hugging_face_to_json(model: HuggingFaceModel) -> dict[str, Any]:
    """Return the config.json and the names of a model in transformers as JSON values."""
    return {"config": dict(model.config), "keys": [asdict(key) for key in model.keys]}


def empty_state_dict(subscriber: Subscriber) -> dict[str, torch.Tensor]:
    """Return tensors in host memory for all weights under their names in transformers, as they are
    published. Raises PublishError if transformers does not have the model."""
    rules = _key_rules(subscriber)
    return {
        tensor.key: torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        for group in export_tensors(rules, subscriber.tensors, None)
        for tensor in group
    }


def hugging_face_config(subscriber: Subscriber) -> dict[str, Any]:
    """Return the config.json of the model. Raises PublishError if transformers does not have it."""
    config = _published_model(subscriber)["config"]
    dtypes = [spec.dtype for spec in subscriber.tensors.values() if spec.dtype.is_floating_point]
    dtype = str(dtypes[0]).removeprefix("torch.")
    return {**config, "dtype": dtype}


def hugging_face_targets(
    subscriber: Subscriber, state_dict: Mapping[str, torch.Tensor]
) -> list[Target]:
    """Return targets that fill the tensors of a transformers model in place, given its state dict.
    One that is fused or stacked there receives all published tensors that it consists of.

    Raises PublishError, with the first names, if either side has a tensor that the other lacks.
    """
    rules = _key_rules(subscriber)
    targets: list[Target] = []
    filled: set[int] = set()
    lacking: list[str] = []
    for name, spec in subscriber.tensors.items():
        rule, numbers = match_key(rules, name)
        for form in rule.forms:
            keys = expand_key(form, numbers, spec.shape)
            if form.scales is None and all(key in state_dict for key in keys):
                break
        else:
            if rule.forms:
                lacking.append(name)
            continue
        # Tied weights are two names of one tensor.
        places = {state_dict[key].data_ptr() for key in keys}
        is_whole = form.part == (0, 1) and form.rows is None
        if is_whole and places & filled:
            raise PublishError(
                f"{subscriber.where} publishes {name} apart from the tensor that it is tied to in "
                "the model here. Build the model with tie_word_embeddings = false."
            )
        filled |= places
        if form.key.count("*") > len(numbers):
            targets += [Target(name, state_dict[key], row=row) for row, key in enumerate(keys)]
            continue
        tensor = state_dict[keys[0]]
        if form.rows is not None:
            tensor = tensor[form.rows[0] : form.rows[0] + spec.shape[0]]
        if form.is_row:
            tensor = tensor[0]
        if form.transposed:
            tensor = tensor.transpose(-2, -1)
        index, count = form.part
        targets.append(Target(name, tensor.chunk(count, dim=-2)[index] if count > 1 else tensor))
    left = [key for key, tensor in state_dict.items() if tensor.data_ptr() not in filled]
    if lacking or left:
        raise PublishError(
            f"{subscriber.where} publishes another model: the one here lacks "
            f"{', '.join(lacking[:3]) or 'nothing'}, and has {', '.join(left[:3]) or 'nothing'} "
            "beside what is published."
        )
    return targets


def _published_model(subscriber: Subscriber) -> Mapping[str, Any]:
    """Return the form of `hugging_face_to_json`. Raises PublishError if transformers does not have
    the model."""
    known = subscriber.config.get(HUGGING_FACE)
    if not known:
        raise PublishError(
            f"The model that {subscriber.where} publishes is unknown to transformers."
        )
    if not isinstance(known, dict) or not isinstance(known.get("config"), dict):
        raise PublishError(f"{subscriber.where} describes its model without a config.json.")
    return known


def _key_rules(subscriber: Subscriber) -> list[HuggingFaceKey]:
    """Return the names of the published model. Raises PublishError as `_published_model` does, and
    for invalid ones."""
    known = _published_model(subscriber)
    try:
        return [
            HuggingFaceKey(
                name=str(key["name"]),
                forms=tuple(
                    HuggingFaceForm(
                        key=str(form["key"]),
                        part=(int(form["part"][0]), int(form["part"][1])),
                        transposed=bool(form["transposed"]),
                        is_row=bool(form["is_row"]),
                        scales=form["scales"],
                        rows=form["rows"] and (int(form["rows"][0]), int(form["rows"][1])),
                    )
                    for form in key["forms"]
                ),
            )
            for key in known["keys"]
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PublishError(f"{subscriber.where} describes its model wrongly: {error!r}") from None
