"""Reading of whole tensors and parts of them, wherever their parts are."""

from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.small_checkpoint import TWO_FILES, write_checkpoint
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot, read_tensor
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.core.errors import DamagedCheckpoint


@pytest.mark.parametrize("wanted", [slice(None), slice(1, 2)])
def test_a_tensor_of_several_files_is_assembled(tmp_path: Path, wanted: slice) -> None:
    tensors = write_checkpoint(tmp_path, step=3)
    snapshot = StoredSnapshot(open_storage(str(tmp_path)), "step-3")
    assert any(len(one.layout.mesh.holders) > 1 for one in snapshot.tensors.values())
    for name, tensor in tensors.items():
        if wanted == slice(None):
            torch.testing.assert_close(read_tensor(snapshot, name), tensor, rtol=0, atol=0)
        elif tensor.dim() and len(tensor) > 1:
            slices = [wanted, *(slice(0, size) for size in tensor.shape[1:])]
            found = read_tensor(snapshot, name, slices)
            torch.testing.assert_close(found, tensor[wanted], rtol=0, atol=0)


def test_a_changed_byte_is_detected_wherever_it_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, step=3)
    name = "model.weight"
    path = tmp_path / "step-3" / TWO_FILES[0]
    snapshot = StoredSnapshot(open_storage(str(tmp_path)), "step-3")
    (box,) = (one for one in snapshot.manifest.tensors[name].boxes if one.file == path.name)
    raw = bytearray(path.read_bytes())
    raw[box.bytes[0]] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamagedCheckpoint, match=r"the checksum of model\.weight"):
        read_tensor(snapshot, name)
    with pytest.raises(DamagedCheckpoint, match=r"the checksum of model\.weight"):
        snapshot.part(name, path.name)
