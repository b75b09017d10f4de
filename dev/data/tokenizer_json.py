"""The module llmc.tokenizer_json, under its path of before."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import llmc.tokenizer_json  # noqa: E402

sys.modules[__name__] = llmc.tokenizer_json
