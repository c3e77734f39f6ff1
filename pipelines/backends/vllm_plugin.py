"""vLLM's entry point into this project (group `vllm.general_plugins` in pyproject.toml): calibrated confidences for DSpark.

Where this project is installed, every vLLM process calls `register` - also those that serve no drafter, as the engines of
regenerate and cache_targets. So this file imports nothing, and the class is named by a string, which vLLM resolves when a
drafter of that architecture is loaded and at no other time. `VLLM_PLUGINS=` (empty) leaves it out.
"""

ARCHITECTURE, CLASS = "Qwen3DSparkModel", "pipelines.backends.vllm_dspark:CalibratedQwen3DSpark"


def register() -> None:
    """May be called any number of times."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, CLASS)
