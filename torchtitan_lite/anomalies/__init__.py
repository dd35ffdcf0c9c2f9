"""Steps that look wrong, and ranks that are slow: what is told of them, and what is done.

Pure: it is given the numbers that all ranks see and that all decide on alike. Layer: above section.
"""

from torchtitan_lite.anomalies.history import History
from torchtitan_lite.anomalies.judge import REPEAT, Action, Judge, Verdict

__all__ = ["REPEAT", "Action", "History", "Judge", "Verdict"]
