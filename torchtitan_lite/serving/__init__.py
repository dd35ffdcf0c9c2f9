"""Use of trained weights: inference, and publishing to engines during training."""
