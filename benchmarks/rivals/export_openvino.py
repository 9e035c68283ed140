"""python export_openvino.py FOLDER OUT: of a text decoder OpenVINO's model, in the checkpoint's own dtype.

optimum's command makes int8 of more than a billion weights unless fp16 or fp32 is asked for; a configuration
that asks for nothing keeps them as they are."""

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
