"""Formats C, CUDA and Python: clang-format (.clang-format) and ruff (ruff.toml), and first what they leave alone.

    .venv/bin/python dev/tools/format.py [--check] [FILE ...]      default: every file of the repository

What they leave alone: comments and docstrings over 120 columns, which are wrapped (tables, formulas and lists keep
their lines), comments behind code that is full, which go above it, and long strings, which become several. --check
changes nothing, shows what would change and exits with 1. Only Python's standard library and the two programs are used,
in the versions that requirements.txt pins: others would format differently.
"""

import argparse
import ast
import difflib
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from llmc.tool_output import Parser, outlive_reader, plural  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 120
C_FILES = (".c", ".h", ".cu", ".cuh", ".cpp")
C_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//|/\*.*?\*/|.', re.S)


# ---- comments


def is_prose(text):
    """Whether a comment's line may be joined with others: no heading, list, table, formula or command."""
    return bool(re.match(r"[^\s\-*|+]", text)) and not re.match(r"\d+[.)] |[A-Z]\w*\(.*\)$", text) and "   " not in text


def goes_on(texts, i, longest):
    """Whether line i is prose that flows on in the next one, and does not end because something else begins."""
    if i + 1 == len(texts) or not (is_prose(texts[i]) and is_prose(texts[i + 1])):
        return False
    least = longest - 4 if texts[i].endswith((".", ":")) else 70
    return len(texts[i]) + 1 + len(texts[i + 1].split(" ")[0]) > least


def wrapped(text, room):
    """`text` in lines of at most `room` characters. Those that follow are indented as it is, or as a list's text;
    what stands in columns is parted between two of them."""
    indent = re.match(r"\s*(?:(?:[-*]|\d+[.)]) +)?", text)[0]
    gaps = [gap.span() for gap in re.finditer(r" {3,}", text) if len(indent) < gap.start() <= room]
    if len(text) > room and gaps:
        start, end = gaps[-1]
        return [text[:start], *wrapped(" " * (len(indent) + 2) + text[end:], room)]
    lines, line = [], indent
    for word in text[len(indent) :].split(" "):
        if line.strip() and len(line) + len(word) > room:
            lines.append(line.rstrip())
            line = " " * len(indent)
        line += word + " "
    return [*lines, line.rstrip()]


def wrap_block(texts, room):
    """The lines of one comment (without the marker), in which lines of prose that are too long flow into the next."""
    done, i, longest = [], 0, max(map(len, texts))
    while i < len(texts):
        text = texts[i]
        if len(text) > room:
            while goes_on(texts, i, longest):
                i += 1
                text += " " + texts[i]
        i += 1
        done += wrapped(text, room) if len(text) > room else [text]
    return done


def wrap_comments(lines, marker):
    """Lines that are nothing but a comment, of a block in which one is too long."""
    done, i = [], 0
    pattern = re.compile(rf"(\s*){re.escape(marker)} ?(?!!)")
    while i < len(lines):
        head = pattern.match(lines[i])
        if not head:
            done.append(lines[i])
            i += 1
            continue
        end = i
        while end < len(lines) and (m := pattern.match(lines[end])) and m[1] == head[1]:
            end += 1
        block = lines[i:end]
        if any(len(line) > WIDTH for line in block):
            start = head[1] + marker
            block = [line[len(start) :].removeprefix(" ") for line in block]
            block = [f"{start} {text}".rstrip() for text in wrap_block(block, WIDTH - len(start) - 1)]
        done += block
        i = end
    return done


def comment_columns(lines, suffix):
    """Where the comment behind the code of a line begins, {line: column}."""
    columns = {}
    if suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
            if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
                columns[token.start[0] - 1] = token.start[1]
        return columns
    for number, line in enumerate(lines):
        for token in C_TOKEN.finditer(line):
            if token[0] == "//" and line[: token.start()].strip():
                columns[number] = token.start()
                break
    return columns


