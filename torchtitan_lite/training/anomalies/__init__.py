"""Anomaly detection: anomalous steps, and slow ranks.

Pure functions of numbers that all ranks see, so that all decide alike.
"""

from torchtitan_lite.training.anomalies.detector import (
    ABORT,
    AnomalyDetector,
    Decision,
    StepAction,
    StepStatistics,
)

__all__ = ["ABORT", "AnomalyDetector", "Decision", "StepAction", "StepStatistics"]
