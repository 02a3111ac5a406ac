"""How the shipped tiny GLM-5.3 is made: data from a seed, a model in plain torch, its training, export and drafter.

Not part of the installed package: run from a checkout with `pip install -e .[training]`. docs/training.md tells the
plan and what came out of it.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as tfglm.cli.main: threads that wait must not burn shared cores