def lift_comments(lines, suffix):
    """The comment behind code that leaves it no room goes above it, or below what opens a block behind "}"."""
    marker, columns, done = "#" if suffix == ".py" else "//", comment_columns(lines, suffix), []
    for number, line in enumerate(lines):
        column = columns.get(number)
        if column is None or len(line) <= WIDTH or "noqa" in line or "#define" in line or line.endswith("\\"):
            done.append(line)
            continue
        code, text = line[:column].rstrip(), line[column + len(marker) :].strip()
        below = re.match(r"\s*(\}|else\b)", code)
        indent = " " * (len(code) - len(code.lstrip()) + (4 if below else 0))
        comment = [f"{indent}{marker} {part}" for part in wrapped(text, WIDTH - len(indent) - len(marker) - 1)]
        done += [code, *comment] if below else [*comment, code]
    return done


def wrap_docstrings(text):
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) or not ast.get_docstring(
            node, clean=False
        ):
            continue
        string = node.body[0].value
        block = lines[string.lineno - 1 : string.end_lineno]
        if all(len(line) <= WIDTH for line in block):
            continue
        indent = " " * string.col_offset
        block = wrap_block([line.removeprefix(indent) for line in block], WIDTH - len(indent))
        lines[string.lineno - 1 : string.end_lineno] = ["\n".join(indent + t if t else "" for t in block)] + [None] * (
            string.end_lineno - string.lineno
        )
    return "\n".join(line for line in lines if line is not None)


# ---- strings


def split_c_strings(lines):
    """A message "problem\\nhint" that fills a line becomes two strings; clang-format breaks what is still too long."""
    done = []
    for line in lines:
        if len(line) > WIDTH and not line.endswith("\\") and "#define" not in line and "asm" not in line:
            parts = [token[0] for token in C_TOKEN.finditer(line)]
            comment = parts.index("//") if "//" in parts else len(parts)
            room = WIDTH - 12 - (len(line) - len(line.lstrip()))
            parts[:comment] = [
                re.sub(r"((?:\\.|[^\\])*?)\\n(?=[^\"])", r'\1\\n" "', part)
                if part[0] == '"' and len(part) > room
                else part
                for part in parts[:comment]
            ]
            line = "".join(parts)
        done.append(line)
    return done


def string_cuts(body, raw, formatted):
    """Where a string may be cut: behind a line feed, behind a space; never within the braces of an f-string."""
    cuts, depth, i = {}, 0, 0
    while i < len(body):
        step = 2 if body[i] == "\\" else 1
        if formatted and body[i] in "{}":
            if body[i : i + 2] in ("{{", "}}") and depth == 0:
                step = 2
            else:
                depth += 1 if body[i] == "{" else -1
        if depth == 0 and i + step < len(body) and (body[i] == " " or body[i : i + 2] == "\\n" and not raw):
            cuts[i + step] = body[i] == "\\"
        i += step
    return cuts


def python_strings(text):
    """((row, column) of its begin, of its end, brackets around it) of each string. An f-string is one token before
    Python 3.12 and several from then on, of which those within its braces may be strings, too."""
    depth, inside, start = 0, 0, None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_START"):
            start = start if inside else token.start
            inside += 1
        elif kind.endswith("STRING_END"):
            inside -= 1
            if not inside:
                yield start, token.end, depth
        elif inside:
            continue
        elif token.type == tokenize.STRING:
            yield token.start, token.end, depth
        elif token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")


