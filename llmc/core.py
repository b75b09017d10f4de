"""CORE of DCLM (arXiv:2406.11794): 22 tasks, of each the accuracy above that of guessing, and their mean.

    llmc eval core log/mine --data llm-foundry/scripts/eval/local_data
    llmc eval core models/qwen --data core --tasks copa,winograd --limit 100

DIR holds the .jsonl files of llm-foundry's scripts/eval/local_data, in its folders or all in one; tasks without a file
are named. --limit takes the first examples of each task (of jeopardy: of each category), with the few-shot examples
of the whole.

The rule is llm-foundry's. multiple_choice: the choice whose tokens have the highest mean log-probability after the
query. schema: the context after which the continuation has it. language_modeling: each token of the continuation must
be the likeliest. Context and continuation are encoded apart, the continuation with a space before it. Few-shot examples
are drawn from the task's own file, by llm-foundry's seed, 1234. A row that is too long loses its beginning. jeopardy's
accuracy is the mean of its categories'. Centred: (accuracy - baseline) / (1 - baseline). Baselines are those of DCLM's
Core_v2; CORE is given with those of Core_v1, too, which the paper and nanochat have.
"""

import os
import random
from collections import namedtuple

from llmc.scorer import add_arguments, of_arguments, positive  # first: it finds dev/data

import llmc
import numpy as np
from llmc.checked_json import BadFile, open_regular, parse_object
from llmc.data_common import Parser, die, outlive_reader, plural

SEED = 1234
ANSWER = "\nAnswer: "
# baseline_v1 None: the same. by_category: a set for each, and the mean of their accuracies
FACTS = "name file kind shots baseline delimiter baseline_v1 by_category"
Task = namedtuple("Task", FACTS, defaults=(" ", None, False))
TASKS = (
    Task("hellaswag_zeroshot", "language_understanding/hellaswag", "multiple_choice", 0, 0.25),
    Task("jeopardy", "world_knowledge/jeopardy_all", "language_modeling", 10, 0, ANSWER, by_category=True),
    Task("bigbench_qa_wikidata", "world_knowledge/bigbench_qa_wikidata", "language_modeling", 10, 0),
    Task("arc_easy", "world_knowledge/arc_easy", "multiple_choice", 10, 0.25, ANSWER),
    Task("arc_challenge", "world_knowledge/arc_challenge", "multiple_choice", 10, 0.25, ANSWER),
    Task("copa", "commonsense_reasoning/copa", "multiple_choice", 0, 0.5),
    Task("commonsense_qa", "commonsense_reasoning/commonsense_qa", "multiple_choice", 10, 0.403, baseline_v1=0.2),
    Task("piqa", "commonsense_reasoning/piqa", "multiple_choice", 10, 0.5, ANSWER),
    Task("openbook_qa", "commonsense_reasoning/openbook_qa", "multiple_choice", 0, 0.25),
    Task("lambada_openai", "language_understanding/lambada_openai", "language_modeling", 0, 0),
    Task("hellaswag", "language_understanding/hellaswag", "multiple_choice", 10, 0.25),
    Task("winograd", "language_understanding/winograd_wsc", "schema", 0, 0.5),
    Task("winogrande", "language_understanding/winogrande", "schema", 0, 0.5),
    Task("bigbench_dyck_languages", "symbolic_problem_solving/bigbench_dyck_languages", "language_modeling", 10, 0),
    Task("agi_eval_lsat_ar", "symbolic_problem_solving/agi_eval_lsat_ar", "multiple_choice", 3, 0.25, baseline_v1=0.2),
    Task("bigbench_cs_algorithms", "symbolic_problem_solving/bigbench_cs_algorithms", "language_modeling", 10, 0),
    Task("bigbench_operators", "symbolic_problem_solving/bigbench_operators", "language_modeling", 10, 0),
    Task("bigbench_repeat_copy_logic", "symbolic_problem_solving/bigbench_repeat_copy_logic",
         "language_modeling", 10, 0),
    Task("squad", "reading_comprehension/squad", "language_modeling", 10, 0),
    Task("coqa", "reading_comprehension/coqa", "language_modeling", 0, 0),
    Task("boolq", "reading_comprehension/boolq", "multiple_choice", 10, 0.62, ANSWER),
    Task("bigbench_language_identification", "language_understanding/bigbench_language_identification",
         "multiple_choice", 10, 0.25, baseline_v1=0.091),
)  # fmt: skip
# (the question, the answer) of an example. gold: the number of the right one in the list
FIELDS = {
    "multiple_choice": ("query", "choices"),
    "schema": ("context_options", "continuation"),
    "language_modeling": ("context", "continuation"),
}


