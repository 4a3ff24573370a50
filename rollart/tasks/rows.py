"""The rows of a dataset: JSONL, CSV and TSV by an index of their lines, Parquet and Hugging Face datasets by Arrow.

A file is read through once, to find where its rows begin, and then row by row: what is held in memory is eight bytes a
row, however long the rows are. Parquet is unpacked into a temporary file that Arrow maps into memory. pyarrow and
`datasets` are imported when they are needed. Raises JobError that names the argument and the fix.
"""

import csv
import io
import json
import os
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rollart.errors import JobError, install
from rollart.types import Payload

Row = Payload


class Rows(Protocol):
    """A table, row by row. Rows raise ValueError, which names them."""

    @property
    def name(self) -> str:
        """The file or dataset, as messages name it."""

    @property
    def columns(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row: ...


def open_rows(path: str, *, key: str, split: str = "", split_key: str = "split", config: str = "") -> Rows:
    """All rows of a file, or of one split of a dataset that `datasets` reads. `key` is the argument that names it, and
    `split_key` the one that names the split."""
    suffix = Path(path).suffix
    if suffix in (".jsonl", ".csv", ".tsv", ".parquet"):
        if not Path(path).is_file():
            raise JobError(f"tasks.args.{key}: there is no file {path}; correct the path")
        if config:
            raise JobError("tasks.args.config: is for datasets of the hub, and this is a file; remove it")
        if suffix == ".parquet":
            return ArrowFile.of_parquet(Path(path))
        return JsonLines(Path(path)) if suffix == ".jsonl" else DelimitedLines(Path(path))
    if Path(path).is_file():
        raise JobError(
            f"tasks.args.{key}: {path} is none of .jsonl, .csv, .tsv and .parquet; unpack or convert it (a JSON list: "
            "`jq -c '.[]' FILE.json > FILE.jsonl`)"
        )
    return _of_hugging_face(path, key, split, split_key, config)


class _Lines:
    """Records of a text file by where they begin; `_starts` has one entry more, the end of the last."""

    def __init__(self, path: Path, ends: Iterator[int]) -> None:
        self._path, self.name = path, str(path)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._starts = array("Q", ends)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _record(self, number: int) -> str:
        start, end = self._starts[number], self._starts[number + 1]
        try:
            return os.pread(self._file, end - start, start).decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._path}, row {number + 1}: is not UTF-8, as it must be ({error.reason}, byte "
                f"0x{error.object[error.start]:02x})"
            ) from None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


class JsonLines(_Lines):
    """One JSON object a line; empty lines are passed over, and so is a byte order mark."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _line_starts(path))
        if not len(self):
            raise JobError(f"tasks.args.path: {path} has no rows; give one that has")
        try:
            self.columns = list(self[0])
        except ValueError as error:
            raise JobError(f"tasks.args.path: {error}; give one JSON object a line") from None

    def __getitem__(self, number: int) -> Row:
        try:
            row = json.loads(self._record(number).removeprefix("\ufeff"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._path}, row {number + 1}: is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{self._path}, row {number + 1}: is a {type(row).__name__}, not an object")
        return row


def _line_starts(path: Path) -> Iterator[int]:
    """Where lines begin; an empty one belongs to the line before it."""
    at = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield at
            at += len(line)
    yield at


class DelimitedLines(_Lines):
    """CSV, or TSV by the name: a header, then records, quoted as RFC 4180 has it. Every value is a text."""

    def __init__(self, path: Path) -> None:
        self._delimiter = "\t" if path.suffix == ".tsv" else ","
        super().__init__(path, _record_starts(path))
        if len(self) < 1:
            raise JobError(f"tasks.args.path: {path} has no rows below its header; give one that has")
        with path.open("rb") as file:
            header = file.read(self._starts[0])
        try:
            self.columns = self._values(header.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise JobError(f"tasks.args.path: {path}: its header is not UTF-8; save the file as UTF-8") from None
        if twice := [name for name in dict.fromkeys(self.columns) if self.columns.count(name) > 1]:
            raise JobError(f"tasks.args.path: {path} has several columns {twice[0]!r}; rename all but one")
        if len(self.columns) == 1 and (others := [one for one in (";", "\t", "|", ",") if one in self.columns[0]]):
            raise JobError(
                f"tasks.args.path: {path} has one column, {self.columns[0]!r}: its values seem to be separated by "
                f"{others[0]!r}; .csv is read with commas, and .tsv with tabs"
            )

    def __getitem__(self, number: int) -> Row:
        values = self._values(self._record(number))
        if len(values) != len(self.columns):
            raise ValueError(
                f"{self._path}, row {number + 1}: has {len(values)} values for {len(self.columns)} columns (one "
                f"with {self._delimiter!r} or a line's end in it stands in double quotes)"
            )
        return dict(zip(self.columns, values, strict=True))

    def _values(self, record: str) -> list[str]:
        return next(csv.reader(io.StringIO(record, newline=""), delimiter=self._delimiter), [])


def _record_starts(path: Path) -> Iterator[int]:
    """Where records begin, the header left out. One goes on over a line's end while a quote is open."""
    at, quotes, header = 0, 0, True
    with path.open("rb") as file:
        for line in file:
            if quotes % 2 == 0 and line.strip():
                if not header:
                    yield at
                header = False
            quotes += line.count(b'"')
            at += len(line)
    yield at


