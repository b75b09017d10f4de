"""The module llmc.post_training, under its path of before."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import llmc.post_training  # noqa: E402

sys.modules[__name__] = llmc.post_training