# ---- the files
def path_of(data, task):
    """The task's file; None: there is none."""
    paths = [os.path.join(data, name + ".jsonl") for name in (task.file, os.path.basename(task.file))]
    return next(filter(os.path.isfile, paths), None)


def example_of(line, where, task):
    """A line's fields, checked. Texts lose the space around them, those in lists keep it: so has llm-foundry."""
    fields, example = parse_object(line, where), {}
    for name in FIELDS[task.kind] + ("category",) * task.by_category:
        if name in ("choices", "context_options"):
            example[name] = fields.read_list(name, str)
            if len(example[name]) < 2:
                raise BadFile(f"{where}: {name} has not two texts or more")
        else:
            example[name] = fields.read(name, str)
            if example[name] is None:
                raise BadFile(f"{where} has no {name}")
            example[name] = example[name].strip()
    if task.kind != "language_modeling":
        listed = example["choices" if task.kind == "multiple_choice" else "context_options"]
        example["gold"] = fields.read("gold", int, -1)
        if not 0 <= example["gold"] < len(listed):
            raise BadFile(f"{where}: gold is no number from 0 to {len(listed) - 1}")
    answers = example.get("choices") or [example["continuation"]]
    if not all(a.strip() for a in answers):
        raise BadFile(f"{where}: an answer without text cannot be scored")
    return example


def read_task(path, task):
    """[[example]]: a list for each category in the order of their names, or one."""
    examples = []
    with open_regular(path) as f:
        for i, line in enumerate(f, 1):
            if line.strip():
                examples.append(example_of(line, f"'{path}' line {i}", task))
    if not examples:
        raise BadFile(f"'{path}' is empty")
    names = sorted({e.get("category", "") for e in examples})
    return [[e for e in examples if e.get("category", "") == name] for name in names]


# ---- the rule
def drawn(draw, count, shots, own):
    """The few-shot examples of example `own` of `count`, in llm-foundry's order, which is that of a set of numbers."""
    chosen = set(draw.sample(range(count), min(shots, count - 1)))
    if own in chosen:
        chosen.remove(own)
        if len(chosen) < count - 1:
            other = own
            while other == own or other in chosen:
                other = draw.choice(range(count))
            chosen.add(other)
    return chosen


def shown(example, task):
    """A few-shot example as text."""
    question, answer = (example[name] for name in FIELDS[task.kind])
    return question + task.delimiter + (answer[example["gold"]] if task.kind == "multiple_choice" else answer)


def rows_of_example(example, before, task):
    """[(context, continuation)] texts, one for each that is compared. before: the few-shot examples."""
    question, answer = (example[name] for name in FIELDS[task.kind])
    spaced = lambda text: text if text.startswith(" ") else " " + text
    asked = lambda text: (("\n" + text if before else text) + task.delimiter).rstrip()
    if task.kind == "schema":  # of which CORE has none with few-shot examples
        return [(context, spaced(answer)) for context in question]
    return [(asked(question), spaced(a)) for a in (answer if task.kind == "multiple_choice" else [answer])]


def encoded_rows(scorer, examples, task, limit):
    """(contexts, continuations, number of the example of each, rows that were cut): arrays of ids."""
    draw, contexts, continuations, of, cut = random.Random(SEED), [], [], [], 0
    for i in range(min(len(examples), limit or len(examples))):
        chosen = drawn(draw, len(examples), task.shots, i) if task.shots else ()
        before = "\n".join(shown(examples[j], task) for j in chosen)
        first = np.concatenate([scorer.first, scorer.encode(before)])
        for context, continuation in rows_of_example(examples[i], before, task):
            context = np.concatenate([first, scorer.encode(context)])
            continuation = scorer.encode(continuation)
            room = scorer.seq_len - len(continuation)
            if room < 1 or not len(context):
                what = f"an answer of {len(continuation)} tokens" if room < 1 else "no context"
                die(f"{task.name}: example {i + 1} has {what}, and a row has {scorer.seq_len} tokens",
                    "leave the task out, or take a model with a longer context")  # fmt: skip
            cut += len(context) > room
            contexts.append(context[-room:])
            continuations.append(continuation)
            of.append(i)
    return contexts, continuations, np.array(of), cut


