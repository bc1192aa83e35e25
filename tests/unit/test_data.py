"""Data sets by uid: order, epochs, streams, resume; malformed rows; prompts as tokens; the procedural task."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from msgspec.structs import replace

from asyncrlhf.config.schema import Data
from asyncrlhf.data.prompts import PromptEncoder
from asyncrlhf.data.rows import Row, problem_of
from asyncrlhf.data.source import Dataset, EndlessRows, FiniteRows, RowStream, open_dataset
from asyncrlhf.data.stream import PromptStream
from asyncrlhf.data.tasks import exact_match, reverse
from asyncrlhf.errors import ConfigError, DataError, SampleError
from asyncrlhf.messages import Rollout

opened = 0


def listed(rows: int = 4) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "answer": i} for i in range(rows)]


def preferences() -> list[dict[str, Any]]:
    return [{"prompt": "a", "good": "bc", "bad": "d"}]


def streamed(rows: int = 4) -> Iterator[dict[str, Any]]:
    global opened
    opened += 1
    yield from listed(rows)


class Reiterable:
    """Iterated, not indexed, like a streaming data set."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(listed(3))

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise NotImplementedError


class Ending:
    """Indexed, no length, and yet it ends."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return listed(2)[index]


class Torn:
    """Rows of which one cannot be read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return listed()[index + 3]


def closed(after: int = 0) -> Iterator[dict[str, Any]]:
    yield from listed(after)
    raise OSError("the server has gone\nand says so in two lines")


def missing() -> list[dict[str, Any]]:
    raise FileNotFoundError(2, "No such file or directory", "nowhere")


only_once = iter(listed(2))


def one_iterator() -> Iterator[dict[str, Any]]:
    return only_once


def a_string() -> str:
    return "rows"


def a_number() -> int:
    return 3


not_a_function = 3


def source(name: str, **keys: Any) -> Dataset:
    seed = keys.pop("seed", 0)
    return open_dataset(Data(source=f"{__name__}:{name}", **keys), seed)


def prompts(dataset: Dataset, start: int, stop: int) -> list[str]:
    return [dataset.row(uid).columns["prompt"] for uid in range(start, stop)]


def test_finite_rows_come_once_per_epoch_in_an_order_of_seed_and_epoch() -> None:
    dataset = source("listed", options={"rows": 50}, epochs=2)
    assert dataset.count == 100
    first, second = prompts(dataset, 0, 50), prompts(dataset, 50, 100)
    assert set(first) == set(second) == {f"p{i}" for i in range(50)}
    assert first != second
    assert first != sorted(first, key=lambda p: int(p[1:]))
    assert [dataset.epoch(uid) for uid in (0, 49, 50, 99)] == [0, 0, 1, 1]
    assert (dataset.has(99), dataset.has(100)) == (True, False)
    again = source("listed", options={"rows": 50}, epochs=2)
    again.resume(70, [3])
    assert again.row(70) == dataset.row(70)
    assert again.row(3) == dataset.row(3)
    assert prompts(source("listed", options={"rows": 50}, seed=1), 0, 50) != first


def test_an_order_is_stable_across_versions_of_this_project() -> None:
    order = "".join(prompts(source("listed", options={"rows": 6}), 0, 12)).replace("p", "")
    assert (order[:6], order[6:]) == ("051432", "201534")


def test_rows_of_an_old_epoch_stay_readable_and_orders_do_not_pile_up() -> None:
    dataset = source("listed", options={"rows": 10})
    assert isinstance(dataset, FiniteRows)
    first = dataset.row(0)
    for epoch in range(20):
        dataset.row(epoch * 10)
    assert len(dataset._orders) <= 3
    assert dataset.row(0) == first


def test_without_shuffle_rows_keep_their_order() -> None:
    assert prompts(source("listed", shuffle=False), 0, 8) == ["p0", "p1", "p2", "p3"] * 2


def test_l2_without_epochs_the_next_one_begins() -> None:
    dataset = source("listed")
    assert dataset.count is None
    assert dataset.has(10**9)
    assert dataset.epoch(9) == 2


