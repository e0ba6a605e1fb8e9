"""Prompts from Parquet: a file, a folder of files, or a glob pattern."""

import glob
from collections.abc import Iterator
from pathlib import Path

from agent_rl.data.rows import NumberedRow, RowsConfig, RowSource, columns_read


class ParquetSource(RowSource):
    """The rows of one or several files, in the order of their names."""

    class Config(RowsConfig):
        path: str
        """A `.parquet` file, a folder that holds some, or a pattern such as `data/train-*.parquet`."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed, _rows(_files(config.path), config), f"{config.path!r}")


def _files(path: str) -> list[Path]:
    found = sorted(Path(path).glob("*.parquet")) if Path(path).is_dir() else [Path(p) for p in sorted(glob.glob(path))]
    if not found:
        raise ValueError(f"no Parquet file at {path!r}; set `path` to a file, a folder or a pattern")
    return found


def _rows(files: list[Path], config: RowsConfig) -> Iterator[NumberedRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = columns_read(config)
    for file in files:
        try:
            table = pq.ParquetFile(file)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file} cannot be read as Parquet ({error})") from None
        columns = None if wanted is None else [name for name in table.schema_arrow.names if name in wanted]
        number = 0
        for batch in table.iter_batches(batch_size=4096, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row
