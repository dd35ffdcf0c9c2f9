"""The schema of a configuration file: one module per TOML table.

Names and meanings follow torchtitan 0.2.2. `section.py` holds the base class, and
`config/schema.py` composes the tables into `Config`.
"""
