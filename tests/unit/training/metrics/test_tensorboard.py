import pytest

from torchtitan_lite.training.metrics import Event
from torchtitan_lite.training.metrics.tensorboard import TensorBoard


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventAccumulator(str(folder))
    files.Reload()
    return files


def test_files_are_readable_and_complete(tmp_path, make_record):
    board = TensorBoard(tmp_path / "tb", resume_step=0)
    board.step(make_record(1, loss=5.0))
    board.step(make_record(10, loss=4.0, mfu=0.25, skipped=True))
    board.event(Event(name="validation", step=10, values={"loss": 4.5, "corpus": "held out"}))
    board.close()
    files = read(tmp_path / "tb")
    assert [(s.step, s.value) for s in files.Scalars("loss/train")] == [(1, 5.0), (10, 4.0)]
    assert [(s.step, s.value) for s in files.Scalars("loss/validation")] == [(10, 4.5)]
    assert [(s.step, s.value) for s in files.Scalars("train/mfu")] == [(10, 0.25)]
    assert [s.value for s in files.Scalars("train/skipped")] == [0.0, 1.0]
    assert files.Scalars("train/lr")[0].value == pytest.approx(8e-4)
    assert "train/step" not in files.Tags()["scalars"]
    assert "train_events/validation/corpus" not in files.Tags()["scalars"]
    (text,) = files.Tensors("train_events/validation/corpus/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (10, b"    held out")


def test_resume_hides_later_steps(tmp_path, make_record):
    first = TensorBoard(tmp_path, resume_step=0)
    for step in (1, 2, 3):
        first.step(make_record(step, loss=float(step)))
    first.close()
    second = TensorBoard(tmp_path, resume_step=1)
    second.step(make_record(2, loss=20.0))
    second.close()
    scalars = read(tmp_path).Scalars("loss/train")
    assert [(s.step, s.value) for s in scalars] == [(1, 1.0), (2, 20.0)]


def test_nothing_is_opened_before_the_first_write(tmp_path):
    board = TensorBoard(tmp_path / "tb", resume_step=0)
    board.close()
    assert not (tmp_path / "tb").exists()


def test_tensorboard_opens_on_the_losses(tmp_path, make_record):
    board = TensorBoard(tmp_path, resume_step=0)
    for name in ("validation", "time_accounting", "averaged", "quorum", "healed", "start"):
        board.event(Event(name=name, step=1, values={"loss": 2.0, "seconds": 1.0}))
    board.step(make_record(1, loss=5.0, router_load={"layers.1": 1.5}))
    board.close()
    # TensorBoard shows the groups in this order.
    groups = list(
        dict.fromkeys(tag.partition("/")[0] for tag in sorted(read(tmp_path).Tags()["scalars"]))
    )
    assert groups == ["loss", "train", "train_events"]
