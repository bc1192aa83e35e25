"""Where each group's model lies before training, and the tokenizer they share."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrlhf.backends.megatron.sizes import require_divides, require_fits, require_installed
from asyncrlhf.config.groups import Frozen, MegatronFrozen, MegatronTrain, RolloutTable, VllmRollout
from asyncrlhf.config.load import import_named
from asyncrlhf.config.schema import Config, Data
from asyncrlhf.control.checkpoint import flush_tree
from asyncrlhf.data.prompts import PromptEncoder
from asyncrlhf.data.source import Dataset
from asyncrlhf.data.stream import PromptStream
from asyncrlhf.errors import ConfigError
from asyncrlhf.wiring import Wiring

__all__ = ("Models",)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Models:
    """Where each group's model lies before training, and the tokenizer they share."""

    directories: dict[str, str]
    tokenizer: Any
    eos: int | None
    stop_token_ids: tuple[int, ...]
    longest: int | None
    """Tokens a sequence may have, from the model's configuration."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, without special tokens and without the token that stopped it."""
        stopped = token_ids and token_ids[-1] in self.stop_token_ids
        return self.tokenizer.decode(token_ids[:-1] if stopped else token_ids, skip_special_tokens=True)

    @classmethod
    def require(cls, wiring: Wiring, to_come: Sequence[Path] = ()) -> None:
        """Raises ConfigError for a model directory that is not there, unless it lies below a run directory `to_come`,
        and for parallel sizes that do not divide a model's. Writes nothing, and loads no torch."""
        below = [directory.resolve() for directory in to_come]
        for name, table in wiring.engines.items():
            model = getattr(table, "model", None)
            if model is not None and not any(directory in Path(model).resolve().parents for directory in below):
                _require_model(f"{wiring.key(name)}.model", model)
        for name, table in wiring.engines.items():
            numbers = _numbers(wiring, name)
            if isinstance(table, MegatronTrain | MegatronFrozen):
                _under(wiring.key(name), require_divides, table, numbers)
            if isinstance(table, VllmRollout) and isinstance(heads := numbers.get("num_attention_heads"), int):
                _under(wiring.key(name), table.require_fits, heads)

    @staticmethod
    def require_devices(wiring: Wiring) -> None:
        """Raises ConfigError for a GPU that is not there, or a backend. Loads torch if one is named."""
        for name, table in wiring.engines.items():
            if isinstance(table, MegatronTrain | MegatronFrozen):
                _under(wiring.key(name), require_installed)
                from asyncrlhf.backends.megatron.cpu import require_device

                _under(wiring.key(name), require_device, table.device)
            device: str = getattr(table, "device", "cpu")
            if device.startswith("cuda"):
                from asyncrlhf.backends.torch.model import pick_device

                _under(f'{wiring.key(name)}.device = "{device}"', pick_device, device)

    @classmethod
    def prepare(cls, config: Config, wiring: Wiring, run_dir: Path, *, anew: bool) -> Models:
        """Find every directory, write models that start from scratch (`anew`: again), load the tokenizer. Raises
        ConfigError, also for an architecture that the engines do not serve."""
        from asyncrlhf.backends.torch.model import read_config

        directories: dict[str, str] = {}
        for name in wiring.of_role("policy", "critic"):
            directories[name] = _trained_directory(config, name, wiring.tables[name], run_dir, anew=anew)
        first = directories[wiring.of_role("policy", "critic")[0]]
        for name, table in wiring.engines.items():
            if isinstance(table, RolloutTable | Frozen):
                directories[name] = table.model or directories.get(getattr(table, "follows", ""), first)
        for name, directory in directories.items():
            table = wiring.engines[name]
            architecture = _under(wiring.key(name), read_config, directory, getattr(table, "head", "lm"))
            if isinstance(table, MegatronTrain | MegatronFrozen):
                _under(wiring.key(name), require_fits, table, architecture)
            if isinstance(table, VllmRollout):
                _under(wiring.key(name), table.require_fits, architecture.get_text_config().num_attention_heads)
        tokenizer, shape = _tokenizer(first), json.loads((Path(first) / "config.json").read_bytes())
        for name in (*wiring.of_role("critic", "reference", "reward"), *wiring.judges, *wiring.shadows):
            other = directories.get(name, first)
            if other != first and _tokenizer(other).get_vocab() != tokenizer.get_vocab():
                raise ConfigError(
                    f"{wiring.key(name)}.model = {other!r} has another vocabulary than {first!r}, and is given token "
                    "ids of the latter; use models that share a tokenizer"
                )
        return cls(
            directories=directories,
            tokenizer=tokenizer,
            eos=tokenizer.eos_token_id,
            stop_token_ids=_stop_tokens(Path(first), tokenizer),
            longest=shape.get("max_position_embeddings"),
        )

    def stream(self, dataset: Dataset, data: Data, warn: Callable[[str], object] | None = None) -> PromptStream:
        """A data set in this tokenizer's words; `warn` is told once if it has none for some of it."""
        return PromptStream(
            dataset,
            PromptEncoder(self.tokenizer, data),
            self.tokenizer,
            response=data.response,
            rejected=data.rejected,
            eos=self.eos,
            warn=warn,
        )


