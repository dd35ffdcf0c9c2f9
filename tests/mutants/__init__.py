"""Mutation tests of parallel training: each mutant has one wrong collective, divisor, index, wait,
or decision, and the tests must fail with it."""
