"""Anomaly detection: anomalous steps, and slow ranks.

Pure functions of numbers that all ranks see, so that all decide alike.
"""

from torchtitan_lite.training.anomalies.detector import (
    ABORT,
    Action,
    AnomalyDetector,
    Decision,
    History,
)

__all__ = ["ABORT", "Action", "AnomalyDetector", "Decision", "History"]
