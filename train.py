"""Train a language model: `torchrun --nproc-per-node N train.py --config FILE`.

`python train.py --config FILE` runs one process; `--help` lists every key. What a rank does is in
`torchtitan_lite/cli/`: `train.py` checks the configuration, `train_rank.py` starts the mesh, builds
and trains.
"""

import sys

from torchtitan_lite.core.process_exit import exit_process
from torchtitan_lite.core.rank.supervised import attach_to_launcher

if __name__ == "__main__":
    # Before the imports, which take a second in which the launcher may die.
    attach_to_launcher()
    from torchtitan_lite.cli import main

    exit_process(main(["train", *sys.argv[1:]]))
