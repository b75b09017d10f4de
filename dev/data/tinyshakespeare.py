"""The command llmc prepare tinyshakespeare, under its path of before."""

import os
import runpy
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if __name__ == "__main__":  # a worker process imports this file
    runpy.run_module("llmc.tinyshakespeare", run_name="__main__")
