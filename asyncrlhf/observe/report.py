"""The closing report: a summary in about ten lines of plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ("percent", "rate", "report_lines", "short")

SHOWN_LAGS = 8


def report_lines(summary: Mapping[str, Any], directory: Path | None) -> list[str]:
    """The lines for a person, from what summary.json holds."""
    staleness, rates, busy = summary["staleness"], summary["rates"], summary["busy"]
    tokens, shares = summary["tokens"], summary["shares"]
    ended = summary["status"] if summary["status"] == "completed" else f"{summary['status']} ({summary['reason']})"
    message = f"; {summary['message']}" if summary["message"] else ""
    lines = [
        f"{ended}: {summary['train_steps']} train steps in {summary['wall_s']:.1f} s{message}",
        f"speed       {rate(rates['steps_s'])} steps/s, {rate(rates['trained_tokens_s'])} trained tokens/s, "
        f"{rate(rates['samples_s'])} samples/s",
        f"tokens      {tokens['generated']:,} generated = {tokens['trained']:,} trained + {tokens['masked']:,} "
        f"masked + {tokens['dropped']:,} dropped + {tokens['open']:,} open; useful "
        f"{percent(summary['useful_token_fraction'])}",
        f"staleness   {_since(staleness)}lag {short(staleness['mean_token_lag'])} mean, "
        f"{short(staleness['max_token_lag'])} max, bound "
        f"{short(staleness['bound'])}; over age {percent(staleness['masked_fraction'])}, no signal "
        f"{percent(staleness['untrainable_fraction'])}, expired "
        f"{percent(staleness['expired_fraction'])}; lags {_histogram(staleness['histograms']['token'])}",
        f"busy        {_generation(busy, shares)}train {percent(busy['train'])} (waits "
        f"{percent(shares['train']['wait'])}, sync {percent(shares['train']['sync'])})",
    ]
    if summary["is_sampled"]:
        lines.append(
            f"overlap     {percent(summary['overlap_efficiency'])} efficient, exposed sync "
            f"{short(summary['exposed_sync_s'])} s a step, speed-up bound {short(summary['speedup_bound'])}x"
        )
    lines += _movements(summary)
    if summary["is_scored"]:
        first, last = short(summary["reward"]["first"]), short(summary["reward"]["last"])
        lines.insert(1, f"reward      {first} -> {last}{_evaluation(summary)}")
        lines[2:2] = _samples(summary["evaluation"])
    elif outcomes := [f"{name} {_change(summary[name])}" for name in ("loss", "accuracy") if name in summary]:
        lines.insert(1, f"outcome     {', '.join(outcomes)}")
    if summary["rejected_steps"] or summary["void_steps"] or summary["nonfinite_values"] or summary["failed_leases"]:
        lines.append(
            f"trouble     {summary['rejected_steps']} rejected optimizer steps, {summary['void_steps']} void train "
            f"steps, {summary['nonfinite_values']} numbers not finite, {summary['failed_leases']} failed leases"
        )
    if staleness["masked_fraction"]:
        lines.append(
            f"over age    {_since(staleness)}by position {_deciles(staleness['masked_by_position'])}; by length "
            f"{_deciles(staleness['masked_by_length'])} (tenths, % of all tokens)"
        )
    if directory is not None:
        trace = ", trace.json (ui.perfetto.dev)" if (directory / "trace.json").exists() else ""
        lines.append(f"files       {directory}: summary.json, metrics.jsonl, events.jsonl{trace}")
    return lines


def _since(staleness: Mapping[str, Any]) -> str:
    """Where the bound was another one before."""
    return f"since train step {staleness['since_step']}: " if staleness["since_step"] else ""


def _movements(summary: Mapping[str, Any]) -> Iterator[str]:
    """Of weights to engines, and of groups to shared devices, where there were any."""
    publishes, switches, wall = summary["publishes"], summary["switches"], summary["wall_s"]
    if publishes["count"]:
        exposed = percent(publishes["exposed"] / publishes["seconds"] if publishes["seconds"] else None)
        yield f"publishes   {publishes['count']} in {publishes['seconds']:.1f} s, {exposed} of it exposed"
    if switches["count"]:
        share = percent(switches["seconds"] / wall if wall else None)
        yield f"switches    {switches['count']} of shared devices in {switches['seconds']:.1f} s, {share} of the run"


def _generation(busy: Mapping[str, Any], shares: Mapping[str, Any]) -> str:
    """Nothing where nothing is generated."""
    if not busy["generate"]:
        return ""
    wait, sync = shares["generate"]["wait"], shares["generate"]["sync"]
    return f"generate {percent(busy['generate'])} (waits {percent(wait)}, sync {percent(sync)}), "


def _change(means: Mapping[str, Any]) -> str:
    return f"{short(means['first'])} -> {short(means['last'])}"


def short(value: float | None) -> str:
    """At most three digits after the point; "-" for what does not exist."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def rate(value: float | None) -> str:
    """A number a second: two significant digits at least."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def _evaluation(summary: Mapping[str, Any]) -> str:
    evaluation = summary["evaluation"]
    if evaluation["label"] is None:
        return ""
    if evaluation["count"] < 2:
        alone = "".join(f", {name} {short(means['last'])}" for name, means in evaluation["judges"].items())
        return f"; evaluation {short(evaluation['last'])}{alone} at {evaluation['label']}"
    judges = "".join(
        f", {name} {short(means['first'])} -> {short(means['last'])}" for name, means in evaluation["judges"].items()
    )
    return f"; evaluation {short(evaluation['first'])} -> {short(evaluation['last'])}{judges} at {evaluation['label']}"


def _samples(evaluation: Mapping[str, Any]) -> list[str]:
    """The same prompt before and after, where both were quoted."""
    before, after = evaluation["samples"]["first"], evaluation["samples"]["last"]
    if evaluation["count"] < 2 or not before or not after or before[0]["prompt"] != after[0]["prompt"]:
        return []
    quoted = [f"{sample[0]['response']!r:.90}" for sample in (before, after)]
    return [f"sample      {before[0]['prompt']!r:.60}: {quoted[0]} -> {quoted[1]}"]


def _histogram(counts: Mapping[int, int]) -> str:
    """Example: "0:61% 1:35% 2:4%"; lags past the first eight are one entry."""
    total = sum(counts.values())
    if not total:
        return "-"
    lags = sorted(counts)
    parts = [f"{lag}:{percent(counts[lag] / total, 0)}" for lag in lags[:SHOWN_LAGS]]
    if rest := sum(counts[lag] for lag in lags[SHOWN_LAGS:]):
        parts.append(f"{lags[SHOWN_LAGS]}+:{percent(rest / total, 0)}")
    return " ".join(parts)


def _deciles(shares: list[float | None]) -> str:
    return " ".join(f"{100 * (share or 0.0):.1f}" for share in shares)
