"""Before any test module imports torch: OpenMP threads that wait must not spin for long, or a loaded machine takes ten
times as long. As in tfglm.cli.main."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")
