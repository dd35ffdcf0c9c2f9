"""Layouts, and the exchange from one to another: computed from the layouts alone, the same on every
rank, without communication."""
