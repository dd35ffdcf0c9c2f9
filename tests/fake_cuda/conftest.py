"""These tests need a CUDA build of torch and its runtime's stand-in: `make test-fake-cuda`."""

import os

collect_ignore_glob = [] if os.environ.get("TORCHTITAN_LITE_FAKE_CUDA") else ["test_*.py"]