def split_python_strings(text):
    """A string that makes its line too long becomes several, cut behind line feeds or else where the line is full."""
    lines, cut = text.split("\n"), []
    for (row, start), (last, end), depth in python_strings(text):
        line = lines[row - 1]
        if row == last and len(line) > WIDTH:
            prefix, quote = re.match(r"(\w*)(\"\"\"|'''|.)", line[start:end]).groups()
            if len(quote) == 1:
                cut.append((row, start, end, prefix, quote, depth))
    for row, start, end, prefix, quote, depth in reversed(cut):
        line = lines[row - 1]
        body = line[start + len(prefix) + 1 : end - 1]
        indent = len(line) - len(line.lstrip())
        room = max(40, WIDTH - 4 - len(prefix) - (start if start - indent < 20 else indent + 4))
        cuts, parts, begin = string_cuts(body, "r" in prefix.lower(), "f" in prefix.lower()), [], 0
        for at in (*cuts, len(body)):  # one line feed, then as much as fits
            if begin < at and (cuts.get(at) or at == len(body)):
                while at - begin > room and (fits := [c for c in cuts if begin < c <= begin + room]):
                    parts.append(body[begin : fits[-1]])
                    begin = fits[-1]
                parts.append(body[begin:at])
                begin = at
        if len(parts) > 1:
            whole = " ".join(f"{prefix}{quote}{part}{quote}" for part in parts)
            lines[row - 1] = line[:start] + (whole if depth else f"({whole})") + line[end:]
    return "\n".join(lines)


# ---- macros


def indent_macros(lines):
    """The lines of a macro that is defined within a function go as far in as its #define, if there is room;
    clang-format has them at 4."""
    done, i = [], 0
    while i < len(lines):
        start = re.match(r"( +)#define .*\\$", lines[i])
        done.append(lines[i])
        i += 1
        macro = []
        while start and i < len(lines) and done[-1].endswith("\\"):
            macro.append(lines[i])
            i += 1
            if not macro[-1].endswith("\\"):
                break
        indented = [start[1] + line for line in macro] if macro else []
        done += indented if all(len(line) <= WIDTH for line in indented) else macro
    return done


# ---- files


def program(name):
    """The path of clang-format or ruff in the version that requirements.txt pins, or why there is none."""
    version = re.search(rf"^{name}==(\S+)$", (ROOT / "requirements.txt").read_text(), re.M)[1]
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if not path:
        return None, f"{name} {version} is not installed"
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return (path, "") if re.search(rf"\b{re.escape(version)}\b", said) else (None, f"{path} is not version {version}")


def missing():
    return [why for path, why in map(program, ("clang-format", "ruff")) if not path]


def run(command, text):
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)} failed\n{done.stderr}")
    return done.stdout


def formatted(path, text, programs):
    suffix = path.suffix
    marker = "#" if suffix == ".py" else "//"
    for _ in range(3):  # a line that is broken or indented anew may leave its comment no room
        before = text
        text = "\n".join(wrap_comments(lift_comments(text.split("\n"), suffix), marker))
        if suffix == ".py":
            text = split_python_strings(wrap_docstrings(text))
            text = run([programs["ruff"], "format", "--quiet", "--stdin-filename", str(path), "-"], text)
        else:
            text = "\n".join(split_c_strings(text.split("\n")))
            text = run([programs["clang-format"], "--assume-filename", str(path)], text)
            text = "\n".join(indent_macros(text.split("\n")))
        if text == before:
            break
    return text


def tracked():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / f for f in listing.split("\0") if Path(f).suffix in (*C_FILES, ".py") and (ROOT / f).exists()]


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, say what would change")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    args = parser.parse_args()
    if why := missing():
        sys.exit(f"error: {'; '.join(why)}\n  hint: make venv installs them")
    programs = {name: program(name)[0] for name in ("clang-format", "ruff")}
    files = [f.resolve() for f in args.files] or tracked()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = list(pool.map(lambda f: formatted(f, f.read_text(), programs), files))
    changed = [(f, text) for f, text in zip(files, texts) if text != f.read_text()]
    for f, text in changed:
        if args.check:
            name = f.relative_to(ROOT)
            difference = difflib.unified_diff(
                f.read_text().splitlines(), text.splitlines(), f"{name}", f"{name}, formatted"
            )
            print("\n".join(list(difference)[:20]))
        else:
            f.write_text(text)
    if args.check and changed:
        sys.exit(f"error: {plural(len(changed), 'file')} not formatted\n  hint: make format")
    print(f"{len(files)} files: {len(changed)} formatted" if not args.check else f"{len(files)} files are formatted")


if __name__ == "__main__":
    outlive_reader()
    main()
