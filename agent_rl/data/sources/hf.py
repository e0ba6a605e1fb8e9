"""Prompts from a Hugging Face data set: a hub id, a folder of data files, or a folder that `save_to_disk` wrote."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_rl.data.rows import NumberedRow, RowsConfig, RowSource, columns_read


class HfSource(RowSource):
    """The rows of one split, read through the `datasets` package."""

    class Config(RowsConfig):
        path: str
        """A hub id such as `org/name`, or a local folder."""
        name: str | None = None
        """Which configuration of the data set; null takes the default one."""
        split: str = "train"
        """Which split; slices such as `train[:1000]` are allowed, except of a saved data set."""
        revision: str | None = None
        """Branch, tag or commit on the hub; null takes the newest."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed, _rows(config), f"data set {config.path!r}")


def _rows(config: HfSource.Config) -> Iterator[NumberedRow]:
    dataset = _load(config)
    wanted = columns_read(config)
    if wanted is not None:
        dataset = dataset.select_columns([name for name in dataset.column_names if name in wanted])
    for number, row in enumerate(dataset):
        yield f"{config.path}, {config.split} row {number}", row


def _load(config: HfSource.Config) -> Any:
    import datasets  # heavy

    path = Path(config.path)
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return _saved_split(datasets.load_from_disk(str(path)), config)
        return datasets.load_dataset(config.path, config.name, split=config.split, revision=config.revision)
    except Exception as error:  # the hub's client, fsspec and pyarrow each raise their own
        raise ValueError(_sentence(config, error)) from error


def _saved_split(dataset: Any, config: HfSource.Config) -> Any:
    """The split of a saved data set; one that was saved by itself has no name and is taken as it is."""
    return dataset[config.split] if hasattr(dataset, "keys") else dataset


def _sentence(config: HfSource.Config, error: Exception) -> str:
    """The sentence on how to fix a data set that cannot be loaded."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    first = lines[0].rstrip(".")
    if Path(config.path).exists():
        return f"the data set in {config.path!r} cannot be loaded as split {config.split!r}: {first}"
    return (
        f"the data set {config.path!r} is no local folder, and neither the Hugging Face hub nor its cache has it "
        f"({type(error).__name__}: {first}); check the id and the connection, or download it elsewhere and name the "
        "local folder"
    )