class ArrowFile:
    """Rows of an Arrow table, wherever its memory is."""

    def __init__(self, table: Any, name: str) -> None:
        self._table = table
        self.name = name
        self.columns: list[str] = list(table.column_names)

    @classmethod
    def of_parquet(cls, path: Path) -> "ArrowFile":
        """Unpacked into a file that has no name any more and goes with the process, and mapped from there."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as parquet
        except ModuleNotFoundError:
            raise JobError(f"tasks.args.path: Parquet needs pyarrow: {install('datasets')}") from None
        try:
            packed = parquet.ParquetFile(path)
        except pa.ArrowException as error:
            raise JobError(f"tasks.args.path: {path} is not Parquet ({error}); correct the path") from None
        with tempfile.NamedTemporaryFile(prefix="rollart-rows-", suffix=".arrow") as file:
            with pa.ipc.new_file(file.name, packed.schema_arrow) as out:
                for batch in packed.iter_batches(batch_size=1024):
                    out.write_batch(batch)
            table = pa.ipc.open_file(pa.memory_map(file.name)).read_all()
        if not len(table):
            raise JobError(f"tasks.args.path: {path} has no rows; give one that has")
        return cls(table, str(path))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> Row:
        row: Row = self._table.slice(number, 1).to_pylist()[0]
        return row


def _of_hugging_face(path: str, key: str, split: str, split_key: str, config: str) -> Rows:
    """A directory that `save_to_disk` wrote, one of data files, or a name on the hub; mapped from `datasets`' cache."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise JobError(
            f"tasks.args.{key}: {path} is no .jsonl, .csv, .tsv or .parquet file, and other datasets are read by "
            f"`datasets`: {install('datasets')}"
        ) from None
    try:
        if (Path(path) / "state.json").exists() or (Path(path) / "dataset_dict.json").exists():
            found: Any = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, config or None)
    except Exception as error:  # the boundary to `datasets`, whose errors are of many libraries
        near = f"; a directory is written ./{path}" if Path(path).is_dir() and not Path(path).is_absolute() else ""
        raise JobError(
            f"tasks.args.{key}: datasets cannot load {path} ({type(error).__name__}: {error}); give a file, the "
            f"directory of a dataset, or a name on the hub{near}"
        ) from None
    if isinstance(found, datasets.DatasetDict):
        wanted = split or "train"
        if wanted not in found:
            raise JobError(f"tasks.args.{split_key}: {path} has no split {wanted!r}; it has {', '.join(found)}")
        found = found[wanted]
    elif split:
        raise JobError(
            f"tasks.args.{split_key}: {path} has no splits, so not {split!r}; remove it, or write column=value"
        )
    if not len(found):
        raise JobError(f"tasks.args.{key}: {path} has no rows; give one that has")
    return _Mapped(found, path)


class _Mapped:
    """A `datasets.Dataset`: memory-mapped already."""

    def __init__(self, found: Any, name: str) -> None:
        self._found = found
        self.name = name
        self.columns: list[str] = list(found.column_names)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, number: int) -> Row:
        row: Row = self._found[number]
        return row
