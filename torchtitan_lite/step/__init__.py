"""Parts of a step beside forward, backward and update: the reduction of numbers, work times, and
the reaction to anomalous steps.

Layer: above train_state, anomalies, replica and checkpoint; the trainer composes it.
"""
