"""`python -m chaos.launch FAULT OUT ARGS...`: the command `vitlab ARGS` with a fault armed, in one process of many.

FAULT is JSON: the fields of a fault, and the rank of the process that it is for.
"""

import json
import os
import sys
from pathlib import Path

import vitlab.training.loop
from chaos.faults import Fault, arm
from vitlab.cli import main

if __name__ == "__main__":
    fault = json.loads(sys.argv[1])
    rank = fault.pop("rank")
    if os.environ.get("RANK") == str(rank):
        arm(Path(sys.argv[2]), Fault(**fault))
    sys.argv = ["vitlab", *sys.argv[3:]]
    assert vitlab.training.loop  # imported before arming: faults are put where names were imported to
    main()
