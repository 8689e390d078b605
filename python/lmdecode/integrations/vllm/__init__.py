"""lmdecode inside vLLM: its sampler on CPUs.

``register`` is the plug-in that vLLM calls in each of its processes, by the entry point
``lmdecode`` of the group ``vllm.general_plugins``. docs/guides/serving_engines.md says how to use
it, and how to switch it off.
"""

from lmdecode.integrations.vllm.sampler import register

__all__ = ["register"]
