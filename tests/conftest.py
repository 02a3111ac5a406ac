"""Before any test module imports torch: OpenMP threads that wait must not spin, or a loaded machine takes ten times as
long."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
