"""What a step has beside forward, backward and update: the numbers that all ranks agree on, the
time that each took, and what follows where a step looks wrong.

Layer: above train_state, anomalies, replica and checkpoint; the trainer puts it together.
"""
