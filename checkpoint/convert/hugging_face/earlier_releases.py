"""Settings of transformers 5 in the form that transformers 4 reads as well. Without it, release 4
takes its defaults for them in silence: another base of RoPE, another number of experts.

Invariant: transformers 5 reads the same from both forms.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.convert.hugging_face.folder import json_bytes
from torchtitan_lite.checkpoint.storage.files import Files

TOKENIZER_CONFIG = "tokenizer_config.json"


def with_earlier_keys(original: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the keys of `ours`, which all releases read, that one of
    transformers 5 lacks. `ours` describes the same model."""
    return {**(ours if "rope_parameters" in original else {}), **original}


def rewrite_tokenizer_config(folder: Path, files: Files) -> None:
    """Rewrite the tokenizer_config.json in a folder if transformers 5 has written it: release 4 has
    no class of that name, and a table where 5 has a list of tokens. A file that is not JSON stays
    as it is."""
    path = folder / TOKENIZER_CONFIG
    try:
        values = json.loads(files.read(path))
    except (OSError, ValueError):
        return
    if not isinstance(values, dict) or values.get("tokenizer_class") != "TokenizersBackend":
        return
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    files.write_file(path, json_bytes(values))