def test_l13_resume_at_an_epoch_boundary_goes_on_with_the_next_epoch() -> None:
    dataset = source("listed", epochs=3)
    dataset.resume(4, [])
    assert dataset.has(4)
    assert dataset.epoch(4) == 1
    stream = source("streamed", epochs=3)
    stream.resume(4, [])
    assert stream.has(4)
    assert stream.epoch(4) == 1
    assert stream.row(4).columns["prompt"] == "p0"


def test_a_stream_ends_by_name_or_goes_round() -> None:
    dataset = source("streamed", epochs=2)
    assert isinstance(dataset, RowStream)
    assert dataset.count is None
    assert prompts(dataset, 0, 8) == ["p0", "p1", "p2", "p3"] * 2
    assert not dataset.has(8)
    assert dataset.count == 8
    assert [dataset.epoch(uid) for uid in (0, 3, 4, 7)] == [0, 0, 1, 1]
    with pytest.raises(DataError, match="row 8 does not exist; 8 have been read"):
        dataset.row(8)
    assert source("streamed").has(41)
    assert prompts(source("Reiterable"), 0, 4) == ["p0", "p1", "p2", "p0"]


def test_l2_an_iterator_that_cannot_be_opened_twice_ends() -> None:
    dataset = source("one_iterator")
    assert (dataset.has(1), dataset.has(2), dataset.count) == (True, False, 2)


def test_a_stream_looks_one_row_ahead_and_holds_what_is_not_released() -> None:
    global opened
    opened = 0
    dataset = source("streamed", options={"rows": 5}, epochs=1)
    assert isinstance(dataset, RowStream)
    assert opened == 1
    for uid in range(4):
        assert dataset.has(uid)
        assert dataset.row(uid) == dataset.row(uid)
        assert len(dataset._held) == uid + 1
    for uid in (0, 2, 3):
        dataset.release(uid)
    assert list(dataset._held) == [1]
    assert dataset.row(1).columns["prompt"] == "p1"
    with pytest.raises(DataError, match="row 2 was released"):
        dataset.row(2)


def test_a_stream_resumes_at_its_cursor_and_keeps_what_is_needed() -> None:
    dataset = source("streamed", options={"rows": 5}, epochs=2)
    assert isinstance(dataset, RowStream)
    dataset.resume(7, [2, 5])
    assert sorted(dataset._held) == [2, 5]
    assert prompts(dataset, 7, 10) == ["p2", "p3", "p4"]
    assert dataset.row(5).columns["prompt"] == "p0"
    assert dataset.epoch(5) == 1


@pytest.mark.parametrize("name", ["listed", "streamed"])
def test_a_data_set_that_shrank_is_refused_on_resume(name: str) -> None:
    with pytest.raises(DataError, match="has 4 rows, but 6 had been read before: it has changed"):
        source(name, epochs=1).resume(6, [])


