"""The fallback model plugin: serves architectures that no other plugin serves ("hosted" models), with the
installed transformers library.

The decoder runs transformers' modules on a ragged batch (rows of different lengths without padding). mmengine
provides the attention, the KV pool and, on a CPU, the linear layers. Code in a model's folder is never run.
Importing this module imports neither torch nor transformers.
"""

from mmengine_transformers.plugin import TransformersPlugin

plugin = TransformersPlugin()
