"""The module llmc.preference_file, under its path of before."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import llmc.preference_file  # noqa: E402

sys.modules[__name__] = llmc.preference_file
