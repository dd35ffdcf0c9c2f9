"""Reinforcement learning with trainer and sampler as separate jobs. See README.md.

Reading order: task, rollouts, sampler; extension; __main__.
"""
