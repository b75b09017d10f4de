"""HellaSwag (https://github.com/rowanz/hellaswag, Zellers et al. 2019): 10,042 examples for validation, four endings
each.

    llmc prepare hellaswag
      dev/data/hellaswag/hellaswag_val.bin, which -h 1 scores: llm.c's file, bit for bit
    llmc prepare hellaswag --tokenizer llama3 --tokenizer-file tokenizer.model
      in dev/data/hellaswag_llama3: --choice-data
    llmc prepare hellaswag --local DIR           DIR holds hellaswag_val.jsonl

The context is `ctx` as it stands, an ending is a space and one of `endings` as it stands (lm-eval rewrites both, so
that its figures differ).
"""

from llmc.data_common import die, outlive_reader
from llmc.multiple_choice import encode, convert_download
from llmc.reader import rows

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"


def example(tokenizer, record, where):
    try:
        context, endings, gold = record["ctx"], [" " + e for e in record["endings"]], record["label"]
        if not isinstance(context, str) or type(gold) is not int or not 0 <= gold < len(endings) == 4:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        hint = "ctx, four endings and a label 0 to 3 are needed: hellaswag_val.jsonl or hellaswag_train.jsonl"
        die(f"{where} is no HellaSwag example", hint)
    return encode(tokenizer, context, endings, gold, where)


def main():
    versions = lambda args: 1 if args.tokenizer == "gpt2" else 2
    convert_download(__doc__, URL, "hellaswag", "hellaswag_val.bin", rows, example, versions)


if __name__ == "__main__":
    outlive_reader()
    main()
