"""The fallback plugin: serves architectures that no other plugin describes, with the modules of the installed
transformers.

The decoder runs transformers' modules over a ragged batch. Attention, the KV pool and, on a CPU, the linear
layers are mmengine's. A model's own code is never run. Importing this module imports neither torch nor
transformers.
"""

from mmengine_transformers.plugin import TransformersPlugin

plugin = TransformersPlugin()
