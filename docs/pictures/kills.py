"""Draws kills.svg: the reward by step of a run with killed actors over that of an undisturbed one.

The lines come from benchmarks/results/2026-11-27-h100-loop.jsonl. Ends with an error if a figure of a step differs.
"""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIGURES = ("step", "reward", "loss", "grad_norm", "entropy", "gap", "largest_gap", "tokens")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 648, 210, 44, 10, 10, 44
LOW, HIGH = 0.25, 1.0

runs: list[dict] = []
for text_line in HERE.parents[1].joinpath("benchmarks/results/2026-11-27-h100-loop.jsonl").open():
    found = json.loads(text_line)
    if "row" in found:
        break
    if "options" in found:
        runs.append({"kill": found["options"]["kill"], "ranks": found["options"]["ranks"], "steps": {}, "lost": []})
    elif "step" in found:
        runs[-1]["steps"][found["step"]] = found  # a later one, after a recovery, takes the place
    elif "lost" in found:
        runs[-1]["lost"].append(found)
calm = next(run for run in runs if run["ranks"] == 2 and not run["kill"])
killed = next(run for run in runs if run["kill"])
assert calm["steps"].keys() == killed["steps"].keys() and len(killed["lost"]) == 3
for step, one in calm["steps"].items():
    assert all(one[name] == killed["steps"][step][name] for name in FIGURES), f"step {step} differs"


def x(step: float) -> float:
    return LEFT + (step - 0.5) / len(calm["steps"]) * (WIDTH - LEFT - RIGHT)


def y(reward: float) -> float:
    return TOP + (HIGH - reward) / (HIGH - LOW) * (HEIGHT - TOP - BOTTOM)


def line(run: dict, style: str) -> str:
    points = " ".join(f"{x(each['step']):.1f},{y(each['reward']):.1f}" for each in run["steps"].values())
    return f'<polyline points="{points}" fill="none" {style}/>'


def text(at: float, down: float, words: object, anchor: str = "middle") -> str:
    return f'<text x="{at:.1f}" y="{down:.1f}" text-anchor="{anchor}">{words}</text>'


size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
parts += [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
for reward in (0.25, 0.5, 0.75, 1.0):
    parts += [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(reward):.1f}" y2="{y(reward):.1f}" stroke="#dddddd"/>']
    parts += [text(LEFT - 6, y(reward) + 4, reward, "end")]
for each in killed["lost"]:
    at = x(each["in_step"])
    ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{y(LOW):.1f}"'
    parts += [f'<line {ends} stroke="#cc3333" stroke-dasharray="4 3"/>']
    parts += [text(at - 5, y(0.27), f"{each['lost'][0]} killed", "end")]
parts += [line(calm, 'stroke="#9ecae1" stroke-width="7"'), line(killed, 'stroke="#08519c" stroke-width="2"')]
parts += [text(x(step), y(LOW) + 16, step) for step in calm["steps"]]
parts += [text(x(8), HEIGHT - 6, "step; reward of the samples: undisturbed (wide line), with three kills (thin line)")]
HERE.joinpath("kills.svg").write_text("\n".join([*parts, "</svg>\n"]))
