r"""MMLU (https://github.com/hendrycks/test, Hendrycks et al. 2021): 14,042 test questions of 57 subjects, four answers
each.

    llmc prepare mmlu                 dev/data/mmlu/mmlu.bin, for --choice-data
    llmc prepare mmlu --local DIR     DIR holds data.tar

As in llm.c's mmlu.py, the context is "Question: ...\n\nAnswer:" and an ending is a space and the text of an answer, not
its letter (which lm-eval scores, so that its figures differ). Subjects come in alphabetical order.
"""

import csv
import fnmatch
import io
import tarfile

from llmc.data_common import die, outlive_reader
from llmc.multiple_choice import encode, convert_download

URL = "https://people.eecs.berkeley.edu/~hendrycks/data.tar"
TESTS = "data/test/*.csv"


def records(path):
    """(row of six fields, where)"""
    try:
        with tarfile.open(path) as tar:
            members = [m for m in tar.getmembers() if m.isfile() and fnmatch.fnmatchcase(m.name, TESTS)]
            if not members:
                die(f"'{path}' holds no {TESTS}", "delete it and get MMLU's data.tar again")
            for member in sorted(members, key=lambda m: m.name):
                reader = csv.reader(io.TextIOWrapper(tar.extractfile(member), "utf-8", newline=""))
                for row in reader:
                    yield row, f"'{path}', {member.name} line {reader.line_num}"
    except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError, csv.Error) as e:
        die(f"'{path}' is not MMLU's data.tar: {e}", "delete it and get it again")


def example(tokenizer, row, where):
    if len(row) != 6 or row[5] not in ("A", "B", "C", "D"):
        die(f"{where} is no MMLU question", "a row has a question, four answers and one of the letters A to D")
    endings = [" " + answer for answer in row[1:5]]
    return encode(tokenizer, f"Question: {row[0]}\n\nAnswer:", endings, "ABCD".index(row[5]), where)


def main():
    convert_download(__doc__, URL, "mmlu", "mmlu.bin", records, example, lambda args: 2)


if __name__ == "__main__":
    outlive_reader()
    main()