def choices_of(scorer, examples, task, limit=None):
    """([the chosen number, or whether it is right, of each example], rows that were cut)"""
    contexts, continuations, of, cut = encoded_rows(scorer, examples, task, limit)
    if task.kind == "language_modeling":
        return scorer.follows(contexts, continuations), cut
    means = scorer.means(contexts, continuations)
    if np.isnan(means).any():
        die(f"{task.name}: the loss of a choice is nan", "the model's weights hold NaN or infinity: llmc check")
    return np.array([means[of == i].argmax() for i in range(of[-1] + 1)]), cut


def accuracy_of(scorer, sets, task, limit=None):
    """(accuracy, examples, rows that were cut). sets: what read_task gives; limit: examples of each."""
    accuracies, count, cut = [], 0, 0
    for examples in sets:
        chosen, c = choices_of(scorer, examples, task, limit)
        gold = [e.get("gold", True) for e in examples[: len(chosen)]]
        accuracies.append(float(np.mean(chosen == np.array(gold))))
        count, cut = count + len(chosen), cut + c
    return float(np.mean(accuracies)), count, cut


# ---- the command
def chosen_tasks(args):
    """[(task, path)], and the names of those that lack a file."""
    if not os.path.isdir(args.data):
        die(f"'{args.data}' is no folder", "give the folder of llm-foundry's scripts/eval/local_data")
    known = {t.name: t for t in TASKS}
    names = args.tasks.split(",") if args.tasks else list(known)
    for name in names:
        if name not in known:
            die(f"there is no task '{name}'", f"the tasks are {', '.join(known)}")
    found = [(known[n], path_of(args.data, known[n])) for n in names]
    missing = [t.file + ".jsonl" for t, path in found if path is None]
    if missing and (args.tasks or len(missing) == len(found)):
        die(f"'{args.data}' lacks {', '.join(missing)}", "get them from llm-foundry's scripts/eval/local_data")
    return [(t, path) for t, path in found if path]


def centred(accuracy, baseline):
    return (accuracy - baseline) / (1 - baseline)


def report(results, limit):
    """results: {task: accuracy}."""
    if len(results) < len(TASKS):
        missing = ", ".join(t.name for t in TASKS if t not in results)
        return f"CORE is the mean of all {len(TASKS)} tasks; it lacks {missing}"
    v1 = [centred(x, t.baseline if t.baseline_v1 is None else t.baseline_v1) for t, x in results.items()]
    v2 = [centred(x, t.baseline) for t, x in results.items()]
    some = f" (of {limit} examples a task)" if limit else ""
    return f"CORE{some}: {np.mean(v2):.4f} with the baselines of Core_v2, {np.mean(v1):.4f} with those of Core_v1"


def main():
    parser = Parser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--data", required=True, metavar="DIR", help="the folder of the .jsonl files")
    parser.add_argument("--tasks", metavar="NAME,...", help="some of the 22 [all that DIR has]")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N examples of each")
    args = parser.parse_args()
    try:
        tasks = [(task, read_task(path, task)) for task, path in chosen_tasks(args)]
        scorer = of_arguments(args)
        head = f"{'task':<34}{'examples':>9}{'shots':>7}{'accuracy':>10}{'baseline':>10}{'centred':>9}"
        print(f"{head}  rows of up to {scorer.seq_len} tokens", flush=True)
        results = {}
        for task, sets in tasks:
            results[task], count, cut = accuracy_of(scorer, sets, task, args.limit)
            line = f"{results[task]:>10.4f}{task.baseline:>10.3f}{centred(results[task], task.baseline):>9.4f}"
            said = f"  {plural(cut, 'row')} lost the beginning" if cut else ""
            print(f"{task.name:<34}{count:>9}{task.shots:>7}{line}{said}", flush=True)
        print(report(results, args.limit))
        scorer.close()
    except (BadFile, llmc.Error) as e:
        die(*(str(e).split("\n  hint: ") + ["correct the line, or get the file again"])[:2])
    except OSError as e:
        die(f"'{e.filename}': {e.strerror}", "name files that are there and may be read")


if __name__ == "__main__":
    outlive_reader()
    main()
