"""The module llmc.data_common, under its path of before."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import llmc.data_common  # noqa: E402

sys.modules[__name__] = llmc.data_common
