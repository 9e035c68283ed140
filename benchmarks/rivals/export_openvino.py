"""Exports a text decoder to OpenVINO's format, in the checkpoint's own dtype.

    python export_openvino.py FOLDER OUT

optimum's command line converts models with more than a billion weights to int8, unless fp16 or fp32 is
requested. An empty OVConfig keeps the dtype.
"""

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

if __name__ == "__main__":
    folder, out = sys.argv[1:]
    main_export(
        folder,
        out,
        task="text-generation-with-past",
        ov_config=OVConfig(),
        convert_tokenizer=False,
    )
