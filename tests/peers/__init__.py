"""Test suites and models of other projects, run against this one."""
