"""Each rule of admission, order, placing, retries and learning off by itself, in virtual time (`benchmarks/ablation`).

A rule pays if it is worth 2 % of the goodput in a group of scenes, or 5 % on one device of the zoo, or if without it
scenes break a promise that they keep with it: at most 0.5 % late, nobody lost, a small tenant or class gets what it
asks for, and long queries half of the mean share. It also pays if 1 % fewer are late or lost in a scene. Its price is
what a group gains without it.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import mean
from typing import Any

from benchmarks.ablation.scenes import GROUPS
from benchmarks.ablation.switches import RULES
from benchmarks.kit.bench import Bench, Found, all_of, one_of, quiet_ray
from benchmarks.kit.goal import Goal
from benchmarks.kit.sheet import Sheet, table

ALL_ON = "all rules"
_WORTH = 0.02  # of the goodput
_WORTH_TO_A_LAW = 0.05  # the same, of the few scenes of one law
_LATE, _LOST, _WORST, _LONG = 0.005, 0.001, 0.97, 0.5  # the promises: at most, at most, at least, at least
_FEWER = 0.01  # late or lost, where the promise is broken either way
_SLIGHT = 0.001  # a smaller difference of late or lost shares shows nothing
_MORE_REQUESTS = 1.1


def run(bench: Bench) -> None:
    """`--only` takes names of rules, "all rules", and names of groups of scenes."""
    quiet_ray()
    groups = bench.only & GROUPS.keys() or GROUPS.keys()
    names = bench.only - GROUPS.keys() or {ALL_ON, *(rule.name for rule in RULES)}
    rules = [rule for rule in RULES if rule.name in names]
    with bench.steps(1 + len(rules)) as step:
        step(ALL_ON)
        for group in GROUPS if ALL_ON in names else ():
            if group in groups:
                _play(bench, ALL_ON, group)
        for rule in rules:
            step(rule.name)
            about = {"what": "rule", "rule": rule.name}
            told = {"lines": rule.lines, "without": rule.without, "elsewhere": rule.elsewhere}
            bench.sample(about, told, f"{rule.lines} lines")
            with rule.off():
                for group in rule.groups:
                    if group in groups:
                        _play(bench, rule.name, group)


def _play(bench: Bench, rule: str, group: str) -> None:
    for scene, figures in GROUPS[group].play(bench.quick):
        shown = ", ".join(f"{key} {figure:.4g}" for key, figure in figures.items() if figure is not None)
        bench.sample({"what": "scene", "rule": rule, "group": group, "scene": scene}, figures, shown)


# --- tables and goals -------------------------------------------------------------------------------------------------

Pair = tuple[Mapping[str, Any], Mapping[str, Any]]  # a scene's figures with the rule, and without it


def _pairs(found: Found, rule: str) -> dict[str, list[Pair]]:
    """By group."""
    known = {(one["group"], one["scene"]): one for one in all_of(found, what="scene", rule=ALL_ON)}
    played = all_of(found, what="scene", rule=rule)
    return {
        group: [(known[group, one["scene"]], one) for one in some]
        for group, some in groupby(played, itemgetter("group"))
        if any(key[0] == group for key in known)
    }


def _goodput(pairs: Sequence[Pair]) -> float:
    """With the rule over without it, the mean of a group's scenes."""
    return 1 / mean(float(off["goodput"]) / float(on["goodput"]) for on, off in pairs)


def _law(pair: Pair) -> str:
    return str(pair[0]["scene"]).split()[0]


def _verdict(found: Found, rule: str) -> tuple[list[str], list[str]]:
    """What it is for, and what it costs."""
    pays, costs = list[str](), list[str]()
    for group, pairs in _pairs(found, rule).items():
        times = _goodput(pairs)
        for gains, at in ((pays, times >= 1 + _WORTH), (costs, times <= 1 - _WORTH)):
            if at:
                gains.append(f"{group}: goodput x {times:.3f}")
        laws = {law: _goodput(list(some)) for law, some in groupby(pairs, _law)} if group == "zoo" else {}
        for gains, some in (
            (pays, [law for law, one in laws.items() if one >= 1 + _WORTH_TO_A_LAW]),
            (costs, [law for law, one in laws.items() if one <= 1 - _WORTH_TO_A_LAW]),
        ):
            if some:
                gains.append("zoo: goodput " + ", ".join(f"{law} x {laws[law]:.2f}" for law in some))
        for key, most in (("late", _LATE), ("lost", _LOST)):
            _broken(group, key, pairs, pays, costs, most=most)
        for key, least in (("worst", _WORST), ("long", _LONG)):
            _broken(group, key, pairs, pays, costs, least=least)
        asks = [(on["requests"], off["requests"]) for on, off in pairs if group in {"bursts", "returning"}]
        if asks:
            on_asks, off_asks = (mean(some) for some in zip(*asks, strict=True))
            if max(on_asks, off_asks) > _MORE_REQUESTS * min(on_asks, off_asks):
                (pays if off_asks > on_asks else costs).append(
                    f"{group}: {on_asks:.1f} requests for an answer instead of {off_asks:.1f}"
                )
    return pays, costs


