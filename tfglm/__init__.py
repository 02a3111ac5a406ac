"""tfglm: GLM-5.3 and GLM-5.3-Flash on small clusters of DGX Sparks, every reply exact."""

__version__ = "0.1.0"
