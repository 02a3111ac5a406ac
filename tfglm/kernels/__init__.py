"""CUDA C++ sources, compiled at run time by tfglm.ops.nvrtc; one file a family, shared parts in .cuh headers."""