def test_l2_the_task_has_no_end_unless_it_is_given_one() -> None:
    task = Data(source="asyncrlhf.data.tasks:reverse", options={"length": 3})
    dataset = open_dataset(task, 0)
    assert isinstance(dataset, EndlessRows)
    dataset.resume(10**6, [5])
    assert (dataset.count, dataset.has(10**6), dataset.epoch(10**6)) == (None, True, 0)
    row = dataset.row(10**6).columns
    assert row["prompt"][:3] == row["answer"][::-1]
    sized = open_dataset(Data(source="asyncrlhf.data.tasks:reverse", options={"rows": 3}, epochs=1), 0)
    assert (sized.count, sized.has(2), sized.has(3)) == (3, True, False)
    with pytest.raises(ConfigError, match=r"data.epochs = 2, but data.source = .* has rows without end"):
        open_dataset(Data(source="asyncrlhf.data.tasks:reverse", epochs=2), 0)
    ending = source("Ending")
    assert ending.row(1).columns["prompt"] == "p1"
    with pytest.raises(DataError, match="has no row 2: rows that end need a __len__"):
        ending.row(2)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("nothing", {}, ConfigError, "cannot be imported (module"),
        ("not_a_function", {}, ConfigError, "is a int; name a function that returns rows"),
        ("listed", {"row": 3}, ConfigError, "data.options do not fit"),
        ("a_string", {}, ConfigError, "gives a str, not rows"),
        ("a_number", {}, ConfigError, "gives a int, not rows"),
        ("listed", {"rows": 0}, DataError, "gives no row"),
        ("streamed", {"rows": 0}, DataError, "gives no row"),
    ],
)
def test_a_source_that_gives_no_rows_is_refused(
    name: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        source(name, options=options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words", "cause"),
    [
        ("missing", "raised FileNotFoundError: [Errno 2] No such file or directory: 'nowhere' (", FileNotFoundError),
        ("closed", "raised OSError: the server has gone (", OSError),
    ],
)
def test_a_source_that_raises_is_refused_by_its_key(name: str, words: str, cause: type[Exception]) -> None:
    with pytest.raises(DataError) as caught:
        source(name)
    assert str(caught.value).startswith(f'data.source = "{__name__}:{name}" {words}')
    assert f"{Path(__file__).name}, line " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


def test_a_source_that_raises_later_says_so() -> None:
    stream = source("closed", options={"after": 2})
    assert stream.has(1)
    with pytest.raises(DataError, match="raised OSError: the server has gone"):
        stream.has(2)
    torn = source("Torn", shuffle=False)
    assert torn.row(0).columns["prompt"] == "p3"
    with pytest.raises(DataError, match="Torn: row 1 raised IndexError: list index out of range") as caught:
        torn.row(1)
    assert isinstance(caught.value.__cause__, IndexError)


def test_malformed_rows_are_counted_and_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        b'\xef\xbb\xbf{"prompt": "a", "answer": 1}',
        b"",
        b'{"prompt": "b"}',
        b"{not json}",
        b'{"prompt": 3, "answer": 1}',
        b'{"prompt": "", "answer": 1}',
        b"[1, 2]",
        b'{"prompt": [{"role": "user", "content": "x"}], "answer": 1}',
        b'{"prompt": "\xff", "answer": 1}',
        b"[" * 100_000,
        b'{"prompt": "z", "answer": null, "extra": [1]}',
    ]
    path.write_bytes(b"\n".join(lines))
    dataset = open_dataset(Data(path=str(path), shuffle=False, epochs=1), 0)
    assert dataset.count == 2
    assert prompts(dataset, 0, 2) == ["a", "z"]
    report = dataset.report
    assert (report.row_count, report.malformed_count) == (2, 8)
    assert report.malformed[0] == "line 3: no column 'answer' (it has 'prompt')"
    assert report.malformed[1].startswith("line 4: not JSON: ")
    assert report.malformed[2] == "line 5: column 'prompt' is a int, not text"
    assert report.malformed[3] == "line 6: column 'prompt' is empty"
    assert report.malformed[4] == "line 7: a row is a list, not an object with columns"
    assert str(report).startswith(f"{path}: 2 rows, 8 malformed left out (line 3: ")
    assert str(report).endswith("; ...)")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty; write one JSON object a line"),
        ("\n \n", "is empty"),
        ('{"question": "a", "answer": 1}\n' * 3, "all 3 rows are malformed (line 1: no column 'prompt' (it has 'quest"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_without_a_usable_row_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        open_dataset(Data(path=str(path)), 0, "evaluation")
    assert words in str(caught.value)
    assert str(caught.value).startswith("evaluation.path = ")


def test_which_columns_a_row_needs() -> None:
    row = {"prompt": "a", "answer": 1}
    assert problem_of(row, Data(path="x.jsonl")) is None
    assert problem_of({"prompt": "a"}, Data(path="x.jsonl", ground_truth="")) is None
    assert problem_of({"prompt": "a", "reply": "b"}, Data(path="x.jsonl", response="reply")) is None
    assert problem_of(row, Data(path="x.jsonl", response="reply")) == "no column 'reply' (it has 'prompt', 'answer')"
    assert problem_of(row, Data(path="x.jsonl", response="answer")) == "column 'answer' is a int, not text"
    pair = Data(path="x.jsonl", response="good", rejected="bad")
    assert problem_of({"prompt": "a", "good": "b", "bad": "c"}, pair) is None
    assert problem_of({"prompt": "", "good": "b", "bad": "c"}, pair) is None
    assert problem_of({"prompt": "a", "good": "b", "bad": ""}, pair) == "column 'bad' is empty"
    assert problem_of({"prompt": "a", "good": "b"}, pair) == "no column 'bad' (it has 'prompt', 'good')"
    chat = Data(path="x.jsonl", chat=True)
    assert problem_of({"prompt": "a", "answer": 1}, chat) is None
    assert problem_of({"prompt": [{"role": "user", "content": "a"}], "answer": 1}, chat) is None
    assert problem_of({"prompt": [{"role": "user"}], "answer": 1}, chat) is not None
    assert problem_of({"prompt": [], "answer": 1}, chat) == "column 'prompt' is empty"
    wrong = problem_of({"prompt": [{"role": "user", "content": "a"}], "answer": 1}, Data(path="x.jsonl"))
    assert wrong == "column 'prompt' is a list, not text (a list of messages needs data.chat = true)"


class Characters:
    """A tokenizer of one token per character; special tokens add a 0 in front."""

    chat_template: str | None = "template"
    bos_token_id: int | None = None
    eos_token_id: int | None = 1

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [0] * (add_special_tokens and bool(text)) + [ord(c) for c in text]

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        if conversation[0]["role"] == "system":
            raise TemplateError("system role not supported")
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>"


def test_a_row_becomes_a_prompt() -> None:
    encoder = PromptEncoder(Characters(), Data(path="x.jsonl"))
    encoded = encoder.encode(5, Row({"prompt": "ab", "answer": "ba", "level": 3}))
    assert encoded.text == "ab"
    assert encoded.token_ids == (0, 97, 98)
    assert encoded.ground_truth == "ba"
    assert encoded.columns == {"level": 3}


def test_the_response_column_stays_though_it_is_the_ground_truth() -> None:
    encoder = PromptEncoder(Characters(), Data(path="x.jsonl", response="answer"))
    encoded = encoder.encode(5, Row({"prompt": "ab", "answer": "ba"}))
    assert (encoded.ground_truth, encoded.columns) == ("ba", {"answer": "ba"})


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hi", "<user>hi<assistant>"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "<user>a<assistant>b<assistant>"),
    ],
)
def test_chat_goes_through_the_template_which_writes_its_own_special_tokens(prompt: Any, text: str) -> None:
    encoder = PromptEncoder(Characters(), Data(path="x.jsonl", chat=True, ground_truth=""))
    encoded = encoder.encode(0, Row({"prompt": prompt}))
    assert encoded.text == text
    assert encoded.token_ids == tuple(map(ord, text))
    assert encoded.ground_truth is None


