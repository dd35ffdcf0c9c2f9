import pytest
from pydantic import ValidationError

from torchtitan_lite.config.tables.metrics import MetricsConfig
from torchtitan_lite.config.tables.profiling import ProfilingConfig
from torchtitan_lite.config.tables.section import field_texts


def test_a_cycle_that_does_not_fit_shows_its_numbers():
    with pytest.raises(ValidationError, match=r"\(5\) \+ profiler_active \(2\) = 7 .* \(6\)"):
        ProfilingConfig(profile_freq=6, profiler_warmup=5, profiler_active=2)


def test_a_cycle_that_exactly_fits_is_accepted():
    assert ProfilingConfig(profile_freq=4).profile_freq == 4


def test_frequency_is_at_least_one():
    with pytest.raises(ValidationError, match="at least 1, got 0"):
        MetricsConfig(log_freq=0)


@pytest.mark.parametrize("section", [MetricsConfig, ProfilingConfig])
def test_every_key_has_a_help_text(section):
    texts = field_texts(section)
    assert [name for name in section.model_fields if not texts.get(name)] == []
