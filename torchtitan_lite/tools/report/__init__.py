"""Reports of runs: one HTML page from the files that a run has written.

`read_run` reads a dump folder, `compare` compares two runs, `write_page` writes the page;
`check_samples` proves from the sample ledgers that every sample was used once. Files are untrusted
input: invalid records are skipped and listed, and text is escaped.
"""

from torchtitan_lite.tools.report.comparison import Comparison, compare
from torchtitan_lite.tools.report.json_lines import encodable
from torchtitan_lite.tools.report.page import write_page
from torchtitan_lite.tools.report.run_files import RunFiles, read_run, unique_labels
from torchtitan_lite.tools.report.samples import SampleCheck, check_samples

__all__ = [
    "Comparison",
    "RunFiles",
    "SampleCheck",
    "check_samples",
    "compare",
    "encodable",
    "read_run",
    "unique_labels",
    "write_page",
]