def test_a_prompt_that_cannot_be_encoded_names_its_uid() -> None:
    encoder = PromptEncoder(Characters(), Data(path="x.jsonl", chat=True, max_prompt_tokens=20))
    with pytest.raises(SampleError, match=r"prompt 7 has 28 tokens, above data.max_prompt_tokens = 20; shorten"):
        encoder.encode(7, Row({"prompt": "elevenchars", "answer": ""}))
    with pytest.raises(
        SampleError, match="prompt 8: the chat template refuses its messages: system role not supported"
    ):
        encoder.encode(8, Row({"prompt": [{"role": "system", "content": "x"}], "answer": ""}))
    with pytest.raises(SampleError, match="prompt 9: no column 'prompt'"):
        encoder.encode(9, Row({"answer": ""}))
    with pytest.raises(SampleError, match="prompt 10: a row is a list"):
        encoder.encode(10, Row([1]))  # type: ignore[arg-type]

    class Silent(Characters):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return []

    with pytest.raises(SampleError, match="prompt 11: 'a' has no token"):
        PromptEncoder(Silent(), Data(path="x.jsonl")).encode(11, Row({"prompt": "a", "answer": ""}))


def test_an_empty_prompt_becomes_a_token_to_begin_with() -> None:
    tokenizer, row = Characters(), Row({"prompt": "", "answer": "b"})
    encoder = PromptEncoder(tokenizer, Data(path="x.jsonl", response="answer"))
    assert encoder.encode(3, row).token_ids == (1,)
    tokenizer.bos_token_id = 0
    assert encoder.encode(3, row).token_ids == (0,)
    tokenizer.bos_token_id = tokenizer.eos_token_id = None
    with pytest.raises(DataError, match="prompt 3 is empty, and the tokenizer has neither a BOS nor an EOS"):
        encoder.encode(3, row)


