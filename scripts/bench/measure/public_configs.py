"""Count the keys of public configs by what becomes of them when they are converted, and convert each config.

tests/data/public_configs.jsonl has one line for each config of a public repository: where it is, its keys, and the
values that concern parallelism. The others are replaced by ``x``. The configs are written again from these facts, one
folder per repository, so that a config can name another one. Then each is converted, and the new config is read again.

    python -m scripts.bench public_configs    (a minute; writes docs/results/public_configs.json)
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from hf_fsdp_plugin.problems import Problem, has_errors
from hf_fsdp_plugin.sources import accelerate_file
from hf_fsdp_plugin.sources.config_tree import ConfigEntry, ConfigFile, config_tree
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.tools.convert import conversion
from hf_fsdp_plugin.tools.convert.dialects.interface import DialectReading, leaves
from hf_fsdp_plugin.tools.convert.verb import TARGETS
from hf_fsdp_plugin.vocabulary import Scope, find_row
from scripts.bench.common import ROOT, make_parser
from scripts.bench.tables.update_results import write_result

FACTS: Final = ROOT / "tests" / "data" / "public_configs.jsonl"
TITLES: Final = {
    "deepspeed": "DeepSpeed", "accelerate": "Accelerate", "axolotl": "axolotl", "llama-factory": "LLaMA-Factory",
    "ms-swift": "ms-swift", "ms-swift preset": "ms-swift", "fsdp_config": "Accelerate",
}  # fmt: skip
"""Kind of a config in the facts -> its row in the table."""
ARGUMENTS: Final = {
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "learning_rate": 1e-5,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "warmup_steps": 10,
    "max_steps": 100, "bf16": True, "fp16": False,
}  # fmt: skip
"""Arguments of the Trainer for the values ``auto`` of DeepSpeed."""
FATES: Final = ("sets", "arguments", "irrelevant", "refused", "unknown", "lost")
"""What becomes of a key. ``lost`` is a key that no list contains."""
_SCOPES: Final[tuple[Scope, ...]] = ("launch", "fsdp", "parallelism", "precision", "dynamo", "fp8", "training")
UNKNOWN: Final = ("FSDP-E020", "FSDP-E061", "FSDP-W072")


def load_facts() -> list[dict[str, Any]]:
    """Return the facts, one dict per config."""
    return [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()]


def write_configs(facts: Iterable[Mapping[str, Any]], folder: Path) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """Write the configs below a folder, and yield the facts and the path of each."""
    for fact in facts:
        path = folder / fact["repository"].replace("/", "_") / fact["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config_text(fact), encoding="utf-8")
        yield fact, path


def config_text(fact: Mapping[str, Any]) -> str:
    """Return a config with the keys and values in the facts."""
    content = {**fact["settings"], **dict.fromkeys(fact.get("others", "").split(), "x")}
    if fact["path"].endswith(".json"):
        return json.dumps(content, indent=1)
    return yaml.safe_dump(content, sort_keys=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What became of one config.

    Attributes:
        keys: fate or "unknown" or "lost" -> number of keys.
        state: ``converted``, or why not.
        same: whether the new config, read again, has the settings of the old one.
        problems: the problems of the old config.
    """

    keys: Counter[str]
    state: str
    same: bool
    problems: tuple[Problem, ...]


