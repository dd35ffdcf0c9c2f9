"""Anomaly detection: anomalous steps, and slow ranks.

Pure functions of numbers that all ranks see, so that all decide alike. Layer: above section.
"""

from torchtitan_lite.anomalies.history import History
from torchtitan_lite.anomalies.judge import REPEAT, Action, Judge, Verdict

__all__ = ["REPEAT", "Action", "History", "Judge", "Verdict"]
