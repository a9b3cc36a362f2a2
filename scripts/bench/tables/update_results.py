"""Write the results in docs/results/*.json as tables into docs/results.md and docs/checkpoints.md.

    python -m scripts.bench.tables.update_results             write the tables
    python -m scripts.bench.tables.update_results --check     change nothing; exit code 1 if a document is out of date

A table goes between ``results:begin NAME`` and ``results:end NAME``; NAME is the stem of a file in docs/results. A NAME
without a function in ``TABLES`` gets a plain table of its values.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.common import RESULTS, ROOT, describe_machine
from scripts.bench.gpu_checks.results import table
from scripts.bench.tables.axes import axes
from scripts.bench.tables.described import DESCRIBED
from scripts.bench.tables.hangs import hangs
from scripts.bench.tables.planning import planner_time

BLOCK = re.compile(r"(<!-- results:begin (?P<name>[\w-]+) -->\n).*?(<!-- results:end (?P=name) -->)", re.DOTALL)
DOCUMENTS = (ROOT / "docs" / "results.md", ROOT / "docs" / "checkpoints.md")
HEAD = ("date", "commit", "machine", "versions", "load_average_of_15_minutes", "command", "device")

Result = dict[str, Any]


def checkpoint_save(result: Result) -> list[str]:
    stalls, ratios, grew = result["stall_seconds"], result["ratios"], result["rank0_growth_bytes"]
    steps, best = result["step_seconds"], result["over_best_of_torch"]

    def row(name: str, what: str, stock: str, ratio: str) -> str:
        theirs, ours = statistics.median(stalls[stock]), statistics.median(stalls[what])
        return f"| {name} | {theirs:.2f} s | {ours:.2f} s | {ratios[ratio]:.2f} |"

    first, *later = stalls["sharded ours, asynchronous"]
    sharded = statistics.median(stalls["sharded stock"])
    peers = [what for what in result.get("complete_seconds", {}) if what.startswith(("sharded ours", "state", "torch"))]
    return [
        "| training pauses | stock | plugin | ratio |",
        "|---|---|---|---|",
        f"| sharded, asynchronous, first save | {sharded:.2f} s | {first:.2f} s | {ratios['asynchronous_first']:.2f} |",
        f"| sharded, asynchronous, later saves | {sharded:.2f} s | {statistics.median(later):.2f} s | "
        f"{ratios['asynchronous_later']:.2f} |",
        row("sharded, synchronous", "sharded ours", "sharded stock", "synchronous_sharded"),
        row("full, synchronous", "full ours", "full stock", "full"),
        "",
        *(
            [
                "| `torch.distributed.checkpoint` | training pauses | next step | complete after | rank 0 grows by |",
                "|---|---|---|---|---|",
            ]
            if peers
            else []
        ),
        *(
            f"| {what} | {statistics.median(stalls[what]):.3f} s | {steps.get(what, steps['free']):.2f} s "
            f"| {result['complete_seconds'][what]:.2f} s | {grew[what] / 1e9:.2f} GB |"
            for what in peers
        ),
        *([""] if peers else []),
        f"During a full save the memory of rank 0 grows by {grew['full stock'] / 1e9:.2f} GB in the stock stack and by "
        f"{grew['full ours'] / 1e9:.2f} GB with the plugin (the weights are {result['weights_bytes'] / 1e9:.2f} GB). "
        "The step after an asynchronous save, beside which the shards are copied, takes "
        f"{ratios['step_while_writing']:.3f} times its usual time.",
        "",
        "Asynchronous saves of the state against the best of torch's four asynchronous ways in each figure: pause "
        f"{best['stall']:.2f}, complete {best['complete']:.2f}, growth of rank 0 {best['rank0_growth']:.2f}, next step "
        f"{best['step_beside_the_save']:.2f}.",
        "",
        f"{result['model']}; {result['ranks']} CPU ranks, one thread each; `Trainer._save_checkpoint` on the same live "
        "model.",
    ]


def merge(result: Result) -> list[str]:
    names = {
        "ours": "`hf-fsdp merge`",
        "ours_and_model": "`hf-fsdp merge` of a stock checkpoint, compared with the model",
        "cp": "`cp`",
    }
    faster, peak = result["times_as_fast_as_stock"], result["peak_mb"]
    seconds, cpu = (
        {name: f"{statistics.median(found):.1f} s" for name, found in result[key].items()}
        for key in ("seconds", "cpu_seconds")
    )
    lines = ["| 2 GB | time | CPU time | speedup | peak memory at 1, 2, 4 GB |", "|---|---|---|---|---|"]
    stock = " / ".join(str(value) for value in peak["stock"].values())
    lines.append(f"| `accelerate merge-weights` | {seconds['stock']} | {cpu['stock']} | 1 | {stock} MB |")
    for name, shown in names.items():
        memory = f"{' / '.join(str(value) for value in peak[name].values())} MB" if name in peak else ""
        lines.append(f"| {shown} | {seconds[name]} | {cpu[name]} | {faster[name]:.1f} | {memory} |")
    return [*lines, "", f"{result['model']}; medians of {result['pairs']} alternating pairs."]


def survival(result: Result) -> list[str]:
    lines = ["| | |", "|---|---|"]
    lines += [f"| kills in phase: {phase} | {count} |" for phase, count in result["kills_by_phase"].items()]
    flipped = result["flipped_bytes"]
    lines += [
        f"| disks filled | {result['full_disks']} |",
        f"| trials without a complete checkpoint, or with an older one than expected | {len(result['lost'])} |",
        f"| most steps lost since the start of the last save (a save every {result['steps_between_saves']} steps) | "
        f"{result['most_steps_lost_since_the_last_save_began']} |",
        f"| files with a flipped byte | {sum(row['files'] for row in flipped)} |",
        f"| of these, found by `verify` | {sum(row['found'] for row in flipped)} |",
    ]
    ways = ", ".join(f"{count} {way}" for way, count in result["kills_by_way"].items())
    return [
        *lines,
        "",
        f"{result['kills']} kills ({ways}), both FSDP versions, all state dict types; {result['model']}.",
    ]


def restarts(result: Result) -> list[str]:
    lines = [
        "| launcher | version | script | kills | during imports, training, a save | exit code | restarts | "
        "steps trained again | equal bit for bit | largest relative difference | measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        moments = [
            sum(kill["moment"] == moment for kill in run["kills"]) for moment in ("imports", "training", "saving")
        ]
        lines.append(
            f"| {run['launcher']} | FSDP{run['version']} | {run['way']} | {len(run['kills'])} | "
            f"{', '.join(map(str, moments))} | {run['exit_code']} | {run['restarts']} | {run['lost_steps']} | "
            f"{run['bitwise_equal']} of {run['losses']} losses | "
            f"{run['largest_relative_difference']:.1g} | {run['date']} |"
        )
    what = f"{result['steps']} steps, a checkpoint every {result['steps_between_saves']}"
    return [
        *lines,
        "",
        f"{result['model']}; {what}; an unmodified Trainer script, or a loop of Accelerate, "
        f"`--max_restarts {len(run['kills'])}`.",
    ]


def two_hosts(result: Result) -> list[str]:
    lines = [
        "| strategy | version | sent by a host in a step | predicted | ratio | step |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['strategy']} | FSDP{row['version']} | {row['sent_bytes'] / 1e6:.2f} MB | "
            f"{row['predicted_bytes'] / 1e6:.2f} MB | {row['measured_over_predicted']:.3f} | {row['step_seconds']} s |"
            for row in result["bytes"]
        ),
        "",
        "| host 1 is lost by | ranks of host 0 ended after | next step after its return | lost steps | same losses |",
        "|---|---|---|---|---|",
        *(
            f"| {'SIGKILL to its launcher' if row['how'] == 'kill' else 'its link'} | "
            f"{row['seconds_until_the_others_ended']} s | {row['seconds_until_the_first_step_after_return']} s | "
            f"{row['lost_steps']} | {'yes' if row['losses_equal'] else 'no'} |"
            for row in result["losses"]
        ),
    ]
    if row := result.get("elastic"):
        ranks = " → ".join(map(str, row["ranks"]))
        lines += [
            "",
            f"With `--num_machines 1:2`, the run went on with {ranks} ranks: the first step on one host came "
            f"{row['seconds_until_the_first_step_on_one_host']} s after the SIGKILL, the first one on both "
            f"{row['seconds_until_the_first_step_on_both']} s after the return of host 1; {row['restarts']} restart, "
            f"{row['lost_steps']} steps trained again; losses differ from those of an uninterrupted run by at most "
            f"{row['largest_relative_difference_of_losses']:g} of their value.",
        ]
    factors = result["bytes"][0]["factors"] if result["bytes"] else {}
    measured = ", ".join(f"{name} {value:.2f}" for name, value in factors.items())
    return [
        *lines,
        "",
        f"{result['model']}; link {result['rate']}, delay {result['delay']}. Bytes over the link for a "
        f"byte of the tensor (world: four ranks; pair: one rank on each host), measured: {measured}.",
    ]


def gpu_check(result: Result) -> list[str]:
    return table(result["rows"])


def ecosystem(result: Result) -> list[str]:
    """One row per script, one column per FSDP version; skipped scripts are counted only."""
    by_case: dict[str, dict[int, Result]] = {}
    for row in result["cases"]:
        if "group" not in row:
            by_case.setdefault(row["case"], {})[row["version"]] = row
    lines = ["| script | FSDP1 | FSDP2 | compared with | losses differ by |", "|---|---|---|---|---|"]
    counts: dict[str, int] = {}
    for name, rows in by_case.items():
        for row in rows.values():
            counts[row["status"]] = counts.get(row["status"], 0) + 1
        if all(row["status"] == "skipped" for row in rows.values()):
            continue
        differences = [row["loss_difference"] for row in rows.values() if row.get("loss_difference") is not None]
        largest = f"{max(differences):.1e}" if differences else "–"
        compared = next(iter(rows.values()))["compared"]
        lines.append(f"| {name} | {_outcome(rows.get(1))} | {_outcome(rows.get(2))} | {compared} | {largest} |")
    total = ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), reverse=True))
    lines += ["", f"{len(by_case)} scripts and variants, both FSDP versions, 2 CPU ranks: {total}."]
    return [*lines, *_behaviors([row for row in result["cases"] if "group" in row])]


def _behaviors(rows: list[Result]) -> list[str]:
    """One row per group of behaviors, and one for each behavior that does not work under both FSDP versions."""
    if not rows:
        return []
    lines = ["", "| group of behaviors | behaviors | FSDP1 | FSDP2 | losses differ by |", "|---|---|---|---|---|"]
    others: dict[str, dict[int, Result]] = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        cells = []
        for number in (1, 2):
            statuses = [row["status"] for row in mine if row["version"] == number]
            found = {status: statuses.count(status) for status in ("works", "refused", "fails", "skipped")}
            cells.append(", ".join(f"{count} {status}" for status, count in found.items() if count) or "–")
        working = [row["loss_difference"] for row in mine if row["status"] == "works"]
        largest = f"{max(working):.1e}" if working else "–"
        lines.append(f"| {group} | {len({row['case'] for row in mine})} | {cells[0]} | {cells[1]} | {largest} |")
        for row in mine:
            if row["status"] in ("refused", "fails"):
                others.setdefault(row["case"], {})[row["version"]] = row
    total = len({row["case"] for row in rows})
    lines += ["", f"{total} behaviors, compared with two unsharded processes. Not working under both versions:"]
    works = {"status": "works"}
    for name, found in others.items():
        cells = [_outcome(found.get(number, works)) for number in (1, 2)]
        lines.append(f"- {name}: FSDP1 {cells[0]}; FSDP2 {cells[1]}.")
    return lines if others else [*lines[:-1], f"{total} behaviors, compared with two unsharded processes."]


def _outcome(row: Result | None) -> str:
    if row is None:
        return "–"
    if row["status"] == "works":
        return "works"
    reason = row.get("code") or row["detail"].replace("|", "\\|")[:120]
    if row["status"] == "refused":
        return f"refused: {row['note'] or 'see'} ([{reason}](problems.md#{reason.lower()}))"
    return f"{row['status']}: {reason}"


def start(result: Result) -> list[str]:
    titles = {
        "script": "first line of the script",
        "imports": "torch and the Trainer are imported",
        "preparation": "model and optimizer are prepared",
        "first step": "end of the first step",
    }
    seconds = result["seconds"]
    lines = [f"| seconds until | {' | '.join(f'`{name}`' for name in seconds)} |", "|---" * (len(seconds) + 1) + "|"]
    lines += [
        f"| {title} | {' | '.join(f'{row[point]:.2f}' for row in seconds.values())} |"
        for point, title in titles.items()
    ]
    rounds = ", ".join(f"{ratio:.2f}" for ratio in result["ratios_of_rounds"])
    ours, *_ = result["imported"].values()
    return [
        *lines,
        "",
        f"Ratio of the medians: {result['ratio']:.2f}; of each round: {rounds}.",
        "",
        f"Modules that Transformers and Accelerate import before the first step and that it does not need: "
        f"{', '.join(f'`{name}`' for name in ours)}. Modules of other packages that only this package imports: "
        f"{', '.join(f'`{name}`' for name in result['only_ours']) or 'none'}.",
    ]


def public_configs(result: Result) -> list[str]:
    titles = ("settings of FSDP", "arguments of the Trainer", "without effect", "refused", "unknown", "lost")
    fates = ("sets", "arguments", "irrelevant", "refused", "unknown", "lost")
    lines = [f"| configs | files | keys | {' | '.join(titles)} | converted | the same spec |", "|" + "---|" * 11]
    for title, row in result["dialects"].items():
        cells = [f"{row[name]:,}" for name in ("files", "keys", *fates)]
        lines.append(f"| {title} | {' | '.join(cells)} | {row['states'].get('converted', 0)} | {row['same_spec']} |")
    states: dict[str, int] = {}
    for row in result["dialects"].values():
        for state, count in row["states"].items():
            states[state] = states.get(state, 0) + count
    others = ", ".join(f"{count} × {state}" for state, count in sorted(states.items()) if state != "converted")
    return [*lines, "", f"Configs of {result['repositories']} repositories. Not converted: {others}."]


def plain(result: Result) -> list[str]:
    rows = [f"| {key.replace('_', ' ')} | {value} |" for key, value in result.items() if key not in HEAD]
    return ["| | |", "|---|---|", *rows]


def step_time(result: Result) -> list[str]:
    head = [
        "| ranks | model, workload and settings | measured | predicted | interval | error |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for row in result["rows"]:
        interval = f"{row['low_seconds']:.3f} to {row['high_seconds']:.3f} s" if "low_seconds" in row else "none"
        rows.append(
            f"| {row['ranks']} | {row['point']} | {row['measured_seconds']:.3f} s | {row['step_seconds']:.3f} s | "
            f"{interval} | {row['error']:+.1%} |"
        )
    clock = "CPU time of a rank" if result["clock"] == "cpu" else "wall time"
    summary = f"Median error {result['median_error']:.1%}, worst {result['worst_error']:.1%}; {clock}, "
    return [*head, *rows, "", f"{summary}medians of {result['rounds']} round(s) of calibration and measurement."]


def published_runs(result: Result) -> list[str]:
    """One row per source and group, the fitted parameters, and one row per run of sources with few runs."""
    lines = ["| runs | number | median error | median with its sign | inside the interval |", "|---|---|---|---|---|"]
    for name, group in result["groups"].items():
        share = f"{group['inside']} of {group['runs']}"
        errors = f"{group['median_error']:.1%} | {group['median_signed_error']:+.1%}"
        lines.append(f"| {name} | {group['runs']} | {errors} | {share} |")
    lines += [
        "",
        f"All {result['runs']} runs: median error {result['median_error']:.1%} (mean of the sources' medians "
        f"{result['mean_of_sources']:.1%}), {result['inside']} inside. The interval of all sources is "
        f"{result['low']:.2f} to {result['high']:.2f} of the predicted time.",
        "",
        "| parameter | fitted | prior | source of the prior |",
        "|---|---|---|---|",
    ]
    for name, each in result["parameters"].items():
        lines.append(f"| {name} | {each['value']:.3g} | {each['prior']:.3g} | {each['source']} |")
    lines += ["", "| source | run | published | predicted | error | inside |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        if result["groups"][row["source"]]["runs"] <= 20:
            figures = f"{row['published']:,.0f} | {row['predicted']:,.0f} | {row['error']:+.0%}"
            lines.append(f"| {row['source']} | {row['run']} | {figures} | {'yes' if row['inside'] else 'no'} |")
    other = [f"- {name}: {reason}" for name, reason in result["not_compared"].items()]
    return [*lines, "", "Tokens/s per GPU. Not compared:", "", *other]


def unexpressed(result: Result) -> list[str]:
    counts = list(result["gradient_error"])
    errors = [f"error of gradients, {count} micro-batch{'es' if count != '1' else ''}" for count in counts]
    lines = [f"| policy | {' | '.join(errors)} | loss above fp32, each seed |", "|---" * (len(counts) + 2) + "|"]
    for policy, gaps in result["loss_gap"].items():
        cells = [f"{result['gradient_error'][count][policy]:.2%}" for count in counts]
        lines.append(f"| {policy} | {' | '.join(cells)} | {', '.join(f'{gap:+.4f}' for gap in gaps)} |")
    final = ", ".join(f"{loss:.3f}" for loss in result["final_loss"]["fp32"])
    return [
        *lines,
        "",
        f"{result['model']}; {result['ranks']} CPU ranks, FSDP2. Errors: L2 distance from the fp32 gradients over "
        f"their norm. Losses: means of the last {result['last_steps']} of {result['steps']} steps; in fp32 {final}.",
    ]


def throughput(result: Result) -> list[str]:
    """One row per case and system that this package is compared with."""
    lines = [
        "| case | against | throughput | 95% interval | losses differ by |",
        "|---|---|---|---|---|",
    ]
    for name, run in result["runs"].items():
        for row in run["comparisons"]:
            low, high = row["ratio_95"]
            lines.append(
                f"| {name}, {row['case']} | {row['vs']} | × {row['ratio']:.3f} | {low:.3f} to {high:.3f} | "
                f"{row['relative_loss_difference']:.0e} |"
            )
    models = "; ".join(f"{name}: {run['about']}" for name, run in result["runs"].items())
    return [*lines, "", f"Larger is better: throughput of this package over that of the other. {models}."]


def host_waits(result: Result) -> list[str]:
    def text(counts: list[int] | None) -> str:
        if counts is None:
            return "–"
        first, *later = counts
        return str(first) if not later or set(later) == {first} else f"{first}, then {', '.join(map(str, {*later}))}"

    rows = {(row["version"], row["case"]): row for row in result["rows"]}
    lines = [
        "| host waits of rank 0 | FSDP1 stock | FSDP1 plugin | FSDP2 stock | FSDP2 plugin | allowed |",
        "|---|---|---|---|---|---|",
    ]
    for version, case in rows:
        if version == 1:
            cells = [text(rows[each, case][who]) for each in (1, 2) for who in ("stock", "plugin")]
            allowed = rows[1, case]["allowed"]
            limit = allowed if allowed is not None else "as stock" if case.startswith("step") else ""
            lines.append(f"| {case} | {' | '.join(cells)} | {limit} |")
    return [*lines, "", "A tiny Llama on two ranks of a simulated accelerator ([devices.md](devices.md)), in bf16."]


_ALL = (
    checkpoint_save, merge, survival, gpu_check, ecosystem, start, step_time,
    published_runs, unexpressed, throughput, restarts, two_hosts, hangs, axes, planner_time,
    host_waits, public_configs,
)  # fmt: skip
TABLES: dict[str, Callable[[Result], list[str]]] = {**DESCRIBED, **{table.__name__: table for table in _ALL}}


def source(result: Result) -> str:
    """The line under a table: command, date, machine and versions."""
    where = ", ".join(str(result[key]) for key in ("device", "machine") if key in result)
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"`{result['command']}`, {result['date']}, {where}; {versions}."


def render(text: str, results: Path) -> str:
    """Return `text` with every block filled. A block without a file in `results` becomes ``Not measured yet.``"""

    def fill(block: re.Match[str]) -> str:
        path = results / f"{block['name']}.json"
        if not path.exists():
            body = ["Not measured yet."]
        else:
            result = json.loads(path.read_text())
            body = [*TABLES.get(block["name"], plain)(result), "", source(result)]
        return f"{block[1]}{chr(10).join(body)}\n{block[3]}"

    return BLOCK.sub(fill, text)


def write_result(name: str, path: Path, result: Result) -> None:
    """Write a result with the date, machine, versions and command of the measurement, and print its table.

    The result may contain another command, with arguments.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {
        **describe_machine(),
        "load_average_of_15_minutes": round(os.getloadavg()[2], 1),
        "command": f"python -m scripts.bench {name}",
    }
    result = {**head, **result}
    path.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(["", *TABLES[name](result), "", f"written: {path}"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a document is out of date")
    parser.add_argument("--document", type=Path, nargs="+", default=DOCUMENTS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    code = 0
    for document in args.document:
        text = document.read_text()
        filled = render(text, args.results)
        if filled == text:
            continue
        if args.check:
            print(f"{document} is out of date. Run: python -m scripts.bench.tables.update_results", file=sys.stderr)
            code = 1
        else:
            document.write_text(filled)
            print(f"wrote {document}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