def convert(path: Path) -> Conversion:
    """Convert a config to Accelerate's YAML, with the arguments of the Trainer that it needs."""
    file = ConfigFile.at(path)
    sources = Sources(config=file, environ={})
    read = conversion.read(sources, converts=True)
    if isinstance(read, DialectReading) and read.unfilled:
        needed = {name for _, names in read.unfilled for name in names}
        given = {name: value for name, value in ARGUMENTS.items() if name in needed}
        sources = Sources(config=file, environ={}, training_arguments=given)
        read = conversion.read(sources, converts=True)
    assessment = assess(replace(sources, converted=read))
    read = read or accelerate_file.read(sources)
    assert read is not None
    problems = tuple({**dict.fromkeys(read.problems), **dict.fromkeys(assessment.problems)})
    keys = count_keys(read, config_tree(file).value, problems)
    if has_errors(problems):
        is_missing = any(problem.code == "FSDP-E001" for problem in problems)
        state = "names a file that is not in the collection" if is_missing else "refused"
        return Conversion(keys=keys, state=state, same=False, problems=problems)
    if not assessment.spec.enabled:
        return Conversion(keys=keys, state="does not shard", same=False, problems=problems)
    arguments = read.arguments if isinstance(read, DialectReading) else {}
    converted = TARGETS["accelerate"](assessment.spec, arguments)
    same = not converted.changed_settings(assessment.spec)
    return Conversion(keys=keys, state="converted", same=same, problems=problems)


def count_keys(read: Any, root: Sequence[ConfigEntry], problems: Iterable[Problem]) -> Counter[str]:
    """Return the number of keys of the config itself by what becomes of them; a key in no list is lost."""
    unknown = {p.origin.spelling for p in problems if p.origin and p.code in UNKNOWN}
    refused = {p.origin.spelling for p in problems if p.origin and p.severity == "error"}
    if isinstance(read, DialectReading):
        fates = {outcome.origin.spelling: outcome.fate for outcome in read.outcomes}
        written = [entry.key for _, entry in leaves(read.dialect_of.table, root)]
    else:
        entries = [e for top in root for e in (top.value.value if top.value.is_mapping else (top,))]
        written = [entry.key for entry in entries]
        nulls = [entry.key for entry in entries if entry.value.value is None]
        ignored = [key for key in written if (row := find_row(key, _SCOPES)) is not None and row.ignored]
        fates = dict.fromkeys((*ignored, *nulls, *(p.origin.spelling for p in problems if p.origin)), "irrelevant")
        fates |= dict.fromkeys((s.origin.spelling for s in read.settings), "sets")
    keys = dict.fromkeys((*written, *fates))
    keys |= dict.fromkeys(name for name in unknown | refused if not any(_is(key, name) for key in keys))
    keys.pop("", None)
    return Counter(
        "unknown" if any(_is(key, name) for name in unknown)
        else "refused" if any(_is(key, name) for name in refused)
        else fates.get(key, "lost")
        for key in keys
    )  # fmt: skip


def _is(key: str, name: str) -> bool:
    """Whether a problem with a key is about this one, whose section it may omit."""
    return name == key or key.endswith(f".{name}")


def measure(facts: Iterable[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Return the counts by kind of config, and the codes of refused configs."""
    counts: dict[str, Counter[str]] = {title: Counter() for title in TITLES.values()}
    states: dict[str, Counter[str]] = {title: Counter() for title in TITLES.values()}
    refusals: Counter[str] = Counter()
    for fact, path in list(write_configs(facts, folder)):
        title, result = TITLES[fact["dialect"]], convert(path)
        counts[title].update({"files": 1, "keys": result.keys.total(), "same_spec": int(result.same)} | result.keys)
        states[title][result.state] += 1
        if result.state == "refused":
            refusals.update({problem.code for problem in result.problems if problem.severity == "error"})
    names = ("files", "keys", *FATES, "same_spec")
    dialects = {
        title: {**{name: count[name] for name in names}, "states": dict(states[title].most_common())}
        for title, count in counts.items()
    }
    return {"dialects": dialects, "refusals": dict(refusals.most_common())}


def main() -> None:
    parser = make_parser(__doc__, "public_configs")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th config")
    args = parser.parse_args()
    facts = load_facts()[:: args.every]
    with tempfile.TemporaryDirectory() as folder:
        counts = measure(facts, Path(folder))
    repositories = len({fact["repository"] for fact in facts})
    write_result("public_configs", args.out, {"repositories": repositories, **counts})


if __name__ == "__main__":
    main()
