"""Weights between four real processes over gloo: bit by bit for every pair of layouts, and never a torn version."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from asyncrlhf.weights.plan import LOCAL, make_plan
from tests.integration.reshard_ranks import CAP, SHORT, free_ports, rank_main
from tests.integration.reshard_scene import RANKS, pairs

pytestmark = pytest.mark.timeout(600)
STAGES = ("moved", "refused", "late", "killed")


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    """Stage -> what each rank answered; one set of processes for all tests of this module."""
    context = multiprocessing.get_context("spawn")
    ports, pipes, processes = free_ports(len(STAGES)), list[Any](), list[Any]()
    for rank in range(RANKS):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(rank, ports, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    found: dict[str, list[Any]] = {}
    try:
        for stage in STAGES:
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(180), f"rank {rank} does not answer"
                name, answer = pipe.recv()
                assert name == stage, f"rank {rank}: {answer}"
                found.setdefault(stage, []).append(answer)
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    return found


@pytest.mark.parametrize(("index", "name"), [(index, pair[0]) for index, pair in enumerate(pairs())])
def test_N14_every_pair_of_layouts_is_exact_within_the_cap(told: dict[str, list[Any]], index: int, name: str) -> None:
    _, _, source, destination, _ = list(pairs())[index]
    plan = make_plan(source, destination, cap=CAP)
    for row, answers in zip(plan.traffic(), told["moved"], strict=True):
        answer = answers[index]
        assert answer["pair"] == name
        assert answer["exact"], f"rank {row.rank}"
        for receipt in answer["receipts"]:
            assert (receipt.sent, receipt.received, receipt.copied) == (row.sent, row.received, row.copied)
        assert answer["peak"] <= CAP, f"rank {row.rank} took {answer['peak']} bytes"


def test_what_regrouped_ranks_receive_is_the_formula(told: dict[str, list[Any]]) -> None:
    checked = 0
    for index, (_, shape, source, destination, regrouping) in enumerate(pairs()):
        if regrouping is None or shape.kv_heads % regrouping.tensor or shape.experts:
            continue  # the formula is for parameters that split evenly and are split in training
        checked += 1
        plan = make_plan(source, destination, cap=CAP)
        even = {p.name: p.byte_count for p in shape.parameters() if p.layer >= 0 and len(p.shape) > 1}
        for rank, answers in enumerate(told["moved"]):
            odd = sum(
                move.byte_count
                for move in plan.moves
                if move.target == rank and move.bucket != LOCAL and move.parameter not in even
            )
            for receipt in answers[index]["receipts"]:
                assert receipt.received - odd == regrouping.received_fraction * sum(even.values())
    assert checked == 5


def test_buckets_are_smaller_and_larger_than_tensors() -> None:
    for _, shape, source, destination, _ in pairs():
        plan = make_plan(source, destination, cap=CAP)
        if plan.bucket_count:
            sizes = [parameter.byte_count for parameter in shape.parameters()]
            assert min(sizes) < CAP < max(sizes)


def test_a_spoilt_version_is_refused_by_all_and_the_next_one_arrives(told: dict[str, list[Any]]) -> None:
    for rank, answer in enumerate(told["refused"]):
        reasons = answer["reasons"]
        assert "rank 2" in reasons["unready"]
        assert "rank" in reasons["flipped"]
        assert "version 3" in reasons["version"]
        assert "version 4" in reasons["version"]
        assert "layouts and cap must be the same" in reasons["plan"]
        assert reasons["whole"] == ""
        assert answer["still"], f"rank {rank} serves something else than before"
        assert answer["then"], f"rank {rank} does not serve what arrived"
    assert "shape" in told["refused"][2]["reasons"]["unready"]
    assert sum("checksum" in answer["reasons"]["flipped"] for answer in told["refused"]) >= 1


def test_a_late_rank_is_given_up_and_the_version_before_goes_on(told: dict[str, list[Any]]) -> None:
    for answer in told["late"][1:]:
        assert f"did not move within {SHORT:g} s" in answer["reason"]
        assert "must be made anew" in answer["again"]
    assert all(answer["still"] for answer in told["late"])


def test_a_dead_rank_is_noticed_by_all_and_the_version_before_goes_on(told: dict[str, list[Any]]) -> None:
    assert [bool(answer["reason"]) for answer in told["killed"]] == [True] * RANKS
    for answer in told["killed"][:3]:
        assert "lost a peer at version 1" in answer["reason"]
        assert answer["still"]
