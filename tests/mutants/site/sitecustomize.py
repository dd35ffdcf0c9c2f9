"""Python runs this file at the start of each process of a mutation test."""

import os

if "MUTANT" in os.environ or "MUTANT_BASES" in os.environ:
    from tests.mutants.imports import install

    install()