def _broken(
    group: str,
    key: str,
    pairs: Sequence[Pair],
    pays: list[str],
    costs: list[str],
    *,
    most: float | None = None,
    least: float | None = None,
) -> None:
    """Note in how many scenes the promise is kept only with the rule, or only without it, or far better."""
    some = [(on[key], off[key]) for on, off in pairs if on.get(key) is not None and off.get(key) is not None]
    if not some:
        return

    def keeps(figure: float) -> bool:
        return (most is None or figure <= most) and (least is None or figure >= least)

    def is_better(one: float, other: float) -> bool:
        much = most is not None and other - one > _FEWER
        return much or (keeps(one) and not keeps(other) and abs(one - other) > _SLIGHT)

    helped = [(on, off) for on, off in some if is_better(on, off)]
    harmed = [(on, off) for on, off in some if is_better(off, on)]
    worst = max if most is not None else min
    for gains, scenes in ((pays, helped), (costs, harmed)):
        if scenes:
            on, off = worst(one[0] for one in scenes), worst(one[1] for one in scenes)
            gains.append(f"{group}: {key} {on:.1%} instead of {off:.1%} in {len(scenes)} of {len(some)}")


def _row(found: Found, rule: Mapping[str, Any]) -> dict[str, Any]:
    pays, costs = _verdict(found, rule["rule"])
    if rule["elsewhere"]:
        pays.append(f"elsewhere: {rule['elsewhere']}")
    ratios = {group: f"{_goodput(pairs):.3f}" for group, pairs in _pairs(found, rule["rule"]).items()}
    nothing = "nothing" if ratios else "-"
    return {**rule, "pays": "; ".join(pays) or nothing, "costs": "; ".join(costs) or "-"} | ratios


def _means(found: Found, rule: str) -> dict[str, Any]:
    """Means of the figures other than goodput, with the rule -> without it, over the scenes that have them."""
    pairs = [pair for some in _pairs(found, rule).values() for pair in some]
    row: dict[str, Any] = {"rule": rule}
    for key, worst in (("late", max), ("lost", max), ("worst", min), ("long", min)):
        some = [(on[key], off[key]) for on, off in pairs if on.get(key) is not None and off.get(key) is not None]
        if some:
            on, off = zip(*some, strict=True)
            row[key] = f"{mean(on):.2%} -> {mean(off):.2%} ({worst(on):.1%} -> {worst(off):.1%})"
    return row


def sheets(found: Found) -> list[Sheet]:
    rules = all_of(found, what="rule")
    rows = [_row(found, rule) for rule in rules]
    columns = {"rule": "{rule}", "lines": "{lines}", "what it is for": "{pays}", "what it costs": "{costs}",
               "without it": "{without}"}  # fmt: skip
    ratios = {"rule": "{rule}", **{group: f"{{{group}}}" for group in GROUPS}}
    words = {"late": "late", "lost": "lost", "worst": "worst tenant or class", "long": "long queries' share"}
    others = {"rule": "{rule}", **{head: f"{{{key}}}" for key, head in words.items()}}
    played = [row for row in rows if _pairs(found, row["rule"])]
    return [
        table("Each rule", columns, rows),
        table("Goodput with the rule, over that without it", ratios, played),
        table("With the rule -> without it: mean of all its scenes (the worst)", others,
              (_means(found, row["rule"]) for row in played)),
        _scene_sheet(found),
    ]  # fmt: skip


def _scene_sheet(found: Found) -> Sheet:
    """With all rules."""
    columns = {
        "scenes": "{group}: {about}", "late: mean": "{late:.2%}", "worst": "{late_worst:.2%}", "lost": "{lost:.2%}",
        "worst tenant or class": "{worst:.1%}", "long queries' share": "{long:.2f}", "requests": "{requests:.1f}",
    }  # fmt: skip
    rows = []
    for group, some in groupby(all_of(found, what="scene", rule=ALL_ON), itemgetter("group")):
        played = list(some)
        row: dict[str, Any] = {"group": group, "about": GROUPS[group].about, "late_worst": max(map(_late, played))}
        for key, how in (("late", mean), ("lost", mean), ("worst", min), ("long", min), ("requests", mean)):
            figures = [one[key] for one in played if one.get(key) is not None]
            row[key] = how(figures) if figures else None
        rows.append(row)
    return table("With all rules", columns, rows)


def _late(one: Mapping[str, Any]) -> float:
    return float(one["late"])


def goals(found: Found) -> list[Goal]:
    """Every rule that is left is for something."""
    rules = [rule for rule in all_of(found, what="rule") if not rule["elsewhere"]]
    idle = [rule for rule in rules if not _verdict(found, rule["rule"])[0]]
    return [Goal("rules that are for nothing", 0, len(idle) if rules and one_of(found, what="scene") else None, "rules",
                 at_most=True)]  # fmt: skip
