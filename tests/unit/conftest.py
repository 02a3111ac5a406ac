"""How long an example takes tells what else the machine does, so hypothesis sets it no deadline."""

from hypothesis import settings

settings.register_profile("tfglm", deadline=None)
settings.load_profile("tfglm")