def test_a_row_brings_its_own_answer_and_a_worse_one() -> None:
    tokenizer, data = Characters(), Data(source=f"{__name__}:preferences", response="good", rejected="bad")
    stream = PromptStream(
        open_dataset(data, 0), PromptEncoder(tokenizer, data), tokenizer, response="good", rejected="bad", eos=1
    )
    prompt = stream.prompt(0, 1, 4)
    assert (prompt.target_token_ids, prompt.rejected_token_ids) == ((98, 99, 1), (100, 1))
    alone, pair = Rollout.from_data(prompt), Rollout.pair_from_data(prompt)
    assert [sample.token_ids for sample in alone.samples] == [(98, 99, 1)]
    assert [sample.token_ids for sample in pair.samples] == [(98, 99, 1), (100, 1)]
    assert {segment.source for sample in pair.samples for segment in sample.segments} == {"data"}
    with pytest.raises(ValueError, match=r"uid 0 has no answer of its own; name its column in data\.rejected"):
        Rollout.pair_from_data(replace(prompt, rejected_token_ids=()))


def test_text_that_the_tokenizer_has_no_token_for_is_warned_of_once() -> None:
    tokenizer, data = Characters(), Data(source=f"{__name__}:preferences", response="good", rejected="bad")
    tokenizer.unk_token_id = 98  # type: ignore[attr-defined]
    said: list[str] = []
    stream = PromptStream(
        open_dataset(data, 0),
        PromptEncoder(tokenizer, data),
        tokenizer,
        response="good",
        rejected="bad",
        eos=1,
        warn=said.append,
    )
    stream.prompt(0, 1, 4)
    stream.prompt(0, 2, 4)
    (message,) = said
    assert message.startswith("prompt 0: the tokenizer has no token for 1 of the 2 parts of 'bc'")


def test_chat_without_a_template_is_refused_at_once() -> None:
    plain = Characters()
    plain.chat_template = None
    with pytest.raises(ConfigError, match=r"data.chat = true, but the tokenizer has no chat template"):
        PromptEncoder(plain, Data(path="x.jsonl", chat=True))


def test_the_task_is_deterministic_by_index() -> None:
    rows = reverse(length=5, seed=3)
    assert rows[41] == rows[41] == reverse(length=5, seed=3, rows=50)[41]
    assert rows[41] != reverse(length=5, seed=4)[41]
    assert rows[0]["prompt"] == rows[0]["answer"][::-1] + ">"
    assert len(rows[0]["answer"]) == 5
    assert len({rows[i]["answer"] for i in range(100)}) == 100
    assert set("".join(reverse(alphabet="xy")[i]["answer"] for i in range(20))) == {"x", "y"}
    with pytest.raises(IndexError):
        reverse(rows=3)[3]
    for wrong in ({"length": 0}, {"rows": 0}, {"alphabet": ""}):
        with pytest.raises(ConfigError, match="leaves nothing to reverse"):
            reverse(**wrong)  # type: ignore[arg-type]


def test_exact_match() -> None:
    assert exact_match("ab>", " ba\n", "ba", level=3) == 1.0
    assert exact_match("ab>", "ab", "ba") == 0.0
    assert exact_match("1+1", "2", 2) == 1.0


def test_data_loads_without_torch() -> None:
    code = (
        "import sys; from asyncrlhf.data import source, prompts, tasks; from asyncrlhf.config.schema import Data\n"
        "source.open_dataset(Data(source='asyncrlhf.data.tasks:reverse'), 0).row(3)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