def _trained_directory(config: Config, name: str, table: Any, run_dir: Path, *, anew: bool) -> str:
    if table.scratch is None:
        return table.model
    directory = run_dir / "initial" / name
    if anew or not (directory / "config.json").exists():
        from asyncrlhf.backends.torch.scratch import write_model

        scratch, draft = table.scratch, directory.with_name(f".{name}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        try:
            write_model(
                draft,
                model_type=scratch.model_type,
                characters=scratch.characters or "",
                words=() if scratch.words is None else import_named(f"groups.{name}.scratch.words", scratch.words)(),
                config=scratch.config,
                seed=config.seed,
            )
            flush_tree(draft)
            shutil.rmtree(directory, ignore_errors=True)
            draft.rename(directory)
            flush_tree(directory.parent)
        except ConfigError as error:
            raise ConfigError(f"groups.{name}.scratch: {error}") from error
        except Exception as error:  # whatever the disk or a field of the model's configuration raises
            raise ConfigError(
                f"groups.{name}.scratch: no model can be written to {directory}: {type(error).__name__}: "
                f"{_first_line(error)}"
            ) from error
    return str(directory)


def _tokenizer(directory: str) -> Any:
    """Raises ConfigError if it cannot be loaded."""
    from asyncrlhf.backends.torch.guard import guard_companions

    guard_companions()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory}: the tokenizer cannot be loaded: {_first_line(error)}") from error


def _numbers(wiring: Wiring, name: str) -> Mapping[str, Any]:
    """Fields of the Hugging Face configuration of a group's model, as far as they are written down; none for a model
    that is still to come."""
    table: Any = wiring.engines[name]
    found: dict[str, Any] = {}
    if (scratch := getattr(table, "scratch", None)) is not None:
        found = {"model_type": scratch.model_type, **scratch.config}
    elif (model := getattr(table, "model", None)) is not None:
        with contextlib.suppress(OSError, ValueError):
            read = json.loads((Path(model) / "config.json").read_bytes())
            found = {**read, **read.get("text_config", {})}
    elif isinstance(table, RolloutTable | Frozen):
        trained = wiring.of_role("policy", "critic")
        return _numbers(wiring, getattr(table, "follows", trained[0]))
    dense = found and not any("expert" in key for key in found) and not str(found.get("model_type")).endswith("moe")
    return {"num_experts": 1, **found} if dense else found


def _require_model(key: str, model: str) -> None:
    if not (Path(model) / "config.json").exists():
        raise ConfigError(
            f'{key} = "{model}" is not a Hugging Face directory: {Path(model) / "config.json"} is missing; give a '
            "directory with config.json, weights and tokenizer"
        )


def _under(key: str, function: Callable[..., T], *arguments: object) -> T:
    """Call it; a ConfigError begins with `key`."""
    try:
        return function(*arguments)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _stop_tokens(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids of the tokenizer and of generation_config.json."""
    stops: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    generation = directory / "generation_config.json"
    if generation.exists():
        more = json.loads(generation.read_bytes()).get("eos_token_id")
        stops += more if isinstance(more, list) else [] if more is None else [more]
    return tuple(dict.fromkeys(stops))
