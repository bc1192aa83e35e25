"""Random scenarios: every knob of the contract, short workloads, faults."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st

from asyncrlhf.testing import FakeSamplerOptions, FakeTrainerOptions, Fault, Scenario, Timing

RATES = st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.3])


@st.composite
def timings(draw: st.DrawFn, **fixed: Any) -> Timing:
    values = {
        "seed": draw(st.integers(0, 10**6)),
        "pace": draw(st.sampled_from([1.0, 3.0])),
        "jitter": draw(st.sampled_from([0.0, 1.0])),
        "latency": draw(st.sampled_from([0.0, 0.0, 0.3, 5.0])),
        "verbs": {
            "step": draw(st.sampled_from([0.0, 1.0, 5.0, 20.0])),
            "commit": draw(st.sampled_from([0.0, 1.0])),
            "prepare": draw(st.sampled_from([0.0, 1.0])),
            "spawn": 2.0,
        },
    }
    return Timing(**values | fixed)


@st.composite
def faults(draw: st.DrawFn, replicas: int, most: int) -> tuple[Fault, ...]:
    found: list[Fault] = []
    for _ in range(draw(st.sampled_from(range(most + 1)))):
        kind = draw(st.sampled_from(["die", "die", "hang", "lose", "slow", "mute"]))
        verb = draw(st.sampled_from(["", "token", "add", "abort", "prepare", "commit"]))
        found.append(
            Fault(
                rank=draw(st.integers(0, replicas - 1)),
                at=draw(st.sampled_from([0.0, 10.0, 40.0, 150.0])),
                kind=kind,
                verb="commit" if kind == "lose" and verb in ("", "token") else verb,
                seconds=100.0,
            )
        )
    return tuple(found)


@st.composite
def scenarios(draw: st.DrawFn, *, most_faults: int = 0, **fixed: Any) -> Scenario:
    """`fixed` values win over drawn ones; a calm world has most_faults = 0."""
    staleness = fixed.pop("max_staleness", None)
    staleness = draw(st.sampled_from(range(5))) if staleness is None else staleness
    ahead = fixed.pop("lookahead", None)
    ahead = draw(st.sampled_from(range(staleness + 1))) if ahead is None else ahead
    order = fixed.pop("order", None) or draw(st.sampled_from(["ready", "ready", "admission"]))
    replicas = draw(st.sampled_from([1, 2, 3]))
    answers = draw(st.sampled_from([1, 2, 3]))
    rows, epochs = draw(st.sampled_from([0, 1, 5, 12, 20, 30])), draw(st.sampled_from([1, 2]))
    values: dict[str, Any] = {
        "seed": draw(st.integers(0, 10**6)),
        "timing": draw(timings()),
        "prompts_per_step": draw(st.sampled_from([1, 2, 3, 4])),
        "answers_per_prompt": answers,
        "max_staleness": staleness,
        "lookahead": ahead,
        "order": order,
        "at_deadline": "mask" if order == "admission" else draw(st.sampled_from(["mask", "wait", "drop"])),
        "train_steps": draw(st.sampled_from([None, None, 4, 9])),
        "last": draw(st.sampled_from(["train", "drop"])),
        "publish_every": draw(st.sampled_from(range(1, ahead + 2))),
        "publish_mode": draw(st.sampled_from(["in_flight", "in_flight", "drain"])),
        "publish_rolling": draw(st.booleans()),
        "publish_overlap": ahead > 0 and draw(st.booleans()),
        "publish_timeout": 60.0,
        "kv": draw(st.sampled_from(["rebuild", "rebuild", "keep"])),
        "byte_limit": draw(st.sampled_from([None, None, 0, 300])),
        "max_attempts": draw(st.sampled_from([1, 2, 3])),
        "max_filtered": 1000,
        "min_answers": draw(st.sampled_from([None, 1])),
        "lease_timeout": 150.0,
        "wait_timeout": draw(st.sampled_from([0.5, 30.0])),
        "stall_timeout": 3000.0,
        "max_restarts": 10,
        "rows": rows,
        "epochs": epochs,
        "unusable": draw(RATES),
        "counted": draw(st.booleans()),
        "replicas": replicas,
        "sampler": FakeSamplerOptions(
            slots=draw(st.sampled_from([1, 3, 6])),
            length=draw(st.sampled_from([1.0, 5.0, 12.0])),
            sigma=draw(st.sampled_from([0.0, 0.7, 1.3])),
            rejected=draw(RATES),
        ),
        "max_tokens": 40,
        "trainer": FakeTrainerOptions(
            learning_rate=draw(st.sampled_from([0.125, 0.125, 0.0])), not_finite=draw(RATES), empty=draw(RATES)
        ),
        "max_void_steps": 1000,
        "reward": {
            "seconds": draw(st.sampled_from([(0.0, 0.0), (0.0, 10.0), (0.0, 60.0)])),
            "failing": draw(RATES),
            "equal": draw(RATES),
            "hanging": draw(st.sampled_from([0.0, 0.0, 0.1])),
        },
        "faults": draw(faults(replicas, most_faults)) if most_faults else (),
        "zombies": draw(st.booleans()),
        "evaluation_every": draw(st.sampled_from([0, 0, 1, 2])),
        "evaluation_max_hold": draw(st.sampled_from([0.0, 5.0, 60.0])),
    }
    return Scenario(**values | fixed)


def stressed(number: int) -> Scenario:
    """Drawn uniformly, not shrunk: long data, heavy tails, slow rewards, so that deadlines bite."""
    r = Random(number)
    staleness = r.randint(0, 4)
    ahead = r.choice([staleness, r.randint(0, staleness)])
    order = r.choice(["ready", "ready", "ready", "admission"])
    replicas = r.randint(1, 3)
    kinds = ("die", "hang", "slow", "mute")
    verbs = ("", "token", "add", "abort", "prepare", "commit")

    def rate() -> float:
        return r.choice([0.0, 0.0, 0.05, 0.2])

    return Scenario(
        seed=number,
        timing=Timing(
            seed=number,
            pace=r.choice([1.0, 3.0]),
            jitter=1.0,
            latency=r.choice([0.0, 0.2, 3.0]),
            verbs={"step": r.choice([0.5, 2.0]), "commit": r.choice([0.0, 1.0]), "spawn": r.uniform(1, 12)},
        ),
        prompts_per_step=r.randint(1, 4),
        answers_per_prompt=r.randint(1, 3),
        max_staleness=staleness,
        lookahead=ahead,
        order=order,
        at_deadline="mask" if order == "admission" else r.choice(["mask", "wait", "drop"]),
        publish_every=r.choice([1, r.randint(1, ahead + 1)]),
        publish_mode=r.choice(["in_flight", "in_flight", "drain"]),
        publish_rolling=r.random() < 0.5,
        publish_timeout=100.0,
        byte_limit=r.choice([400, None, None]),
        max_attempts=r.randint(1, 3),
        max_filtered=1000,
        max_void_steps=1000,
        lease_timeout=r.choice([400.0, 1000.0]),
        wait_timeout=r.choice([30.0, 1000.0]),
        stall_timeout=10_000.0,
        max_restarts=20,
        last=r.choice(["train", "drop"]),
        rows=r.randint(20, 50),
        counted=r.random() < 0.5,
        replicas=replicas,
        sampler=FakeSamplerOptions(
            slots=r.randint(4, 16), length=r.choice([5.0, 12.0]), sigma=r.choice([0.7, 1.2, 1.8]), rejected=rate() / 4
        ),
        max_tokens=200,
        trainer=FakeTrainerOptions(not_finite=rate(), empty=rate()),
        reward={
            "seconds": r.choice([(0.0, 0.0), (0.0, 0.0), (0.0, 60.0), (0.0, 200.0)]),
            "failing": rate(),
            "equal": rate(),
        },
        faults=[
            Fault(
                rank=r.randrange(replicas),
                at=r.uniform(0, 600),
                kind=r.choice(kinds),
                verb=r.choice(verbs),
                seconds=r.choice([50.0, 500.0]),
            )
            for _ in range(r.randint(0, 4))
        ],
        zombies=r.random() < 0.5,
        publish_overlap=r.random() < 0.5,
    )
