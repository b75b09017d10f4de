"""What programs took from here before llmc/batches.py had it: `rows` gives one row at a time. llmc.rows has batches."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from llmc.batches import open_shards, pieces_of, read_tokenizer, row_stream as rows  # noqa: E402

__all__ = ["open_shards", "pieces_of", "read_tokenizer", "rows"]
